"""Prints a plan."""

from __future__ import annotations

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
    table.add_column("GiB", justify="right")
    table.add_column("of")
    for item in plan.items:
        table.add_row(item.name, f"{item.gib:.2f}", item.note + (", on the host" if item.on_host else ""))
    total = f"of {plan.device_memory:.0f} GiB a device" if plan.device_memory is not None else "on the device"
    table.add_section()
    table.add_row("together", f"{plan.device_gib:.2f}", total + f", and {plan.host_gib:.2f} on the host")
    console.print(table)
    for warning in plan.warnings:
        console.print(f"look at: {warning}", soft_wrap=True)
    console.print("Dry run: nothing was loaded or started.")
