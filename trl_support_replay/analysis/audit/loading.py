"""Loads saved traces for an audit: evenly spaced ones, with their origins."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from ...traces.columns import Trace, TraceSchemaError
from ...traces.reading import trace_tables, traces_of
from ...traces.sampling import sampling_temperatures
from ...traces.survey import as_text

ORIGINS = ("model", "model_revision", "sampling", "engine")


@dataclass
class AuditTraces:
    """Traces of one temperature.

    Attributes:
        traces: what is audited.
        temperature: the sampler's.
        steps: `[len(traces)]` training step of each; the number of its shard where the traces have no `step` column.
        step_name: "step" or "shard".
        origins: distinct values of the columns `model`, `model_revision`, `sampling` and `engine`, as text.
        num_saved: how many traces there were to choose from.
    """

    traces: list[Trace]
    temperature: float
    steps: np.ndarray
    step_name: str = "step"
    origins: dict[str, list[str]] = field(default_factory=dict)
    num_saved: int = 0


def load_traces(path: str | os.PathLike[str], limit: int, step: int | None = None) -> AuditTraces:
    """At most `2 * limit - 1` and at least `min(limit, all)` traces of a folder, file or dataset, evenly spaced.

    Every `k`-th trace is kept, `k` the power of two that leaves fewer than `2 * limit`; one shard is in memory at a
    time.

    Args:
        path: folder of shards, Parquet file, or dataset saved to disk.
        limit: see above.
        step: only traces of this training step, or of the shard with this number where there is no `step` column.

    Raises:
        TraceSchemaError: nothing there, or nothing of that step; no `sampling` column, several temperatures, or a
            broken trace; a step that is no number.
    """
    kept: list[tuple[Trace, int]] = []
    seen, stride = 0, 1
    origins: dict[str, set[str]] = {name: set() for name in ORIGINS}
    temperatures: set[float] = set()
    steps: set[int] = set()
    for shard, (name, table) in enumerate(trace_tables(path)):
        temperatures |= sampling_temperatures(table, name)
        for column in ORIGINS:
            if column in table.column_names:
                origins[column] |= {as_text(value) for value in table[column].to_pylist() if value is not None}
        for i, trace in enumerate(traces_of(name, table)):
            sampled_in = trace.extra.get("step", shard)
            if not isinstance(sampled_in, int):
                raise TraceSchemaError(
                    f"{name}, row {i}: step={sampled_in!r} is not the number of a training step. Fill it in, or drop "
                    "the column."
                )
            steps.add(sampled_in)
            if step not in (None, sampled_in):
                continue
            if seen % stride == 0:
                trace.check(f"{name}, row {i}")
                kept.append((trace, sampled_in))
            seen += 1
            if len(kept) == 2 * limit:
                kept, stride = kept[::2], 2 * stride
    if len(temperatures) > 1:
        raise TraceSchemaError(f"The traces mix the temperatures {sorted(temperatures)}; audit them apart.")
    if not kept and steps:
        raise TraceSchemaError(f"{path} has no traces of step {step}; it has steps {min(steps)} to {max(steps)}.")
    if not kept:
        raise TraceSchemaError(f"No traces in {path}.")
    return AuditTraces(
        traces=[trace for trace, _ in kept],
        temperature=temperatures.pop(),
        steps=np.array([step for _, step in kept], dtype=np.int64),
        step_name="step" if "step" in kept[0][0].extra else "shard",
        origins={name: sorted(values) for name, values in origins.items() if values},
        num_saved=seen,
    )
