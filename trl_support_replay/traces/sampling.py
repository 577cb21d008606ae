"""The `sampling` column of a traces table: the settings that each row was sampled with."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa

from .errors import TraceSchemaError

SAMPLING_TYPE = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("seed", pa.int64()),
    ]
)
OFF = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
"""What a setting is when it is null: it does not truncate."""
SETTINGS = ("temperature", *OFF)
"""The settings that decide the distribution."""


def sampling_rows(table: pa.Table, where: str, names: tuple[str, ...]) -> list[dict[str, Any] | None]:
    """The `sampling` of each row, which has these fields; `None` where it is null.

    Raises:
        TraceSchemaError: there is no such column, it is no struct of numbers, or a field is missing.
    """
    if "sampling" not in table.column_names:
        raise TraceSchemaError(f"{where} has no `sampling` column, so the traces' temperature is unknown.")
    kind = table.schema.field("sampling").type
    if not pa.types.is_struct(kind) or kind.get_field_index("temperature") < 0:
        raise TraceSchemaError(f"{where}: `sampling` is of type {kind}, not a struct with a `temperature`.")
    missing = [name for name in names if kind.get_field_index(name) < 0]
    if missing:
        raise TraceSchemaError(
            f"{where}: `sampling` lacks the fields {missing}, so it is unknown whether the sampler truncated by them. "
            f"Add them with the sampler's values ({', '.join(f'{n}={OFF[n]:g} is off' for n in missing)})."
        )
    return table["sampling"].to_pylist()


def sampling_temperatures(table: pa.Table, where: str) -> set[float]:
    """The temperatures that the rows of a table were sampled with.

    Raises:
        TraceSchemaError: naming the row, for one without a temperature, or with one that nothing is sampled at; a table
            without a `sampling` column.
    """
    rows = sampling_rows(table, where, ("temperature",))
    return {_temperature(row, f"{where}, row {i}") for i, row in enumerate(rows)}


def _temperature(row: dict[str, Any] | None, where: str) -> float:
    value = row and row["temperature"]
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise TraceSchemaError(
            f"{where}: sampling.temperature is {value!r}; scoring needs the one above 0 that the trace was sampled "
            "with. Drop the row, or fill it in."
        )
    return float(value)
