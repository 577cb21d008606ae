"""Prints an audit in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Verdict, parts of the gap and findings of a report."""
    chosen = f" of {report['num_saved']:,}" if report["num_saved"] != report["num_traces"] else ""
    console.print(
        f"{report['num_traces']:,}{chosen} traces, {report['num_tokens']:,} recorded tokens, "
        f"{report['num_singletons']:,} of them the only one in their support",
        highlight=False,
    )
    table = Table(title="gap between training and rollout, nats per token")
    table.add_column("part", no_wrap=True)
    for name in ("mean |gap|", "median", "99 %", "largest", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    absent = {"staleness": not report["has_sampler"], "routes": not report["routes"]}
    for name, part in report["parts"].items():
        if not absent.get(name):
            figures = [part[key] for key in ("mean_abs", "median", "p99", "max_abs", "mean")]
            table.add_row(name, *map(_cell, figures), end_section=name == "total")
    console.print(table)
    for finding in report["findings"]:
        mark = "[red]fault[/]" if finding["fault"] else "[green]replayed[/]"
        console.print(f"{mark} ", end="")
        console.print(finding["sentence"], highlight=False, markup=False)
    if report["verdict"] not in (finding["sentence"] for finding in report["findings"]):
        console.print(report["verdict"], style="bold", highlight=False, markup=False)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"
