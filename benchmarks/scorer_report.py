"""The table and the figure of docs/cost.md, from the data that `benchmarks.scorer` wrote.

    python -m benchmarks.scorer_report
    python -m benchmarks.scorer_report --data benchmarks/data/scorer.csv --page docs/cost.md

Writes the table between the page's two marks, and the figure beside it.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .scorer import DATA
from .scorer_baselines import BASELINES

PAGE = Path(__file__).parents[1] / "docs" / "cost.md"
FIGURE = PAGE.parent / "figures" / "scorer.png"
START, END = "<!-- table: python -m benchmarks.scorer_report -->", "<!-- end of the table -->"
SUPPORTS = {
    "realistic": "realistic",
    "k20": "20 ids each",
    "k64": "64 ids each",
    "wide": "one of 20,000 among singletons",
}
_CASE = ("vocab", "hidden", "supports", "head", "tokens", "ids", "threads", "device", "processor")
_COLOURS = {"gather": "tab:green", "chunks": "tab:olive", "gemm": "tab:gray", "trl": "tab:red"}


def read(path: Path) -> list[dict[str, Any]]:
    """One entry a size, kind of support, head and machine, with the measurements by contender."""
    cases: dict[tuple[str, ...], dict[str, Any]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in _CASE)
            case = cases.setdefault(key, row | {"of": {}})
            case["of"][row["contender"]] = {
                "seconds": float(row["seconds_median"]),
                "mib": float(row["peak_mib"]),
            }
    return list(cases.values())


def times(case: dict[str, Any], contender: str) -> float:
    """How many times as long as replay a contender takes."""
    return case["of"][contender]["seconds"] / case["of"]["replay"]["seconds"]


def beside_gradient(case: dict[str, Any], contender: str) -> float:
    """MiB above the inputs and above the gradient of a trained weight."""
    gradient = int(case["vocab"]) * int(case["hidden"]) * 4 / 2**20 if case["head"] == "trained" else 0.0
    return case["of"][contender]["mib"] - gradient


def table(cases: Iterable[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| vocabulary | width | supports | head | replay | `gather` | `chunks` | `gemm` | TRL | memory: replay, TRL |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        seconds = case["of"]["replay"]["seconds"]
        others = " | ".join(f"{times(case, name):,.{0 if times(case, name) >= 10 else 1}f} ×" for name in _COLOURS)
        memory = f"{beside_gradient(case, 'replay'):,.0f} MiB, {beside_gradient(case, 'trl'):,.0f} MiB"
        lines.append(
            f"| {int(case['vocab']):,} | {int(case['hidden']):,} | {SUPPORTS[case['supports']]} | {case['head']} "
            f"| {seconds * 1e3:,.0f} ms | {others} | {memory} |"
        )
    return "\n".join(lines)


def plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Time of each contender over that of replay, a row a case, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained", sharex=True)
    for axis, head in zip(axes, ("trained", "frozen"), strict=True):
        of_head = [case for case in cases if case["head"] == head]
        for contender, colour in _COLOURS.items():
            axis.scatter([times(c, contender) for c in of_head], range(len(of_head)), color=colour, label=contender)
        names = [f"{int(c['vocab']):,} × {int(c['hidden']):,}, {SUPPORTS[c['supports']]}" for c in of_head]
        axis.set_yticks(range(len(of_head)), names, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1, color="black", lw=1)
        axis.set_xscale("log")
        axis.set_xlabel("times as long as replay")
        axis.set_title(f"{head} head", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def with_table(text: str, rows: str, start_mark: str = START) -> str:
    """A page with the table between its marks.

    Raises:
        ValueError: a page without them.
    """
    before, start, rest = text.partition(start_mark)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"The page lacks the marks {start_mark!r} and {END!r}.")
    return f"{before}{start_mark}\n\n{rows}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA / "scorer.csv")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    cases = [case for case in read(args.data) if {"replay", *BASELINES} <= case["of"].keys()]
    if not cases:
        parser.error(f"{args.data} has no case with all of replay, {', '.join(BASELINES)}: measure them first")
    args.page.write_text(with_table(args.page.read_text(), table(cases)))
    plot(cases, FIGURE)
    least = {name: min(times(case, name) for case in cases) for name in BASELINES}
    print(", ".join(f"{name}: at least {value:.1f} times replay" for name, value in least.items()))


if __name__ == "__main__":
    main()
