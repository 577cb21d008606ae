"""Weights for servers come from the main process; all processes have to know whether they got there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from ..serving.weights import VersionedWeights


def versions_of_run(folder: str | os.PathLike[str]) -> VersionedWeights:
    """The versions of a new run in a shared folder, under the same names on all processes."""
    (run,) = broadcast_object_list([secrets.token_hex(6)], from_process=0)
    return VersionedWeights(folder, run)


def send_from_main(accelerator: Any, send: Callable[[], None]) -> None:
    """Run `send` on the main process and raise what it raises on all of them, so that none waits in vain.

    Raises:
        RuntimeError: with the message of what `send` raised; on the main process that is its cause.
    """
    error = None
    if accelerator.is_main_process:
        try:
            send()
        except Exception as caught:
            error = caught
    (text,) = broadcast_object_list([None if error is None else str(error)], from_process=0)
    if text is not None:
        raise RuntimeError(f"The weights did not reach the servers: {text}") from error
