"""Write requirements/cpu.txt from requirements/cpu.in: `make pins`, which runs this in a fresh environment.

pip resolves without installing anything. torch itself stays out of the result: it is installed before the rest, from
requirements/torch.txt, and brings the CUDA libraries that its build needs, if any.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
# What belongs to one build of torch: the plain one brings CUDA libraries, a CPU one does not.
TORCH_BUILD = re.compile(r"(torch|nvidia-.*|cuda-.*)")


def read_lines(path: Path) -> list[tuple[str, set[str]]]:
    """`(requirement, names of dependencies to leave out)` of each line, with `-r` lines followed."""
    lines: list[tuple[str, set[str]]] = []
    for line in path.read_text().splitlines():
        requirement, _, comment = (part.strip() for part in line.partition("#"))
        if requirement.startswith("-r "):
            lines += read_lines(path.parent / requirement.removeprefix("-r "))
        elif requirement:
            left_out = comment.removeprefix("without:").split() if comment.startswith("without:") else []
            lines.append((requirement, {canonicalize_name(name) for name in left_out}))
    return lines


def resolve(requirements: list[str], *options: str) -> list[dict[str, Any]]:
    """Metadata of the distributions that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--report", "-"]
    result = subprocess.run([*command, *options, *requirements], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(f"pip could not resolve {' '.join(requirements)} (see above).")
    return [item["metadata"] for item in json.loads(result.stdout)["install"]]


def dependencies(metadata: dict[str, Any], left_out: set[str]) -> list[str]:
    """What a distribution asks for on this machine, extras aside."""
    found = [Requirement(line) for line in metadata.get("requires_dist", [])]
    needed = [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]
    names = {canonicalize_name(r.name) for r in needed}
    if unknown := left_out - names:
        raise SystemExit(f"{metadata['name']} does not ask for {', '.join(sorted(unknown))}: mend its line in cpu.in.")
    for requirement in needed:
        requirement.marker = None
    return [str(r) for r in needed if canonicalize_name(r.name) not in left_out]


def main() -> None:
    trimmed: list[dict[str, Any]] = []
    requirements: list[str] = []
    for requirement, left_out in read_lines(REQUIREMENTS / "cpu.in"):
        if left_out:
            (metadata,) = resolve([requirement], "--no-deps")
            trimmed.append(metadata)
            requirements += dependencies(metadata, left_out)
        else:
            requirements.append(requirement)
    resolved = resolve(requirements)
    pins = {
        canonicalize_name(metadata["name"]): metadata["version"]
        for metadata in [*resolved, *trimmed]
        if not TORCH_BUILD.fullmatch(canonicalize_name(metadata["name"]))
    }
    version = ".".join(map(str, sys.version_info[:2]))
    header = f"# By `make pins` from cpu.in, for Python {version}. Install torch.txt first, then this with --no-deps.\n"
    body = "".join(f"{name}=={pins[name]}\n" for name in sorted(pins))
    (REQUIREMENTS / "cpu.txt").write_text(header + body)
    print(f"requirements/cpu.txt: {len(pins)} packages pinned.")


if __name__ == "__main__":
    main()
