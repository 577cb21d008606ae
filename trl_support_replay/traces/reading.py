"""Traces from wherever they lie: a folder of shards, one Parquet file, or a dataset saved by `datasets`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .columns import TraceSchemaError


def trace_tables(path: str | os.PathLike[str]) -> Iterator[tuple[str, pa.Table]]:
    """Name and table of each part of saved traces, in order; one part is in memory at a time.

    Args:
        path: where they lie.

    Raises:
        TraceSchemaError: nothing is there, a file is not whole Parquet, or its bytes do not have their checksums.
    """
    place = Path(path)
    if place.is_file():
        files = [place]
    elif (place / "dataset_info.json").is_file():
        import datasets

        yield place.name, datasets.load_from_disk(str(place)).with_format("arrow")[:]
        return
    else:
        files = sorted(f for f in place.glob("*.parquet") if not f.name.startswith("."))
    if not files:
        raise TraceSchemaError(f"No traces at {place}: it is neither a Parquet file, a folder of them, nor a dataset.")
    for file in files:
        try:
            table = pq.read_table(file, page_checksum_verification=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise TraceSchemaError(f"{file} is not whole Parquet: {error}") from error
        yield file.name, table
