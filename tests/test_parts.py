"""Tests that need an optional part are skipped without it, fail where nothing may be skipped, and say how to get it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import PARTS

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.parts import PARTS, Part, module_that_needs

PARTS["absent"] = Part("fetch absent", ("no-such-distribution",), ("no-such-program",))
PARTS["python"] = Part("", ("no-such-distribution",), ("python3",))
PARTS["pip"] = Part("", ("pytest",), ("no-such-program",))

def pytest_pycollect_makemodule(module_path, parent):
    names = ("absent",) if module_path.name == "test_of_a_room.py" else ("python", "pip")
    return module_that_needs(*names, module_path=module_path, parent=parent)
"""
TESTS = """
import pytest
from tests.parts import require

@pytest.fixture
def engine():
    require("python", "absent")

@pytest.mark.needs("pip", "python")
def test_with_its_parts():
    pass

@pytest.mark.needs("python", "absent")
def test_marked():
    raise AssertionError("ran")

def test_with_a_fixture(engine):
    raise AssertionError("ran")

@pytest.mark.parametrize("value", [pytest.param(0, marks=pytest.mark.needs("absent")), 1])
def test_one_value(value):
    assert value
"""
IMPORTS = "import no_such_module\n"


@pytest.fixture
def suite(tmp_path):
    """`suite(option, ..., strict=..., name=contents, ...)`: exit status and output of pytest on these modules."""

    def run(*options, strict=False, **modules):
        (tmp_path / "conftest.py").write_text(CONFTEST)
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "REQUIRE_ALL_PARTS": str(int(strict))}
        command = [sys.executable, "-m", "pytest", "-ra", "-p", "tests.parts", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run


def test_without_a_part_tests_are_skipped_with_the_reason(suite):
    module = "from tests.parts import require\nrequire('absent')\n" + IMPORTS
    code, output = suite(test_suite=TESTS, test_of_a_room=IMPORTS, test_module=module)
    assert code == 0 and "2 passed, 5 skipped" in output, output
    reasons = re.findall(r"SKIPPED \[(\d)\] \S+ (.*)", output)
    assert sum(int(count) for count, _ in reasons) == 5, output
    assert {reason for _, reason in reasons} == {"needs absent, which is not installed: fetch absent"}


def test_where_no_part_may_be_missing_a_skip_is_a_failure(suite):
    skipped = "\n@pytest.mark.skip(reason='for another reason')\ndef test_skipped():\n    pass\n"
    options = "--continue-on-collection-errors"
    code, output = suite(options, strict=True, test_suite=TESTS + skipped, test_of_a_room=IMPORTS)
    assert code == 1 and "2 passed, 5 errors" in output, output
    refused = "REQUIRE_ALL_PARTS=1 lets no test be skipped. Skipped: "
    reports = output.partition("short test summary info")[0]  # where CI is set, the summary repeats them in full
    assert reports.count(refused + "needs absent, which is not installed: fetch absent") == 4, output
    assert reports.count(refused + "for another reason") == 1, output


def test_a_part_that_nobody_knows_is_an_error(suite):
    code, output = suite(test_suite="import pytest\n@pytest.mark.needs('vlm')\ndef test_it():\n    pass\n")
    assert code == 4 and re.search(r"test_it needs \['vlm'\]. Known parts: vllm, ", output), output


def imported_at_the_top(path):
    """Names of the packages that a file imports at its top, as far as its first `require(...)`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("require("):
            return
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_no_test_imports_an_optional_part_at_its_top():
    """Else it could not be collected, and so not be skipped. The Megatron room is skipped as a whole."""
    names = {name.replace("-", "_") for part in PARTS.values() for name in part.distributions}
    names |= {"megatron", "bitsandbytes", "matplotlib"}
    for path in (ROOT / "tests").rglob("*.py"):
        if path.parent.name != "megatron":
            found = names & set(imported_at_the_top(path))
            assert not found, f"{path.relative_to(ROOT)} imports {found}: do it in the test or fixture that needs it"


@pytest.fixture
def install(tmp_path):
    """`install(programs, user)`: what scripts/install_programs.sh does where only these programs are."""

    def run(programs, user=0):
        log = tmp_path / "log"
        bodies = {"id": f"echo {user}", "apt-get": f'echo "$*" >> {log}'}
        for name in (*programs, "id"):
            (tmp_path / name).write_text(f"#!/bin/sh\n{bodies.get(name, '')}\n")
            (tmp_path / name).chmod(0o755)
        script = ROOT / "scripts" / "install_programs.sh"
        done = subprocess.run(["/bin/bash", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
        return done.returncode, done.stderr, log.read_text().splitlines() if log.exists() else []

    return run


@pytest.mark.parametrize("browser", ["chromium", "chromium-browser", "google-chrome"])
def test_nothing_is_installed_on_a_machine_that_has_the_programs(install, browser):
    assert install([browser, "nginx", "apt-get"], user=1000) == (0, "", [])


def test_what_is_missing_is_installed(install):
    code, _, (update, command) = install(["nginx", "apt-get"])
    assert code == 0 and update.startswith("update") and command.endswith(" chromium"), command


def test_who_cannot_install_is_told_what_to_do(install):
    code, errors, called = install(["apt-get"], user=1000)
    assert code == 1 and not called and "Run as root: apt-get install chromium nginx-light" in errors


def test_without_apt_the_message_says_what_is_needed(install):
    code, errors, _ = install(["chromium"])
    assert code == 1 and "need nginx-light, and there is no apt-get here" in errors
