"""What a run would do and need, found out without weights, data or network: `grpo --dry_run`."""

from .plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
