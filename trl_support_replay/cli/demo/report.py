"""What the demo measured: `summary.json`, a table and a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Step = Mapping[str, Any]
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
    """Figures of one variant over its steps; all `None` when it has none.

    `reward_first` and `reward_last` are means over the first and last quarter of the steps. What a variant does not
    record (stock training has no supports) is `None`.
    """
    if not steps:
        return dict.fromkeys(_LABELS)
    quarter = max(1, len(steps) // 4)

    def mean(name: str) -> float | None:
        values = [step[name] for step in steps if step[name] is not None]
        return statistics.fmean(values) if values else None

    return {
        "importance_ratio_mean": mean("importance_ratio_mean"),
        "importance_ratio_outside_10pct": mean("importance_ratio_outside_10pct"),
        "logprob_gap_mean": mean("logprob_gap_mean"),
        "logprob_gap_max": max(step["logprob_gap_max"] for step in steps),
        "reward_first": statistics.fmean(step["reward"] for step in steps[:quarter]),
        "reward_last": statistics.fmean(step["reward"] for step in steps[-quarter:]),
        "step_seconds_median": statistics.median(step["step_seconds"] for step in steps),
        "support_size_mean": mean("support_size_mean"),
        "singleton_fraction": mean("singleton_fraction"),
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
        ("importance_ratio_mean", "sequence importance ratio (1 is unbiased)", "linear"),
        ("logprob_gap_mean", "mean log-prob gap per token (nats)", "log"),
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
