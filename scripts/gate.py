"""Train two steps of the demo with the real model and engine, and fail if they are not what they have to be.

    python -m scripts.gate           # `make gate`; about a minute on two quiet cores
    python -m scripts.gate --keep    # adds the figures to the history, benchmarks/data/gate.csv

With replay, each figure has to lie within its bounds, and near the median of the history. Without replay, the same
bounds have to be broken: a gate that lets stock training through shows nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trl_support_replay._version import __version__
from trl_support_replay.cli.demo.run import run_demo

HISTORY = Path(__file__).parents[1] / "benchmarks" / "data" / "gate.csv"
STEPS = 2
# Least and largest value of each figure.
BOUNDS = {
    "importance_ratio_mean": (0.999, 1.001),
    "importance_ratio_outside_10pct": (0.0, 0.0),
    "logprob_gap_mean": (0.0, 1e-5),
    "logprob_gap_max": (0.0, 2e-4),
}
# How many times as large or as small as the median of the history a figure may be. Rounding, and with it what is drawn,
# differs between processors.
DRIFT = {"logprob_gap_mean": 3.0, "support_size_mean": 1.5}


def broken_bounds(figures: Mapping[str, float | None]) -> Iterator[str]:
    """A sentence for each figure that is missing or beyond its bounds."""
    for name, (least, largest) in BOUNDS.items():
        value = figures.get(name)
        if value is None or not least <= value <= largest:
            yield f"{name} is {value}; it has to be from {least:g} to {largest:g}."


def drifts(figures: Mapping[str, float | None], history: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """A sentence for each figure that is far from the median of the history."""
    for name, factor in DRIFT.items():
        usual = statistics.median(float(row[name]) for row in history)
        value = figures.get(name)
        if value is None or not usual / factor <= value <= usual * factor:
            yield f"{name} is {value}; its median so far is {usual:g}, and {factor:g} times more or less is allowed."


def judge(summary: Mapping[str, Mapping[str, float | None]], history: Sequence[Mapping[str, str]]) -> list[str]:
    """What is wrong with the demo's `summary.json`; nothing for a run that passes."""
    wrong = [*broken_bounds(summary["replay"]), *drifts(summary["replay"], history)]
    if not any(broken_bounds(summary["stock"])):
        wrong.append("Stock training keeps all bounds, so they would not show a replay that does nothing.")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="add the figures to the history")
    parser.add_argument("--output", default="build/gate", help="folder for the demo's results")
    args = parser.parse_args()
    Path(args.output).mkdir(parents=True, exist_ok=True)
    status = run_demo(steps=STEPS, output=args.output)
    if status:
        return status
    summary = json.loads((Path(args.output) / "summary.json").read_text())
    with HISTORY.open(newline="") as file:
        history = list(csv.DictReader(file))
    wrong = judge(summary, history)
    for sentence in wrong:
        print(f"gate: {sentence}", file=sys.stderr)
    if args.keep and not wrong:
        row = {"version": __version__, **{name: summary["replay"][name] for name in [*BOUNDS, "support_size_mean"]}}
        with HISTORY.open("a", newline="") as file:
            csv.DictWriter(file, list(row), lineterminator="\n").writerow(row)
    print("gate: " + ("failed." if wrong else "passed."))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
