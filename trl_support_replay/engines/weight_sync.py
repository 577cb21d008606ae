"""Sends weights to servers from the main process, and tells all processes whether they got there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from ..client.weights import VersionedWeights


def versions_of_run(accelerator: Any, folder: str | os.PathLike[str]) -> VersionedWeights:
    """The versions of a new run in a shared folder, under the same names on all processes, and claimed.

    Raises:
        RuntimeError: on all processes, when the main one cannot write to the folder.
    """
    (run,) = broadcast_object_list([secrets.token_hex(6)], from_process=0)
    weights = VersionedWeights(folder, run)
    on_main(accelerator, weights.claim, f"The folder {folder} cannot take the weights")
    return weights


def on_main(accelerator: Any, work: Callable[[], None], failure: str = "The weights did not reach the servers") -> None:
    """Run `work` on the main process and raise what it raises on all of them, so that none waits in vain.

    Raises:
        RuntimeError: `failure` and the message of what `work` raised, which is its cause on the main process.
    """
    error = None
    if accelerator.is_main_process:
        try:
            work()
        except Exception as caught:
            error = caught
    (text,) = broadcast_object_list([None if error is None else str(error)], from_process=0)
    if text is not None:
        raise RuntimeError(f"{failure}: {text}") from error
