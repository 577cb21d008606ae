"""The page on what scoring costs shows the data that the benchmark wrote."""

import pytest

from benchmarks.scorer import DATA
from benchmarks.scorer_report import PAGE, read, table, times, with_table


def test_the_table_is_that_of_the_data():
    cases = read(DATA / "scorer.csv")
    assert len(cases) == 32 and all(times(case, "replay") == 1 for case in cases)
    text = PAGE.read_text()
    assert with_table(text, table(cases)) == text


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="lacks the marks"):
        with_table("# Page", "| a |")
