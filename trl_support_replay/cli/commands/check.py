"""Read a TRL script or configuration: what support replay would do with it, and what it does without.

Nothing in the file is run. Ends with exit status 1 when a setting would be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._arguments import command_parser, mass, positive

_MASSES = (0.9, 0.95, 0.99)


def main(argv: Sequence[str]) -> int:
    """Print a verdict for each configuration in the file; 1 when something would be refused."""
    parser = command_parser("check", __doc__, "trl-support-replay check train.py --kept-mass 0.9 --length 200")
    parser.add_argument("file", type=Path, help="Python script, YAML for --config, or shell script with `trl grpo`")
    parser.add_argument(
        "--kept-mass",
        "--kept_mass",
        type=mass,
        nargs="+",
        metavar="MASS",
        help="probability that truncation keeps per token; what today's ratios are off by is computed for each "
        f"(default: {' '.join(map(str, _MASSES))})",
    )
    parser.add_argument("--length", type=positive, help="tokens of a completion (default: max_completion_length)")
    args = parser.parse_args(argv)

    from ..migration.reading import read_settings
    from ..migration.verdict import judge

    refused = False
    for number, found in enumerate(read_settings(args.file)):
        verdict = judge(found.values, found.algorithm)
        refused |= bool(verdict.refused)
        print(("" if number == 0 else "\n") + f"{found.where}: {_summary(verdict)}")
        for error in verdict.refused:
            print(f"  refused: {error}")
        for name, close in verdict.misspelt.items():
            print(f"  unknown: {name}. Did you mean {close}?")
        for name, text in found.unknown.items():
            print(f"  not read: {name}={text}, which only a run would tell")
        if verdict.sampling.truncates:
            written = found.values.get("max_completion_length")
            length = args.length or (written if isinstance(written, int) and written > 0 else 512)
            for line in _ratios(verdict, _masses(args.kept_mass, verdict.sampling.top_p), length, found.moved):
                print(f"  {line}")
            for line in _changes(found):
                print(f"  {line}")
    return 1 if refused else 0


def _summary(verdict: Any) -> str:
    if not verdict.sampling.truncates and verdict.refused:
        return "no token is cut, but scores over the whole vocabulary would be wrong by what is refused."
    if not verdict.sampling.truncates:
        return "no token is cut, so there is nothing to replay; training would be stock GRPO."
    if verdict.refused:
        return f"{verdict.sampling} would be replayed, but for what is refused."
    return f"{verdict.sampling} would be replayed."


def _masses(asked: Sequence[float] | None, top_p: float) -> Sequence[float]:
    """What was asked for; else what `top_p` leaves, and what is usual above it."""
    if asked:
        return asked
    return ([top_p] if top_p < 1 else []) + [mass for mass in _MASSES if top_p == 1 or mass > top_p]


def _ratios(verdict: Any, masses: Sequence[float], length: int, moved: bool) -> list[str]:
    """What the importance ratios are off by, now or, in a script that has moved over, without this package."""
    from ..migration.verdict import sequence_factor

    when = "with TRL's own trainer" if moved else "today"
    if verdict.corrects is None:
        return [
            f"{when}: no ratio of policy to sampler is taken; log-probs run over the whole vocabulary, and not over "
            "the support that was sampled from."
        ]
    lines, sampling = [], verdict.sampling
    if sampling.top_p < 1:
        # Engines cut by top_k first, and take the nucleus of what is left.
        whole = f"what top_k={sampling.top_k} leaves of it" if sampling.top_k > 0 else "it"
        lines.append(f"a token's mass: top_p={sampling.top_p:g} keeps at least {sampling.top_p:g} of {whole}.")
    for kept in masses:
        if verdict.corrects == "token":
            lines.append(f"{when}, with {kept:g} of the mass kept: each token's ratio is multiplied by {kept:g}.")
        else:
            factor = sequence_factor(kept, length)
            lines.append(
                f"{when}, with {kept:g} of the mass kept: the ratio of a sequence of {length} tokens is multiplied by "
                f"{kept:g}^{length} = {factor:.3g}."
            )
    return lines


def _changes(found: Any) -> list[str]:
    from ..migration.reading import replaced_import

    lines = []
    for line, text in found.imports:
        lines += [f"line {line}: {text}", f"becomes: {replaced_import(text)}"]
    if not (found.imports or found.moved) and ".py:" in found.where:
        lines.append(
            f"take SupportReplay{found.algorithm}Config and SupportReplay{found.algorithm}Trainer of "
            "trl_support_replay in the place of trl's classes."
        )
    elif not (found.imports or found.moved):
        lines.append("run it with `trl-support-replay grpo` in the place of `trl grpo`.")
    if found.values.get("use_vllm") and found.values.get("vllm_mode") == "server":
        lines.append("start the server with `trl-support-replay vllm-serve MODEL`, which carries supports.")
    return lines
