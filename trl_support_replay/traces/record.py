"""The settings that a folder of traces was written with, kept beside them, so that nothing else is mixed in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from .shards import write_file


class FolderRecordError(ValueError):
    """A folder that holds the shards of another run than the one that is asked for."""


def fingerprint(model: str | os.PathLike[str], revision: str | None = None) -> str | None:
    """Identifies the weights that a model's name stands for.

    Returns:
        Of a folder, a digest of names, sizes and times of change of its files; of a name on the Hub, the commit of the
        revision (`None`: of the main branch); `None` where neither is known.
    """
    folder = Path(model)
    if not folder.is_dir():
        for name in ("config.json", "adapter_config.json"):
            with contextlib.suppress(OSError, ValueError, EntryNotFoundError):
                return Path(hf_hub_download(str(model), name, revision=revision)).parent.name  # the snapshot's
        return None
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf", ".json"))
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class FolderRecord:
    """A JSON file with the settings that a folder's shards were made with.

    It is written when the first shard is about to be, not before: a run that failed earlier ties the folder to nothing.

    Args:
        path: the file, in the folder of the shards.
        what: what makes the shards, for errors: "capture".
        settings: those that decide what is in the shards; values of JSON.
        remedy: what to do when the folder holds something else, for errors.
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
        try:
            found = dict(json.loads(self._path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, OSError) as error:
            raise FolderRecordError(
                f"{self._path} cannot be read ({error}), so it is not known what {folder} holds. {self._remedy}"
            ) from error
        differ = [name for name, value in self._settings.items() if found.get(name) != value]
        if differ:
            held, asked = (
                ", ".join(f"{name}={values.get(name)!r}" for name in differ) for values in (found, self._settings)
            )
            raise FolderRecordError(
                f"{folder} holds a {self._what} with {held}, and this one has {asked}. {self._remedy}"
            )

    def write(self) -> None:
        """Write the file, in one step.

        Raises:
            ShardFolderError: it cannot be written; naming it and the reason.
        """
        write_file(self._path, json.dumps(self._settings, indent=2).encode())
