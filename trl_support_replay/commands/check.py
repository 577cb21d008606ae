"""Read a TRL script or configuration: what support replay would do with it, and what it does without.

Nothing in the file is run. Ends with exit status 1 when a setting would be refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cli import CommandError

_MASSES = (0.9, 0.95, 0.99)


def main(argv: Sequence[str]) -> int:
    """Print a verdict for each configuration in the file; 1 when something would be refused."""
    parser = argparse.ArgumentParser(
        prog="trl-support-replay check",
        description=__doc__,
        epilog="example: trl-support-replay check train.py --kept-mass 0.9 --length 200",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="Python script, YAML for --config, or shell script with `trl grpo`")
    parser.add_argument(
        "--kept-mass",
        type=float,
        nargs="+",
        metavar="MASS",
        help="probability that truncation keeps, a token: what today's ratios are off by is computed for each "
        f"(default: {' '.join(map(str, _MASSES))})",
    )
    parser.add_argument("--length", type=int, help="tokens of a completion (default: max_completion_length)")
    args = parser.parse_args(argv)
    for mass in args.kept_mass or ():
        if not 0 < mass <= 1:
            raise CommandError(f"--kept-mass {mass:g} is not a probability in (0, 1].")
    if args.length is not None and args.length < 1:
        raise CommandError(f"--length {args.length} is not a number of tokens.")

    from ..migration.reading import read_settings
    from ..migration.verdict import judge

    refused = False
    for number, found in enumerate(read_settings(args.file)):
        verdict = judge(found.values, found.algorithm)
        refused |= bool(verdict.refused)
        print(("" if number == 0 else "\n") + f"{found.where}: {_summary(verdict)}")
        for error in verdict.refused:
            print(f"  refused: {error}")
        for name, text in found.unknown.items():
            print(f"  not read: {name}={text}, which only a run would tell")
        if verdict.sampling.truncates:
            length = args.length or found.values.get("max_completion_length") or 512
            for line in _today(verdict, args.kept_mass or _MASSES, length):
                print(f"  {line}")
            for line in _changes(found):
                print(f"  {line}")
    return 1 if refused else 0


def _summary(verdict: Any) -> str:
    if not verdict.sampling.truncates:
        return "nothing is truncated, so there is nothing to replay; training would be stock GRPO."
    if verdict.refused:
        return f"{verdict.sampling} would be replayed, but for what is refused."
    return f"{verdict.sampling} would be replayed."


def _today(verdict: Any, masses: Sequence[float], length: int) -> list[str]:
    from ..migration.verdict import sequence_factor

    if verdict.corrects is None:
        return [
            "today: no ratio of policy to sampler is taken; log-probs run over the whole vocabulary, and not over the "
            "support that was sampled from."
        ]
    lines = []
    if verdict.sampling.top_p < 1:
        lines.append(
            f"top_p={verdict.sampling.top_p:g} keeps at least {verdict.sampling.top_p:g} of each token's mass."
        )
    for mass in masses:
        if verdict.corrects == "token":
            lines.append(f"today, with {mass:g} of the mass kept: each token's ratio is multiplied by {mass:g}.")
        else:
            factor = sequence_factor(mass, length)
            lines.append(
                f"today, with {mass:g} of the mass kept: the ratio of a sequence of {length} tokens is multiplied by "
                f"{mass:g}^{length} = {factor:.3g}."
            )
    return lines


def _changes(found: Any) -> list[str]:
    from ..migration.reading import replaced_import

    lines = []
    for line, text in found.imports:
        if not text.startswith("from trl_support_replay"):
            lines += [f"line {line}: {text}", f"becomes: {replaced_import(text)}"]
    if not found.imports:
        lines.append("run it with `trl-support-replay grpo` in the place of `trl grpo`.")
    if found.values.get("use_vllm") and found.values.get("vllm_mode") == "server":
        lines.append("start the server with `trl-support-replay vllm-serve MODEL`, which carries supports.")
    return lines
