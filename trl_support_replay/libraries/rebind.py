"""Replaces names of another module for the duration of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def rebound(module: Any, **names: Any) -> Iterator[None]:
    """Bind `names` in `module` for the duration of the block; restored also when it raises."""
    saved = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)
