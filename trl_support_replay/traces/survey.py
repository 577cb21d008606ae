"""Surveys saved traces and what is wrong with them, for `inspect` and for the card that `push` writes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from .columns import TraceSchemaError
from .reading import trace_tables, traces_of
from .routes import RoutesError
from .sampling import sampling_temperatures
from .support import SupportError


@dataclass
class TraceSurvey:
    """What there is.

    Attributes:
        counts: number of files, traces, prompt tokens, completion tokens and loss-bearing tokens, by these names.
        sizes: `[N]` size of each recorded support.
        origins: every value of the columns `model`, `sampling` and `engine`, as text.
        schema: of the first file.
        problems: what breaks an invariant, with file, row and token.
    """

    counts: dict[str, int]
    sizes: np.ndarray
    origins: dict[str, set[str]]
    schema: pa.Schema
    problems: list[str] = field(default_factory=list)


def survey_traces(path: str | os.PathLike[str]) -> TraceSurvey:
    """Read and check every trace of a folder of shards, a Parquet file, or a dataset saved to disk.

    Raises:
        TraceSchemaError: there is nothing, or a file is torn.
    """
    counts = dict.fromkeys(("files", "traces", "prompt tokens", "completion tokens", "loss-bearing tokens"), 0)
    found = TraceSurvey(counts, np.zeros(0, np.int64), {"model": set(), "sampling": set(), "engine": set()}, None)
    sizes = [found.sizes]
    for name, table in trace_tables(path):
        counts["files"] += 1
        found.schema = found.schema or table.schema
        try:
            if table.column_names.count("sampling") == 1:  # `traces_of` names columns that occur twice
                sampling_temperatures(table, name)
        except TraceSchemaError as error:
            found.problems.append(str(error))
        try:
            traces = traces_of(name, table)
        except (TraceSchemaError, SupportError, RoutesError) as error:
            found.problems.append(str(error))
            continue
        for i, trace in enumerate(traces):
            counts["traces"] += 1
            counts["prompt tokens"] += len(trace.prompt_ids)
            counts["completion tokens"] += len(trace.completion_ids)
            counts["loss-bearing tokens"] += int(trace.loss_mask.sum())
            sizes.append(trace.supports.sizes[trace.supports.sizes > 0])
            try:
                trace.check(f"{name}, row {i}")
            except (TraceSchemaError, SupportError) as error:
                found.problems.append(str(error))
        for column, values in found.origins.items():
            if column in table.column_names:
                values |= {as_text(value) for value in table[column].to_pylist()}
    found.sizes = np.concatenate(sizes)
    return found


def as_text(value: Any) -> str:
    """A value of a column, as it is shown."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in value.items())
