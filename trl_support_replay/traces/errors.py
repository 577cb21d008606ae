"""The error for saved traces that cannot be used."""

from __future__ import annotations


class TraceSchemaError(ValueError):
    """Columns that are not traces, that contradict each other, or whose bytes are damaged."""
