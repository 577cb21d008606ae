"""The gate lets a healthy run through, and nothing else."""

import csv

import pytest

from scripts.gate import HISTORY, judge

HEALTHY = {
    "importance_ratio_mean": 1.0,
    "importance_ratio_outside_10pct": 0.0,
    "logprob_gap_mean": 4e-6,
    "logprob_gap_max": 4e-5,
    "support_size_mean": 6.0,
}
STOCK = {**HEALTHY, "importance_ratio_mean": 0.02, "support_size_mean": None}
PAST = [{"logprob_gap_mean": "4e-6", "support_size_mean": "6.1"}]


def test_a_healthy_run_passes():
    assert judge({"replay": HEALTHY, "stock": STOCK}, PAST) == []


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("importance_ratio_mean", 0.95, "has to be from 0.999 to 1.001"),
        ("importance_ratio_mean", None, "is None"),
        ("importance_ratio_outside_10pct", 0.1, "has to be from 0 to 0"),
        ("logprob_gap_max", 1e-3, "has to be from 0 to 0.0002"),
        ("logprob_gap_mean", float("nan"), "has to be from 0 to 1e-05"),
        ("support_size_mean", 20.0, "its median so far is 6.1"),
        ("support_size_mean", None, "its median so far is 6.1"),
    ],
)
def test_a_figure_out_of_bounds_or_far_from_the_past_fails(name, value, says):
    wrong = judge({"replay": HEALTHY | {name: value}, "stock": STOCK}, PAST)
    assert any(name in sentence and says in sentence for sentence in wrong)


def test_bounds_that_stock_training_keeps_show_nothing():
    assert judge({"replay": HEALTHY, "stock": HEALTHY}, PAST) == [
        "Stock training keeps all bounds, so they would not show a replay that does nothing."
    ]


def test_the_kept_history_is_healthy_itself():
    rows = list(csv.DictReader(HISTORY.open(newline="")))
    assert rows
    for row in rows:
        figures = {name: float(row[name]) for name in HEALTHY}
        assert judge({"replay": figures, "stock": STOCK}, rows) == []
