"""The page on metrics shows the data that the benchmark of the check wrote."""

import csv

from benchmarks.check_power import DATA, PAGE, START, table
from benchmarks.scorer_report import with_table


def rows():
    with open(DATA, newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_is_that_of_the_data():
    text = PAGE.read_text()
    assert with_table(text, table(rows()), START) == text


def test_no_healthy_batch_stopped_a_run_and_five_percent_of_mass_stopped_all_at_once():
    healthy = [row for row in rows() if row["fault"] == "none"]
    lost = [row for row in rows() if row["fault"] == "5 % of mass lost"]
    assert {row["policy"] for row in healthy} == {"bfloat16", "float32"}
    assert all(row["stops"] == "0" and int(row["batches"]) * int(row["runs"]) == 5_000 for row in healthy)
    assert len(lost) == 4 and all(row["stops"] == row["runs"] and float(row["nine_of_ten"]) == 1 for row in lost)
