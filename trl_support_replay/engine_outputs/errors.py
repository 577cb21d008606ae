"""What is raised when an engine's answer lacks supports."""

from __future__ import annotations


class SupportCaptureError(RuntimeError):
    """An engine's answer does not hold the supports that were asked for."""
