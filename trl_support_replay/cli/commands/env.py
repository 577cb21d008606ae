"""Versions, what can be replayed on this machine, and why not.

Ends with exit status 1 when something is missing or out of range.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ...libraries.environment import EnvironmentReport, report
from ._arguments import option, read_options


@dataclass(kw_only=True)
class Options:
    json: bool = option("print the report as JSON", False, bool)


def main(argv: Sequence[str]) -> int:
    """Print the report as tables, or as JSON; 1 when a version is out of range."""
    options = read_options(Options, argv, "env", __doc__, "trl-support-replay env --json")
    found = report()
    if options.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _print(found)
    return 0 if found.ok else 1


def _print(found: EnvironmentReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)  # brackets are those of extras
    packages = Table(title=f"trl-support-replay {found.version}, device: {found.device}", title_justify="left")
    for heading in ("package", "installed", "supported", "", "to install"):
        packages.add_column(heading, overflow="fold")
    for package in found.packages:
        installed = f"{package.version} ({package.distribution})" if package.distribution else "-"
        if package.distribution in (package.name, None):
            installed = package.version or "-"
        state = "ok" if package.usable else "optional" if package.ok else "missing"
        if package.version and not package.ok:
            state = "out of range"
        packages.add_row(package.name, installed, package.supported, state, package.remedy)
    console.print(packages)
    capabilities = Table(title="what works here", title_justify="left")
    for heading in ("capability", "", "how, or why not"):
        capabilities.add_column(heading, overflow="fold")
    for capability in found.capabilities:
        capabilities.add_row(capability.name, "yes" if capability.available else "no", capability.reason)
    console.print(capabilities)
