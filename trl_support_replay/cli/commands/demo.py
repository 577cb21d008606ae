"""Train a small real model with replay and without, and compare.

SmolLM2-135M-Instruct learns sums of two numbers: first with support replay, then with stock TRL, the same steps on the
same prompts. The task `words` samples an explanation with top_k 20 and top_p 0.9; `json` samples an answer that has to
match a regular expression, and cuts nothing else. Ends with a table, a picture and `summary.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ._arguments import option, positive, read_options


@dataclass(kw_only=True)
class Options:
    task: str = option("words (top_k and top_p) or json (a regular expression)", "words", choices=["words", "json"])
    steps: int = option("optimizer steps of each variant", 20, positive)
    output: str = option("folder for the results", "runs/demo")
    models: str = option("folder for the model", "models")


def main(argv: Sequence[str]) -> int:
    """Run the demo; 130 when it was interrupted, with what was measured until then."""
    options = read_options(Options, argv, "demo", __doc__, "trl-support-replay demo --steps 3")

    from ..demo.run import run_demo

    return run_demo(**asdict(options))
