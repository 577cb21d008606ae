"""Traces from wherever they lie: a folder of shards, one Parquet file, or a dataset saved by `datasets`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import TraceSchemaError


def trace_tables(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Iterator[tuple[str, pa.Table]]:
    """Name and table of each part of saved traces, in order; one part is in memory at a time.

    Args:
        path: where they lie.
        columns: those to read, as far as they are there; `None` for all.

    Raises:
        TraceSchemaError: nothing is there, a file is not whole Parquet, or its bytes do not have their checksums.
    """
    place = Path(path)
    if place.is_file():
        files = [place]
    elif (place / "dataset_info.json").is_file():
        import datasets

        dataset = datasets.load_from_disk(str(place))
        if columns is not None:
            dataset = dataset.select_columns([name for name in columns if name in dataset.column_names])
        yield place.name, dataset.with_format("arrow")[:]
        return
    else:
        files = sorted(f for f in place.glob("*.parquet") if not f.name.startswith("."))
    if not files:
        raise TraceSchemaError(f"No traces at {place}: it is neither a Parquet file, a folder of them, nor a dataset.")
    for file in files:
        try:
            wanted = None if columns is None else [n for n in pq.read_schema(file).names if n in columns]
            table = pq.read_table(file, columns=wanted, page_checksum_verification=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise TraceSchemaError(f"{file} is not whole Parquet: {error}") from error
        yield file.name, table
