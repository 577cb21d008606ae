"""Reads traces from a folder of shards, one Parquet file, or a dataset saved by `datasets`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import REQUIRED_COLUMNS, Trace, TraceSchemaError, table_to_traces
from .routes import RoutesError
from .support import SupportError

if TYPE_CHECKING:
    from datasets import Dataset

_REMEDY = "Restore it from a copy, or do without its traces and remove it"
_SAVED = ("state.json", "dataset_info.json")  # what `save_to_disk` writes beside its Arrow files


def trace_tables(path: str | os.PathLike[str]) -> Iterator[tuple[str, pa.Table]]:
    """Name and table of each part of saved traces, in order; one part is in memory at a time.

    Args:
        path: where they lie.

    Raises:
        TraceSchemaError: nothing is there, a file is not whole, or its bytes do not have their checksums.
    """
    place = Path(path)
    if is_saved_dataset(place):
        yield place.name, _saved_dataset(place)
        return
    if (place / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in place.iterdir() if child.is_dir())
        raise TraceSchemaError(f"{place} is a dataset of the splits {splits}. Name the folder of one of them.")
    files = [place] if place.is_file() else sorted(f for f in place.glob("*.parquet") if not f.name.startswith("."))
    if not files:
        raise TraceSchemaError(f"No traces at {place}: it is neither a Parquet file, a folder of them, nor a dataset.")
    for file in files:
        yield file.name, read_parquet(file)


def is_saved_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether `save_to_disk` of `datasets` has written this folder, or what is left of it."""
    return any((Path(path) / name).is_file() for name in _SAVED)


def traces_of(name: str, table: pa.Table) -> list[Trace]:
    """The rows of a part of saved traces; errors begin with its name.

    Raises:
        TraceSchemaError, SupportError, RoutesError: as `table_to_traces`.
    """
    try:
        return table_to_traces(table)
    except (TraceSchemaError, SupportError, RoutesError) as error:
        raise type(error)(f"{name}: {error}") from error


def read_parquet(file: Path, columns: list[str] | None = None) -> pa.Table:
    """A Parquet file whose pages have their checksums.

    Args:
        file: the file.
        columns: the columns to read; `None` for all.

    Raises:
        TraceSchemaError: the file cannot be read, is not whole, or its bytes do not have their checksums.
    """
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            table = opened.read(columns)
            _check_row_counts(opened.metadata, table.num_rows)
        table.validate(full=True)
    except Exception as error:  # what readers raise at damaged bytes is not limited to any types
        raise TraceSchemaError(_told(file, "is not whole Parquet", error)) from error
    return table


def read_schema(file: Path) -> pa.Schema:
    """The columns of a Parquet file, from its end alone.

    Raises:
        TraceSchemaError: the file cannot be read, or is not whole.
    """
    try:
        return pq.read_schema(file)
    except Exception as error:
        raise TraceSchemaError(_told(file, "is not whole Parquet", error)) from error


def _check_row_counts(metadata: pq.FileMetaData, num_rows: int) -> None:
    """A file says three times how many rows it has; pages have checksums, and this has none."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    flat = [j for j in range(metadata.num_columns) if metadata.schema.column(j).max_repetition_level == 0]
    values = {group.column(j).num_values - group.num_rows for group in groups for j in flat}
    total = sum(group.num_rows for group in groups)
    if not num_rows == metadata.num_rows == total or values - {0}:
        raise pa.ArrowInvalid(f"its metadata contradict each other: {metadata.num_rows} rows, and {total} in its parts")


def dataset_table(dataset: Any) -> pa.Table:
    """The rows of a map-style `datasets.Dataset`, as one table.

    Raises:
        TraceSchemaError: its Arrow files are damaged; naming them.
    """
    try:
        dataset.data.validate(full=True)  # before anything follows the offsets of a damaged list
        return dataset.with_format("arrow")[:]
    except Exception as error:
        files = ", ".join(sorted({file["filename"] for file in dataset.cache_files})) or "a dataset in memory"
        raise TraceSchemaError(_told(files, "does not hold whole traces", error)) from error


def trace_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Saved traces as a dataset in memory, of the shards that lie in the folder itself and not below.

    Raises:
        TraceSchemaError: as `trace_tables`; shards with columns of different types.
    """
    import datasets

    tables = [table for _, table in trace_tables(path)]
    try:
        return datasets.Dataset(pa.concat_tables(tables, promote_options="permissive"))
    except Exception as error:
        raise TraceSchemaError(
            f"The shards in {path} do not fit together ({_first_line(error)}). Train on those of one run."
        ) from error


def _saved_dataset(folder: Path) -> pa.Table:
    import datasets

    for name in _SAVED:
        try:
            json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TraceSchemaError(_told(folder / name, "is not whole JSON", error)) from error
    for file in sorted(folder.glob("*.arrow")):
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                stream.read_all().validate(full=True)
        except Exception as error:
            raise TraceSchemaError(_told(file, "is not a whole Arrow file", error)) from error
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise TraceSchemaError(_told(folder, "is not a whole dataset of save_to_disk", error)) from error
    return dataset_table(dataset)


def _told(file: Any, what: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return f"{file} cannot be read: {error.strerror}."
    return f"{file} {what}: {_first_line(error)}. {_REMEDY}."


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or "no reason given").splitlines()[0].rstrip(".")
    return text if isinstance(error, pa.ArrowException | OSError) else f"{type(error).__name__}: {text}"


def is_trace_dataset(dataset: Any) -> bool:
    """Whether a training dataset holds traces rather than prompts.

    Raises:
        TraceSchemaError: it has some columns of traces and not the others, so it is neither.
    """
    columns = getattr(dataset, "column_names", None) or []
    held = [name for name in REQUIRED_COLUMNS if name in columns]
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if held and missing:
        raise TraceSchemaError(
            f"The training dataset has the columns {held} of saved traces and lacks {missing}. Train on whole traces, "
            f"or, to sample its prompts anew, drop those columns: dataset.remove_columns({held})."
        )
    return not missing
