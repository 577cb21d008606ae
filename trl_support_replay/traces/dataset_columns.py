"""The dataset's own columns in saved traces, with the types and features that they have in the dataset."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from datasets import Features
from datasets.features.features import require_decoding

from .columns import OWN_COLUMNS, TraceSchemaError
from .reading import read_parquet, read_schema
from .shards import ShardFolder, write_whole


class DatasetColumns:
    """Keeps the columns of all shards of a run alike, so that readers take them together.

    Args:
        features: the dataset's; `None` for a streamed one that does not know them. Then the types are those of the
            rows that were seen.

    Attributes:
        types: Arrow type of each column that is known.
        metadata: what `datasets` reads its features from, such as the names of a `ClassLabel`.
    """

    def __init__(self, features: Features | None):
        self._features = features or Features()
        schema = self._features.arrow_schema
        self.types = {field.name: field.type for field in schema}
        self.metadata = schema.metadata if features else None
        self._settled: pa.Schema | None = None

    def encoded(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows as Arrow stores them: what the dataset decodes when it gives a row out is encoded again."""
        stored = Features({name: f for name, f in self._features.items() if require_decoding(f)})
        encoded = []
        for row in rows:
            held = Features({name: feature for name, feature in stored.items() if name in row})
            encoded.append({**row, **held.encode_example({name: row[name] for name in held})})
        return encoded

    def settle(self, table: pa.Table, folder: ShardFolder, process: int, num_processes: int) -> pa.Table:
        """A shard's table with the column types of the shards before it.

        A column that held only nulls so far may get a type now, or integers a fraction; then the earlier shards of
        this process are written anew with that type.

        Args:
            table: the shard.
            folder: where it is going to be written.
            process, num_processes: whose shards these are; see `ShardFolder.discard_from`.

        Raises:
            TraceSchemaError: naming a column whose values no one type holds.
        """
        earlier = folder.shards_of(process, num_processes)
        settled = self._settled
        if settled is None:  # a run that was killed may have written only some of its shards anew
            settled = functools.reduce(_merged, (_own(read_schema(shard)) for shard in earlier), pa.schema([]))
        merged = _merged(settled, _own(table.schema))
        if merged != self._settled:
            for shard in earlier:
                if _own(read_schema(shard)) != merged:
                    write_whole(_promoted(read_parquet(shard), merged), shard)
        self._settled = merged
        return _promoted(table, merged)


def _own(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in OWN_COLUMNS])


def _merged(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    names = [*first.names, *(name for name in second.names if name not in first.names)]
    return pa.schema([_merged_field(name, first, second) for name in names])


def _merged_field(name: str, *schemas: pa.Schema) -> pa.Field:
    fields = [schema.field(name) for schema in schemas if name in schema.names]
    try:
        (field,) = pa.unify_schemas([pa.schema([field]) for field in fields], promote_options="permissive")
    except pa.ArrowException as error:
        raise TraceSchemaError(
            f"save_traces: the column {name!r} holds {fields[0].type} in earlier batches and {fields[1].type} in this "
            "one, which no reader takes together. Make its values alike, or drop it from the dataset."
        ) from error
    return field


def _promoted(table: pa.Table, columns: pa.Schema) -> pa.Table:
    """A table whose columns of the dataset are these."""
    trace = [field for field in table.schema if field.name in OWN_COLUMNS]
    schema = pa.schema([*trace, *columns], metadata=table.schema.metadata)
    return pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
