"""Errors that belong to no room: what a command tells its user without a traceback."""

from __future__ import annotations


class CommandError(ValueError):
    """Something that the user can put right; its message is all that is shown."""
