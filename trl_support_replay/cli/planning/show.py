"""Prints a plan."""

from __future__ import annotations

from .memory import GIB
from .plan import Plan


def show_plan(plan: Plan) -> None:
    """Settings, memory and warnings, on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    for name, value in plan.settings:
        console.print(f"{name:<10} {value}", soft_wrap=True)
    table = Table(title="memory of one process, estimated", title_justify="left")
    table.add_column("")
    table.add_column("memory", justify="right")
    table.add_column("of")
    for item in plan.items:
        table.add_row(item.name, size(item.bytes), item.note + (", on the host" if item.on_host else ""))
    total = f"of {plan.device_memory:.0f} GiB a device" if plan.device_memory is not None else "on the device"
    table.add_section()
    table.add_row("together", size(plan.device_bytes), total + f", and {size(plan.host_bytes)} on the host")
    console.print(table)
    for warning in plan.warnings:
        console.print(f"look at: {warning}", soft_wrap=True)
    console.print("Dry run: nothing was loaded or started.")


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"
