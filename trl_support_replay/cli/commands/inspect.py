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

    from ...traces.survey import survey_traces

    console = Console(markup=False)  # brackets in names are brackets
    found = survey_traces(args.traces)
    columns = Table("column", "type", title="schema")
    for field in found.schema:
        columns.add_row(field.name, str(field.type))
    console.print(columns)
    for column, values in found.origins.items():
        for value in sorted(values):
            console.print(f"{column}: {value}", highlight=False)
    console.print(", ".join(f"{value:,} {name}" for name, value in found.counts.items()), highlight=False)
    if len(found.sizes):
        _histogram(console, found.sizes)
    for problem in found.problems[: args.problems]:
        console.print(f"problem: {problem}", style="red", highlight=False, markup=False)
    if len(found.problems) > args.problems:
        console.print(f"... and {len(found.problems) - args.problems} more problems", style="red")
    return 1 if found.problems else 0


def _histogram(console, sizes: np.ndarray) -> None:
    """Support sizes in powers of two, with bars."""
    console.print(f"support size: mean {sizes.mean():.2f}, median {np.median(sizes):.0f}, largest {sizes.max()}")
    edges = [1, 2]
    while edges[-1] <= sizes.max():
        edges.append(edges[-1] * 2)
    counts, _ = np.histogram(sizes, bins=edges)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        label = str(low) if high == low + 1 else f"{low}-{high - 1}"
        bar = "█" * round(40 * count / counts.max())
        console.print(f"{label:>12}  {count / counts.sum():6.1%}  {bar}", highlight=False)
