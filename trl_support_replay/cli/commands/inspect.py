"""Look at saved traces: schema, counts, support sizes, and what is wrong with them.

Exits with 1 when a trace breaks an invariant, naming file, row and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._arguments import option, positive, read_options


@dataclass(kw_only=True)
class Options:
    traces: str = option("folder of shards, Parquet file, or dataset saved to disk", main=True)
    problems: int = option("how many problems to list", 5, positive)


def main(argv: Sequence[str]) -> int:
    """Print what the traces hold; 1 when something is wrong with them."""
    args = read_options(Options, argv, "inspect", __doc__, "trl-support-replay inspect runs/traces")

    from rich.console import Console
    from rich.table import Table

    from ...traces.columns import TraceSchemaError
    from ...traces.reading import trace_tables, traces_of
    from ...traces.routes import RoutesError
    from ...traces.sampling import sampling_temperatures
    from ...traces.support import SupportError

    console = Console(markup=False)  # brackets in names are brackets
    problems: list[str] = []
    sizes: list[np.ndarray] = []
    counts = dict.fromkeys(("files", "traces", "prompt tokens", "completion tokens", "loss-bearing tokens"), 0)
    schema = None
    origins: set[tuple[str, str]] = set()
    for name, table in trace_tables(args.traces):
        counts["files"] += 1
        schema = schema or table.schema
        try:
            if table.column_names.count("sampling") == 1:  # `traces_of` names columns that occur twice
                sampling_temperatures(table, name)
        except TraceSchemaError as error:
            problems.append(str(error))
        try:
            traces = traces_of(name, table)
        except (TraceSchemaError, SupportError, RoutesError) as error:
            problems.append(str(error))
            continue
        for i, trace in enumerate(traces):
            counts["traces"] += 1
            counts["prompt tokens"] += len(trace.prompt_ids)
            counts["completion tokens"] += len(trace.completion_ids)
            counts["loss-bearing tokens"] += int(trace.loss_mask.sum())
            try:
                trace.check(f"{name}, row {i}")
            except (TraceSchemaError, SupportError) as error:
                problems.append(str(error))
            sizes.append(trace.supports.sizes[trace.supports.sizes > 0])
        for column in ("model", "sampling", "engine"):
            if column in table.column_names:
                origins |= {(column, str(value)) for value in map(str, table[column].to_pylist())}

    if schema is not None:
        columns = Table("column", "type", title="schema")
        for field in schema:
            columns.add_row(field.name, str(field.type))
        console.print(columns)
    for column, value in sorted(origins):
        console.print(f"{column}: {value}", highlight=False)
    console.print(", ".join(f"{value:,} {name}" for name, value in counts.items()), highlight=False)
    if sizes:
        _histogram(console, np.concatenate(sizes))
    for problem in problems[: args.problems]:
        console.print(f"problem: {problem}", style="red", highlight=False, markup=False)
    if len(problems) > args.problems:
        console.print(f"... and {len(problems) - args.problems} more problems", style="red")
    return 1 if problems else 0


def _histogram(console, sizes: np.ndarray) -> None:
    """Support sizes in powers of two, with bars."""
    if not len(sizes):
        return
    console.print(f"support size: mean {sizes.mean():.2f}, median {np.median(sizes):.0f}, largest {sizes.max()}")
    edges = [1, 2]
    while edges[-1] <= sizes.max():
        edges.append(edges[-1] * 2)
    counts, _ = np.histogram(sizes, bins=edges)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        label = str(low) if high == low + 1 else f"{low}-{high - 1}"
        bar = "█" * round(40 * count / counts.max())
        console.print(f"{label:>12}  {count / counts.sum():6.1%}  {bar}", highlight=False)
