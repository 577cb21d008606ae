"""Reports what the demo measured: `summary.json`, a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

Step = Mapping[str, Any]
"""What a step logged, by name."""
RATIO, GAP = "sampling/importance_sampling_ratio_raw/mean", "support/logprob_gap_mean"
_LABELS = {
    "importance_ratio_mean": "importance ratio, mean",
    "importance_ratio_outside_10pct": "ratios outside 0.9 to 1.1",
    "logprob_gap_mean": "log-prob gap, mean (nats)",
    "logprob_gap_max": "log-prob gap, largest (nats)",
    "reward_first": "reward, first quarter",
    "reward_last": "reward, last quarter",
    "step_seconds_median": "seconds per step, median",
    "support_size_mean": "support size, mean",
    "singleton_fraction": "supports of one token",
}


def summarize(steps: Sequence[Step]) -> dict[str, float | None]:
    """Figures of one variant over the metrics that it logged in each step.

    `reward_first` and `reward_last` are means over the first and last quarter of the steps. What was not measured is
    `None`, as supports are in stock training.
    """
    quarter = max(1, len(steps) // 4)

    def of(reduce: Callable[[list[float]], float], name: str, chosen: Sequence[Step] = steps) -> float | None:
        values = [step[name] for step in chosen if step.get(name) is not None]
        return reduce(values) if values else None

    return {
        "importance_ratio_mean": of(fmean, RATIO),
        "importance_ratio_outside_10pct": of(fmean, "sampling/outside_10pct"),
        "logprob_gap_mean": of(fmean, GAP),
        "logprob_gap_max": of(max, "support/logprob_gap_max"),
        "reward_first": of(fmean, "reward", steps[:quarter]),
        "reward_last": of(fmean, "reward", steps[-quarter:]),
        "step_seconds_median": of(median, "step_time"),
        "support_size_mean": of(fmean, "support/size_mean"),
        "singleton_fraction": of(fmean, "support/singleton_fraction"),
    }


def write_summary(
    path: Path, steps: Mapping[str, Sequence[Step]], settings: Mapping[str, Any], versions: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `summary.json` and return what is in it."""
    summary = {
        "replay": summarize(steps.get("replay", [])),
        "stock": summarize(steps.get("stock", [])),
        "settings": dict(settings),
        "versions": dict(versions),
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def print_table(summary: Mapping[str, Any]) -> None:
    """The two variants side by side."""
    from rich.console import Console
    from rich.table import Table

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"

    table = Table(title="GRPO with and without support replay")
    table.add_column("")
    table.add_column("replay", justify="right")
    table.add_column("stock TRL", justify="right")
    for name, label in _LABELS.items():
        table.add_row(label, cell(summary["replay"][name]), cell(summary["stock"][name]))
    Console().print(table)


def plot(path: Path, steps: Mapping[str, Sequence[Step]]) -> None:
    """Ratio, gap and reward of both variants over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (RATIO, "sequence importance ratio (1 is unbiased)", "linear"),
        (GAP, "mean log-prob gap per token (nats)", "log"),
        ("reward", "mean reward", "linear"),
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.8), layout="constrained")
    styles = {"replay": ("#1b6ca8", "support replay"), "stock": ("#c8553d", "stock TRL")}
    for axis, (name, title, scale) in zip(axes, panels, strict=True):
        for variant, (color, label) in styles.items():
            points = steps.get(variant, [])
            axis.plot(
                [s["step"] for s in points], [s[name] for s in points], color=color, marker="o", ms=3, label=label
            )
        axis.set_title(title, fontsize=10)
        axis.set_yscale(scale)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
