"""Environments for processes that tests start."""

from __future__ import annotations

import os

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without the process group that an engine of the session has made here."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED} | more
