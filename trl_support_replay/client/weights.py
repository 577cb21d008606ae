"""Versions of a policy's weights in a folder that trainer and servers share."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Tensors are gathered in memory up to this size before they are written.
_SHARD_BYTES = 2 * 2**30
_NAMED = 5  # versions of other runs that a warning names


class VersionedWeights:
    """Writes versions so that a reader sees a whole one or none.

    A version is a folder of safetensors files. It is written under another name and renamed when it is complete and on
    disk.

    Args:
        folder: the shared folder; created when it is not there.
        run: a name that no other run in this folder has; versions are called `{run}-000001` and so on.
    """

    def __init__(self, folder: str | os.PathLike[str], run: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run = run

    def claim(self) -> None:
        """Remove this run's versions when the process ends, and tell what other runs have left in the folder.

        The last version has to outlive the training: a server that is restarted is told to load it when an evaluation
        follows. A run that was killed leaves its last version behind. Whether another run is at work cannot be known,
        so nothing of others is removed. To be called once, by the process that writes.
        """
        atexit.register(self.remove_before, f"{self._run}.")  # which sorts behind all versions
        others = sorted(entry.name for entry in self.folder.iterdir() if not entry.name.startswith(self._run))
        if others:
            logger.warning(
                "%s holds %s, of other runs. Remove what belongs to runs that have ended.",
                self.folder,
                ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""),
            )

    def name(self, number: int) -> str:
        """Name of the version with this number."""
        return f"{self._run}-{number:06d}"

    def write(self, version: str, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = _SHARD_BYTES) -> None:
        """Write a version.

        Args:
            version: its name.
            tensors: names and values, taken one at a time.
            shard_bytes: size from which a file is closed and the next begun.
        """
        partial = self.folder / f".{version}.partial"
        partial.mkdir()
        try:
            shard: dict[str, torch.Tensor] = {}
            size, count = 0, 0
            for name, tensor in tensors:
                # A copy: a gathered parameter is gone when the next one is asked for.
                shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
                size += shard[name].nbytes
                if size >= shard_bytes:
                    _save(shard, partial / f"{count:05d}.safetensors")
                    shard, size, count = {}, 0, count + 1
            if shard:
                _save(shard, partial / f"{count:05d}.safetensors")
            _sync_to_disk(partial)
            os.rename(partial, self.folder / version)
            _sync_to_disk(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def remove_before(self, version: str) -> None:
        """Remove this run's versions that are older than `version`."""
        for entry in self.folder.glob(f"{self._run}-*"):
            if entry.name < version:
                _remove(entry)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path)
    _sync_to_disk(path)


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(version: Path) -> None:
    # A server that is reading it would rather find no folder than half of one.
    doomed = version.with_name(f".{version.name}.removed")
    version.rename(doomed)
    shutil.rmtree(doomed)
