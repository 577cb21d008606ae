"""Versions of a policy's weights in a folder that trainer and servers share."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Tensors are gathered in memory up to this size before they are written.
_SHARD_BYTES = 2 * 2**30
_LOCK_NAME = re.compile(r"\.([0-9a-f]{12})\.lock")
_SHARD_NAME = re.compile(r"[0-9]{5}\.safetensors")
# Runs on other machines write a version far more often than this, in seconds.
_QUIET = 86400


class VersionedWeights:
    """Writes versions so that a reader sees a whole one or none.

    A version is a folder of safetensors files. It is written under another name and renamed when it is complete and on
    disk.

    Args:
        folder: the shared folder; created when it is not there.
        run: a name that no other run in this folder has, of 12 hexadecimal digits; versions are called `{run}-000001`
            and so on.
    """

    def __init__(self, folder: str | os.PathLike[str], run: str):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run = run
        self._lock: int | None = None  # descriptor of the locked file

    def claim(self) -> None:
        """Mark this run as alive, and remove what runs that have ended left in the folder.

        The last version of a run has to outlive its training: a server that is restarted is told to load it when an
        evaluation follows. So a run holds a lock on a file of its own, which its process loses by ending, in whatever
        way, and the next run removes the versions whose lock is free. Some file systems keep locks to one machine, so a
        run on another one must also have written nothing for a day. Nothing else is touched: only folders with the name
        of a version of such a run that hold nothing but files of weights. Where the file system knows no locks, nothing
        is removed. To be called once, by the process that writes.

        Raises:
            OSError: when the folder cannot be written.
        """
        lock = self.folder / f".{self._run}.lock"
        # Under its own name only when it is locked, or another run might take this one for ended.
        unlocked = lock.with_name(f"{lock.name}.new")
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        weakref.finalize(self, os.close, descriptor)
        if not _try_lock(descriptor):
            unlocked.unlink()
            logger.warning("%s knows no file locks, so weights of earlier runs stay there.", self.folder)
            return
        os.write(descriptor, _this_machine())
        unlocked.rename(lock)
        self._lock = descriptor
        now = os.fstat(descriptor).st_mtime
        for other in sorted(self.folder.glob(".*.lock")):
            if other != lock and _LOCK_NAME.fullmatch(other.name):
                try:
                    _remove_if_ended(other, now)
                except OSError as error:  # another user's, perhaps
                    logger.warning("What the run of %s left behind could not be removed: %s", other, error)

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
        if self._lock is not None:
            os.utime(self._lock)  # still at work, for runs on machines that do not see the lock
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


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _this_machine() -> bytes:
    return socket.gethostname().encode()


def _remove_if_ended(lock: Path, now: float) -> None:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        elsewhere = os.read(descriptor, 1024) != _this_machine()
        quiet = now - os.fstat(descriptor).st_mtime > _QUIET
        if not _try_lock(descriptor) or (elsewhere and not quiet):
            return
        run = lock.name.split(".")[1]
        version = re.compile(rf"{run}-[0-9]{{6,}}|\.{run}-[0-9]{{6,}}\.(partial|removed)")
        for entry in lock.parent.iterdir():
            if version.fullmatch(entry.name) and _holds_only_weights(entry):
                _remove(entry)
                logger.info("Removed %s, left behind by a run that has ended.", entry)
        lock.unlink()
    finally:
        os.close(descriptor)


def _holds_only_weights(entry: Path) -> bool:
    if entry.is_symlink() or not entry.is_dir():
        return False
    return all(_SHARD_NAME.fullmatch(file.name) and file.is_file() for file in entry.iterdir())


def _remove(version: Path) -> None:
    doomed = version
    if not version.name.startswith("."):
        # A server that is reading it would rather find no folder than half of one.
        doomed = version.with_name(f".{version.name}.removed")
        version.rename(doomed)
    shutil.rmtree(doomed)
