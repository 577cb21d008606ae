"""What decided the contents of a folder of shards, kept beside them, so that nothing else is mixed in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class FolderRecordError(ValueError):
    """A folder that holds the shards of another run than the one that is asked for."""


class FolderRecord:
    """A JSON file with the settings that a folder's shards were made with.

    It is written when the first shard is about to be, not before: a run that failed earlier ties the folder to nothing.

    Args:
        path: the file, in the folder of the shards.
        what: what makes the shards, for errors: "capture".
        settings: those that decide what is in the shards; values of JSON.
        remedy: what to do where the folder holds something else, for errors.
    """

    def __init__(
        self,
        path: Path,
        what: str,
        settings: Mapping[str, Any],
        remedy: str = "Take another --output, or the same settings.",
    ):
        self._path = path
        self._what = what
        self._settings = dict(settings)
        self._remedy = remedy

    def check(self) -> None:
        """Raise unless the folder's shards, if there are any, were made with these settings.

        Raises:
            FolderRecordError: naming every setting that differs with both its values, or the file that is missing.
        """
        folder = self._path.parent
        if not any(folder.glob("*.parquet")):
            return
        if not self._path.exists():
            raise FolderRecordError(
                f"{folder} holds Parquet files and no {self._path.name}, so a {self._what} cannot go on there. "
                f"{self._remedy}"
            )
        found = json.loads(self._path.read_text(encoding="utf-8"))
        differ = [name for name, value in self._settings.items() if found.get(name) != value]
        if differ:
            held, asked = (
                ", ".join(f"{name}={values.get(name)!r}" for name in differ) for values in (found, self._settings)
            )
            raise FolderRecordError(
                f"{folder} holds a {self._what} with {held}, and this one has {asked}. {self._remedy}"
            )

    def write(self) -> None:
        """Write the file, in one step."""
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._settings, indent=2), encoding="utf-8")
        partial.replace(self._path)
