"""Train a small real model with replay and without, and compare.

SmolLM2-135M-Instruct learns sums of two numbers at temperature 1, top_k 20 and top_p 0.9: first with support replay,
then with stock TRL, the same steps on the same prompts. Ends with a table, a picture and `summary.json`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ._arguments import command_parser, positive


def main(argv: Sequence[str]) -> int:
    """Run the demo; 130 when it was interrupted, with what was measured until then."""
    parser = command_parser("demo", __doc__, "trl-support-replay demo --steps 3")
    parser.add_argument(
        "--steps", type=positive, default=20, help="optimizer steps of each variant (default: %(default)s)"
    )
    parser.add_argument("--output", default="runs/demo", help="folder for the results (default: %(default)s)")
    parser.add_argument("--models", default="models", help="folder for the model (default: %(default)s)")
    args = parser.parse_args(argv)

    from ..demo.run import run_demo

    return run_demo(steps=args.steps, output=args.output, models=args.models)
