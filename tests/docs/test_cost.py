"""The page on what scoring costs shows the data that the benchmark wrote."""

import subprocess
import sys

import pytest

from benchmarks.scorer import DATA
from benchmarks.scorer_report import PAGE, beside_gradient, read, table, times, with_table
from tests.docs.pages import ROOT


def test_the_table_is_that_of_the_data():
    cases = read(DATA / "scorer.csv")
    assert len(cases) == 32 and all(times(case, "replay") == 1 for case in cases)
    text = PAGE.read_text()
    assert with_table(text, table(cases)) == text


def test_beside_its_gradient_a_trained_head_takes_what_a_frozen_one_takes_and_little_more():
    cases = read(DATA / "scorer.csv")
    trained, frozen = (
        [beside_gradient(case, "replay") for case in cases if case["head"] == head] for head in ("trained", "frozen")
    )
    assert len(trained) == len(frozen) == 16
    assert all(mine <= other <= 1.4 * mine for mine, other in zip(frozen, trained, strict=True))


def test_pages_that_nothing_was_written_to_are_counted():
    # In a process of its own, as the benchmark measures: here, what other tests leave behind comes and goes meanwhile.
    code = """
import numpy as np, torch
from benchmarks.scorer import untouched_bytes
gradient = torch.from_numpy(np.zeros((64, 2**18), np.float32))  # 64 MiB that the operating system has not given yet
gradient[:32] = 1
print(untouched_bytes(gradient), untouched_bytes(gradient), int(gradient.sum()))
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second, total = map(int, run.stdout.split()[-3:])
    assert first == pytest.approx(32 * 2**20, abs=4 * 2**20)
    assert second < 2**20 and total == 32 * 2**18


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks"):
        with_table("# Page", "| a |")
