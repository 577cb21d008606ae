"""Train a small real model with replay and without, and compare.

SmolLM2-135M-Instruct learns sums of two numbers at temperature 1, top_k 20 and top_p 0.9: first with support replay,
then with stock TRL, the same steps on the same prompts. Ends with a table, a picture and `summary.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ._arguments import option, positive, read_options


@dataclass(kw_only=True)
class Options:
    steps: int = option("optimizer steps of each variant", 20, positive)
    output: str = option("folder for the results", "runs/demo")
    models: str = option("folder for the model", "models")


def main(argv: Sequence[str]) -> int:
    """Run the demo; 130 when it was interrupted, with what was measured until then."""
    options = read_options(Options, argv, "demo", __doc__, "trl-support-replay demo --steps 3")

    from ..demo.run import run_demo

    return run_demo(**asdict(options))
