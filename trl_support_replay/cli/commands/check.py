"""Read a TRL script or configuration: what support replay would do with it, and what it does without.

Nothing in the file is run. Ends with exit status 1 when a setting would be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._arguments import mass, option, positive, read_options

_MASSES = (0.9, 0.95, 0.99)


@dataclass(kw_only=True)
class Options:
    file: Path = option("Python script, or YAML for --config", main=True, kind=Path)
    kept_mass: Sequence[float] = option(
        "probability that truncation keeps per token; what today's ratios are off by is computed for each (default: "
        f"top_p, and those of {' '.join(map(str, _MASSES))} above it)",
        (),
        mass,
        nargs="+",
        metavar="MASS",
    )
    length: int | None = option("tokens of a completion (default: max_completion_length)", None, positive)


def main(argv: Sequence[str]) -> int:
    """Print a verdict for each configuration in the file; 1 when training would stop at a setting."""
    example = "trl-support-replay check train.py --kept_mass 0.9 --length 200"
    options = read_options(Options, argv, "check", __doc__, example)

    from ..migration.reading import read_settings
    from ..migration.verdict import judge

    stops = False
    for number, found in enumerate(read_settings(options.file)):
        verdict = judge(found.args, found.algorithm)
        stops |= bool(verdict.refused or found.unknown)
        print(("" if number == 0 else "\n") + f"{found.where}: {_summary(verdict, found)}")
        for error in verdict.refused:
            print(f"  refused: {error}")
        for name in found.unknown:
            print(f"  unknown: there is no setting {name}.")
        for name, text in found.unread.items():
            print(f"  not read: {name}={text}, which only a run would tell")
        if verdict.sampling.truncates:
            length = options.length or found.args.max_completion_length or 512
            for line in _ratios(verdict, _masses(options.kept_mass, verdict.sampling.top_p), length, found.moved):
                print(f"  {line}")
            for line in _changes(found):
                print(f"  {line}")
    return 1 if stops else 0


def _summary(verdict: Any, found: Any) -> str:
    from ..migration.reading import SAMPLING

    partly = any(name.rsplit(".", 1)[-1] in SAMPLING | {"**"} for name in found.unread)
    known = "as far as it can be read without a run, " if partly else ""
    if verdict.sampling.truncates and verdict.refused:
        return f"{known}{verdict.sampling} can be replayed once the refused settings are changed."
    if verdict.sampling.truncates:
        return f"{known}{verdict.sampling} would be replayed."
    if verdict.refused:
        return f"{known}no token is cut, but training stops at the refused settings: they make its scores wrong."
    return f"{known}no token is cut, so there is nothing to replay; training would be stock {found.algorithm}."


def _masses(asked: Sequence[float], top_p: float) -> Sequence[float]:
    """What was asked for; else what `top_p` leaves, and what is usual above it."""
    if asked:
        return asked
    return ([top_p] if top_p < 1 else []) + [mass for mass in _MASSES if top_p == 1 or mass > top_p]


def _ratios(verdict: Any, masses: Sequence[float], length: int, moved: bool) -> list[str]:
    """What the importance ratios are off by, now or, in a script that has moved over, without this package."""
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
            # The sampler's log-probs run over the mass that is kept, the trainer's over everything.
            lines.append(
                f"{when}, with {kept:g} of the mass kept: the ratio of a sequence of {length} tokens is multiplied by "
                f"{kept:g}^{length} = {kept**length:.3g}."
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
    if found.args.use_vllm and found.args.vllm_mode == "server":
        lines.append("start the server with `trl-support-replay vllm-serve MODEL`, which carries supports.")
    return lines
