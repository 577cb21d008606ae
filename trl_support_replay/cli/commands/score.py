"""Score saved traces with a model, and add the scores as columns.

For each token: `replayed_logprobs` over its recorded support, `full_logprobs` over the vocabulary, `log_mass` of the
support under the model, `support_entropy`, and `reference_logprobs` when a second model is given. A mixture of experts
is scored through the recorded routes in every column. Works shard by shard, so memory does not grow with the traces,
and goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CommandError
from ._arguments import ScoringOptions, option, read_options

_OF_MODEL = {
    "replayed_logprobs": "logprobs",
    "full_logprobs": "full_logprobs",
    "log_mass": "log_mass",
    "support_entropy": "support_entropy",
}
_COLUMNS = {*_OF_MODEL, "reference_logprobs"}
_ROUNDING = 1e-3  # nats
_STEPS_LISTED = 6


@dataclass(kw_only=True)
class Options(ScoringOptions):
    model: str = option("model to score with: a folder or a Hub name")
    reference: str | None = option("second model, for reference_logprobs over the same supports", None)
    output: str = option("folder for the scored shards")


def main(argv: Sequence[str]) -> int:
    """Write a scored shard for each shard, and report how far the scores are from the recorded ones."""
    example = "trl-support-replay score runs/traces --model Qwen/Qwen3-0.6B --output runs/scored"
    args = read_options(Options, argv, "score", __doc__, example)

    import pyarrow as pa
    from rich.progress import Progress

    from ...analysis.audit.token_scores import RecordedTokens, TokenScorer, routes_for
    from ...analysis.models import check_fits, load_model
    from ...traces.reading import read_parquet, trace_tables, traces_of
    from ...traces.record import FolderRecord, fingerprint
    from ...traces.shards import ShardFolder, write_whole

    source, output = Path(args.traces), Path(args.output)
    if output.resolve() in (source.resolve(), source.resolve().parent if source.is_file() else None):
        raise CommandError(
            f"--output {output} is where --traces {source} lie; name another folder for the scored ones."
        )
    ShardFolder(output, "--output")
    decisive = {name: getattr(args, name) for name in ("traces", "model", "reference", "dtype")}
    decisive |= {f"{name}_files": fingerprint(decisive[name]) for name in ("model", "reference") if decisive[name]}
    decisive["routes"] = "recorded"  # earlier versions took those of the live routers
    record = FolderRecord(output / "score.json", "score", decisive)
    record.check()
    options = [option for option in ("model", "reference") if getattr(args, option)]
    models = [load_model(f"--{o}", getattr(args, o), dtype=args.dtype, device=args.device) for o in options]
    record.write()
    scorers: dict[float, list[TokenScorer]] = {}
    said: set[str] = set()
    gaps: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    with Progress() as progress:
        task = progress.add_task("scoring", total=None)
        for name, table in trace_tables(source):
            target = output / (name if name.endswith(".parquet") else f"{name}.parquet")
            temperature = _temperature(table, name)
            traces = traces_of(name, table)
            for i, trace in enumerate(traces):
                trace.check(f"{name}, row {i}")
            if target.exists():
                _same_tokens(table, target, source / name)
            else:
                _check_columns(table, name)
                for option, (model, config) in zip(options, models, strict=True):
                    check_fits(traces, model, config, f"--{option}")
                if temperature not in scorers:
                    scorers[temperature] = [TokenScorer(model, temperature, args.batch_size) for model, _ in models]
                tokens = RecordedTokens.of(traces, unsupported=True)
                for option, scorer in zip(options, scorers[temperature], strict=True):
                    replay, sentence = routes_for(traces, scorer.model)
                    said.add(f"--{option} {sentence}.")
                    scores = scorer.score(tokens, replay)
                    names = _OF_MODEL if option == "model" else {"reference_logprobs": "logprobs"}
                    for column, attribute in names.items():
                        values = tokens.spread(getattr(scores, attribute))
                        table = table.append_column(column, pa.array(values, pa.list_(pa.float32())))
                write_whole(table, target)
            replayed = read_parquet(target, ["replayed_logprobs"])["replayed_logprobs"].to_pylist()
            for trace, values in zip(traces, replayed, strict=True):
                recorded = trace.loss_mask & (trace.supports.sizes > 0)
                gaps.append(np.abs(np.array(values, np.float64) - trace.sampling_logprobs)[recorded])
                steps.append(np.full(len(gaps[-1]), trace.extra.get("step") or 0))
            progress.advance(task, 1)
    for sentence in sorted(said):
        print(sentence)
    if sum(map(len, gaps)):
        _report(np.concatenate(gaps), np.concatenate(steps))
    print(f"scored traces: {output}")
    return 0


def _report(gap: np.ndarray, step: np.ndarray) -> None:
    """How far the scores are from the recorded log-probs.

    Args:
        gap: `[N]` absolute difference of each token, in nats.
        step: `[N]` training step that each was sampled in; all alike where none is recorded.
    """
    print(f"{len(gap):,} tokens: replayed minus recorded log-prob: mean {gap.mean():.2e}, largest {gap.max():.2e}")
    if gap.max() <= _ROUNDING:
        return
    found = np.unique(step)
    if len(found) == 1:
        print(
            "That is more than rounding: other weights than those that sampled, another precision, or a fault. "
            "`trl-support-replay audit` looks for the cause."
        )
        return
    listed = ", ".join(f"{s}: {gap[step == s].mean():.2e}" for s in found[:_STEPS_LISTED].tolist())
    more = f", and {len(found) - _STEPS_LISTED} more" if len(found) > _STEPS_LISTED else ""
    print(f"mean by training step: {listed}{more}")
    print(
        "Traces of later steps were sampled with later weights: one model can only be the one that sampled in one step."
    )


def _same_tokens(table: Any, target: Path, source: Path) -> None:
    """Raise unless the scored shard was made from this table: shards of one name may hold other traces by now."""
    from ...traces.reading import read_parquet

    ids = ["prompt_ids", "completion_ids", "support_ids"]
    if not read_parquet(target, ids).equals(table.select(ids)):
        raise CommandError(f"{target} holds the scores of other traces than {source} does now. Take another --output.")


def _check_columns(table: Any, name: str) -> None:
    taken = sorted(_COLUMNS.intersection(table.column_names))
    if taken:
        raise CommandError(
            f"{name} has columns with the names of scores already: {', '.join(taken)}. Score the traces that it "
            "was made from, or rename them."
        )


def _temperature(table: Any, name: str) -> float:
    from ...traces.columns import TraceSchemaError
    from ...traces.sampling import sampling_temperatures

    found = sampling_temperatures(table, name)
    if len(found) != 1:
        raise TraceSchemaError(f"{name} has traces of {len(found)} temperatures: {sorted(found)}; score them apart.")
    return found.pop()
