"""Traces on disk: a folder of Parquet shards, each of which is whole or absent."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from .rollout_keys import ROLLOUT_KEY

logger = logging.getLogger(__name__)

_NAME = re.compile(r"traces-(\d{8})-(\d{3})-(\d{5})\.parquet")
_PARTIAL = ".partial"


class ShardFolderError(OSError):
    """A folder for traces that cannot be made or written."""


def write_whole(table: pa.Table, target: Path) -> None:
    """Write a Parquet file beside its place and move it there in one step: it is whole or absent.

    Raises:
        ShardFolderError: the file cannot be written; naming it and the reason.
    """
    # Ids and log-probs hardly repeat: a dictionary of them would be larger than they are.
    strings = [field.name for field in table.schema if pa.types.is_string(field.type)]
    settings: dict[str, Any] = {"compression": "zstd", "use_dictionary": strings, "write_page_checksum": True}
    if ROLLOUT_KEY in table.schema.names:
        # The ids of a row mostly rise, so what lies between them takes about a byte per id where rows are long.
        settings["column_encoding"] = {f"{ROLLOUT_KEY}.list.element.list.element": "DELTA_BINARY_PACKED"}
    with _replacing(target) as file:
        pq.write_table(table, file, **settings)


def write_file(target: Path, content: bytes) -> None:
    """Write a file beside its place and move it there in one step.

    Raises:
        ShardFolderError: as `write_whole`.
    """
    with _replacing(target) as file:
        file.write(content)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    partial = target.with_name(f".{target.name}.{os.getpid()}{_PARTIAL}")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise ShardFolderError(
            f"{target} cannot be written ({error.strerror or error}). Make room in {target.parent}, or name another "
            "folder; what is there already is whole."
        ) from error


class ShardFolder:
    """A folder of traces, one Parquet file per generation batch and process.

    A shard is written beside its place and moved there in one step, so that whatever kills the writer leaves only whole
    shards. `datasets.load_dataset("parquet", data_files="<folder>/*.parquet")` reads them all.

    Args:
        path: the folder; made when missing.
        setting: what the user gave the path as, for the error.

    Raises:
        ShardFolderError: the folder cannot be made or written.
    """

    def __init__(self, path: str | os.PathLike[str], setting: str = "The folder"):
        self.path = Path(path)
        probe = self.path / f".write-test-{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ShardFolderError(
                f"{setting} {self.path} is not a folder that can be written ({error.strerror}). Name another one."
            ) from error

    def write(self, table: pa.Table, number: int, part: int = 0, batch: int = 0) -> Path:
        """Write a shard; one of the same name is replaced.

        Args:
            table: the traces.
            number: orders the shards, for example the optimizer step.
            part: number of the process that wrote it.
            batch: tells shards of one number apart.
        """
        target = self.path / f"traces-{number:08d}-{batch:03d}-{part:05d}.parquet"
        write_whole(table, target)
        return target

    def discard_from(self, number: int, process: int = 0, num_processes: int = 1) -> list[Path]:
        """Remove shards from `number` on (a resumed run makes them anew), and what a killed writer left half done.

        Shard `p` belongs to process `p` modulo their number, also if an earlier run had more processes, so that none
        removes what another one is writing.

        Args:
            number: the first number to remove.
            process: which of the processes this is.
            num_processes: how many remove shards, each its share.
        """
        removed = [path for path in self.shards_of(process, num_processes) if int(path.name[7:15]) >= number]
        partial = [
            p
            for p in self.path.glob(f".traces-*{_PARTIAL}")
            if (match := _NAME.match(p.name, 1)) and int(match[3]) % num_processes == process
        ]
        if process == 0:
            partial += self.path.glob(f".*.json.*{_PARTIAL}")  # of `record`, which one process writes
        for path in removed + partial:
            path.unlink(missing_ok=True)
        return removed

    def set_aside(self) -> Path | None:
        """Move the shards that are there to a new folder inside, `earlier-1` and so on; `None` where there are none.

        Raises:
            OSError: they cannot be moved.
        """
        found = self.shards()
        if not found:
            return None
        number = 1
        while (place := self.path / f"earlier-{number}").exists():
            number += 1
        place.mkdir()
        for shard in found:
            shard.rename(place / shard.name)
        logger.warning("The %d shards of an earlier run in %s were moved to %s.", len(found), self.path, place)
        return place

    def shards(self) -> list[Path]:
        """Paths of the whole shards, in order."""
        return sorted(path for _, _, path in self._shards())

    def shards_of(self, process: int, num_processes: int) -> list[Path]:
        """Paths of the whole shards that are this process's share, in order."""
        return sorted(path for _, part, path in self._shards() if part % num_processes == process)

    def _shards(self) -> Iterator[tuple[int, int, Path]]:
        for path in self.path.iterdir():
            if match := _NAME.fullmatch(path.name):
                yield int(match[1]), int(match[3]), path
