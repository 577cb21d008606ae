"""Traces as ordinary `datasets` columns: one row per completion, readable without this package.

| column | type | meaning |
|---|---|---|
| `prompt_ids` | list of int32 | prompt, as the engine got it |
| `completion_ids` | list of int32 | sampled tokens and observations |
| `loss_mask` | list of bool | tokens that the loss is over |
| `sampling_logprobs` | list of float32 | log-prob of each sampled token over its support; NaN where nobody sampled |
| `support_ids` | list of list of int32 | support of each token; empty for observations |
| `routed_experts` | list of integers | routes, flattened in the order of their shape (only when recorded) |
| `routed_experts_shape` | list of int32 | tokens (prompt and completion), layers, top_k |
| `routed_experts_captured` | list of bool | tokens whose route was recorded |
| `routed_experts_layers`, `num_experts` | list of int32, int32 | global layer numbers, experts a layer |
| `model`, `model_revision` | string | what sampled |
| `sampling` | struct | temperature, top_p, top_k, min_p, seed |
| `engine` | struct | name, version |
| `trace_digest` | uint32 | checksum of all of the above but `model` and `engine`; see `digest` |
| `reward_digest` | uint32 | checksum of `reward`, where there is one |
| `schema_version` | int32 | 1 |

An Arrow list-of-list is a CSR matrix, so supports go in and come out without a Python object per token.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from .digest import DIGEST, REWARD_DIGEST, check_digests, reward_digests, trace_digest
from .errors import TraceSchemaError
from .multimodal import check_text_only
from .routes import RoutedExperts, route_dtype
from .sampling import SAMPLING_TYPE
from .shifts import LogitShifts, check_unshifted
from .support import SupportError, SupportRows

SCHEMA_VERSION = 1
REQUIRED_COLUMNS = ("prompt_ids", "completion_ids", "loss_mask", "sampling_logprobs", "support_ids")
_ROUTE_COLUMNS = ("routed_experts", *map("routed_experts_{}".format, ("shape", "captured", "layers")), "num_experts")
_KIND_OF_VALUES = {"loss_mask": "boolean", "routed_experts_captured": "boolean", "sampling_logprobs": "floating"}
_ENGINE = pa.struct([("name", pa.string()), ("version", pa.string())])


@dataclass(frozen=True, eq=False)
class Trace:
    """One completion of `T` tokens after a prompt of `P`.

    Attributes:
        prompt_ids: `[P]` int32.
        completion_ids: `[T]` int32.
        loss_mask: `[T]` bool.
        sampling_logprobs: `[T]` float32; NaN where a token has no recorded log-prob.
        supports: `T` supports; empty where nobody sampled.
        routes: `P + T` routes, or `None`.
        extra: values of further columns (`reward`, ...).
        shifts: settings that shifted the logits of one request, whose output is the completion.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    loss_mask: np.ndarray
    sampling_logprobs: np.ndarray
    supports: SupportRows
    routes: RoutedExperts | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    shifts: LogitShifts | None = None

    def check(self, where: str = "trace", vocab_size: int | None = None) -> None:
        """Raise `TraceSchemaError` or `SupportError`, naming token and numbers, when an invariant is broken."""
        num_tokens = len(self.completion_ids)
        for name in ("loss_mask", "sampling_logprobs", "supports"):
            if len(getattr(self, name)) != num_tokens:
                raise TraceSchemaError(f"{where}: {num_tokens} tokens, but {len(getattr(self, name))} {name}.")
        total = len(self.prompt_ids) + num_tokens
        if self.routes is not None and len(self.routes) != total:
            raise TraceSchemaError(
                f"{where}: {total} tokens of prompt and completion, but {len(self.routes)} rows of routes."
            )
        if not len(self.prompt_ids):
            raise TraceSchemaError(f"{where} has no prompt (prompt_ids is empty), so nothing predicts its first token.")
        for name in ("prompt_ids", "completion_ids"):
            ids = getattr(self, name)
            if ids.min(initial=0) < 0:
                raise TraceSchemaError(f"{where}: id {ids.min()} at position {np.argmin(ids)} of {name} is negative.")
        recorded = self.supports.sizes > 0
        # Neither NaN nor -inf: what was sampled had a probability, and it was not zero.
        impossible = recorded & ~((self.sampling_logprobs <= 1e-4) & np.isfinite(self.sampling_logprobs))
        if impossible.any():
            token = int(np.argmax(impossible))
            raise TraceSchemaError(f"{where}: token {token} has log-prob {self.sampling_logprobs[token]}.")
        bare = np.flatnonzero(self.loss_mask & ~recorded)
        if len(bare) > 1 or (len(bare) == 1 and bare[0] != num_tokens - 1):
            raise SupportError(
                f"{where}: {len(bare)} loss-bearing tokens have no support (first at token {bare[0]} of {num_tokens}); "
                "only one end of sequence at the very end may be without."
            )
        self.supports.validate(vocab_size=vocab_size, sampled_ids=self.completion_ids, where=where)


def trace_schema(num_experts: int | None = None) -> pa.Schema:
    """Arrow schema of a traces table.

    Args:
        num_experts: experts per layer, when routes are recorded; it decides the width of their ids.
    """
    fields: dict[str, pa.DataType] = {
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "sampling_logprobs": pa.list_(pa.float32()),
        "support_ids": pa.list_(pa.list_(pa.int32())),
    }
    if num_experts is not None:
        fields |= {
            "routed_experts": pa.list_(pa.from_numpy_dtype(route_dtype(num_experts))),
            "routed_experts_shape": pa.list_(pa.int32()),
            "routed_experts_captured": pa.list_(pa.bool_()),
            "routed_experts_layers": pa.list_(pa.int32()),
            "num_experts": pa.int32(),
        }
    fields |= {
        "model": pa.string(),
        "model_revision": pa.string(),
        "sampling": SAMPLING_TYPE,
        "engine": _ENGINE,
        DIGEST: pa.uint32(),
        "schema_version": pa.int32(),
    }
    return pa.schema(list(fields.items()))


OWN_COLUMNS = frozenset((*trace_schema(num_experts=1).names, REWARD_DIGEST))
"""Columns that a trace fills itself, with routes and without."""


def check_column_names(names: Iterable[str], what: str) -> None:
    """Raise `TraceSchemaError` when columns that come with prompts have the names of a trace's own.

    Args:
        names: of the further columns.
        what: where they come from, for the error.
    """
    taken = sorted(OWN_COLUMNS.intersection(names))
    if taken:
        raise TraceSchemaError(
            f"{what} has columns that traces fill themselves: {', '.join(taken)}. Rename them, for example with "
            f"dataset.rename_column({taken[0]!r}, 'source_{taken[0]}')."
        )


def traces_to_table(
    traces: Sequence[Trace],
    *,
    model: str,
    sampling: Mapping[str, Any],
    engine: Mapping[str, str],
    model_revision: str | None = None,
    types: Mapping[str, pa.DataType] | None = None,
    metadata: Mapping[bytes, bytes] | None = None,
) -> pa.Table:
    """`B` traces as a table of `B` rows.

    Args:
        traces: with routes all, or none.
        model, model_revision: what sampled. Of a folder given by its absolute path only the name is kept: tables are
            published, and paths on a machine are private.
        sampling: `temperature`, `top_p`, `top_k`, `min_p`, `seed`.
        engine: `name`, `version`.
        types: Arrow types of extra columns over the whole dataset; what is missing there is inferred.
        metadata: of the table's schema; `datasets` keeps there what its features say beyond the Arrow types.

    Raises:
        TraceSchemaError: traces with and without routes, or of different models, or with different extra columns, or
            with some that have the names of a trace's own; traces with images.
    """
    check_unshifted(traces, "a table of traces has no place for that")
    routed = [trace.routes for trace in traces if trace.routes is not None]
    if routed and len(routed) != len(traces):
        raise TraceSchemaError(f"{len(routed)} of {len(traces)} traces have routes; all of a table must, or none.")
    columns: dict[str, pa.Array] = {
        "prompt_ids": _lists([t.prompt_ids for t in traces], np.int32),
        "completion_ids": _lists([t.completion_ids for t in traces], np.int32),
        "loss_mask": _lists([t.loss_mask for t in traces], np.bool_),
        "sampling_logprobs": _lists([t.sampling_logprobs for t in traces], np.float32),
        "support_ids": _support_lists([t.supports for t in traces]),
    }
    if routed:
        experts = {(routes.num_experts, routes.layers, routes.top_k) for routes in routed}
        if len(experts) > 1:
            raise TraceSchemaError(f"Routes of different models in one table: {sorted(experts)[:2]}.")
        ((num_experts, layers, _),) = experts
        columns |= {
            "routed_experts": _lists([r.experts.reshape(-1) for r in routed], route_dtype(num_experts)),
            "routed_experts_shape": _lists([np.array(r.experts.shape) for r in routed], np.int32),
            "routed_experts_captured": _lists([r.captured for r in routed], np.bool_),
            "routed_experts_layers": _lists([np.array(layers)] * len(routed), np.int32),
            "num_experts": pa.array([num_experts] * len(routed), pa.int32()),
        }
    n = len(traces)
    columns |= {
        "model": pa.array([os.path.basename(model) if os.path.isabs(model) else model] * n, pa.string()),
        "model_revision": pa.array([model_revision] * n, pa.string()),
        "sampling": pa.array([dict(sampling)] * n, SAMPLING_TYPE),
        "engine": pa.array([dict(engine)] * n, _ENGINE),
        DIGEST: pa.array([trace_digest(trace, sampling) for trace in traces], pa.uint32()),
        "schema_version": pa.array([SCHEMA_VERSION] * n, pa.int32()),
    }
    names = list(traces[0].extra) if traces else []
    for i, trace in enumerate(traces):
        if set(trace.extra) != set(names):
            raise TraceSchemaError(f"Trace {i} has the columns {sorted(trace.extra)}, the first one {sorted(names)}.")
    check_column_names(names, "The dataset")
    check_text_only(traces)
    for name in names:
        columns[name] = _extra_column(name, [trace.extra[name] for trace in traces], (types or {}).get(name))
    if "reward" in names:
        columns[REWARD_DIGEST] = pa.array(reward_digests(columns["reward"].to_pylist()), pa.uint32())
    return pa.table(columns, metadata=metadata)


def _extra_column(name: str, values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    """An array of the dataset's type; where the values do not fit it, of the type that Arrow infers.

    Readers of several shards take the type of the first, and what one shard shows (nulls only) may fit no other.
    """
    if kind is not None:
        # A transform of the dataset may have changed its rows; then the type is that of the values again.
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            return pa.array(values, kind)
    try:
        return pa.array(values)
    except pa.ArrowException as error:
        raise TraceSchemaError(f"The column {name!r} mixes values that no one type holds ({error}).") from error


def table_to_traces(table: pa.Table) -> list[Trace]:
    """The rows of a table as traces; ids and supports are views of the table's buffers where Arrow allows.

    Raises:
        TraceSchemaError: a column that is missing, null or of another type, or a newer schema; bytes that no writer of
            Arrow left there, or rows that differ from their digest; traces with images.
    """
    missing = [name for name in REQUIRED_COLUMNS if name not in table.column_names]
    if missing:
        raise TraceSchemaError(f"Not a traces table: the columns {missing} are missing from {table.column_names}.")
    twice = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if twice:
        raise TraceSchemaError(f"The columns {twice} occur more than once. Rename or drop the others.")
    try:
        table.validate(full=True)  # nothing below looks where offsets of damaged lists point
    except pa.ArrowException as error:
        raise TraceSchemaError(f"The table is damaged ({error}). Restore its file from a copy.") from error
    _check_version(table)
    arrays = {name: _combine(table, name) for name in REQUIRED_COLUMNS}
    prompts = _split(arrays["prompt_ids"], np.int32, "prompt_ids")
    completions = _split(arrays["completion_ids"], np.int32, "completion_ids")
    masks = _split(arrays["loss_mask"], np.bool_, "loss_mask")
    logprobs = _split(arrays["sampling_logprobs"], np.float32, "sampling_logprobs")
    supports = _split_supports(arrays["support_ids"])
    routes: list[Any] = _read_routes(table) if "routed_experts" in table.column_names else [None] * table.num_rows
    extra = {name: _python_values(table[name], name) for name in table.column_names if name not in OWN_COLUMNS}
    traces = [
        Trace(prompt, ids, mask, values, rows, route, {name: column[i] for name, column in extra.items()})
        for i, (prompt, ids, mask, values, rows, route) in enumerate(
            zip(prompts, completions, masks, logprobs, supports, routes, strict=True)
        )
    ]
    check_digests(table, traces)
    check_text_only(traces)
    return traces


def _check_version(table: pa.Table) -> None:
    if "schema_version" not in table.column_names:
        return
    kind = table.schema.field("schema_version").type
    if not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise TraceSchemaError(f"schema_version holds values of type {kind}, not integers; convert the column.")
    newest = max((v for v in table["schema_version"].unique().to_pylist() if v is not None), default=0)
    if newest > SCHEMA_VERSION:
        raise TraceSchemaError(
            f"The traces have schema_version={newest}, this package reads up to {SCHEMA_VERSION}. Upgrade it."
        )


def _python_values(column: pa.ChunkedArray, name: str) -> list[Any]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException) as error:  # a time beyond what Python counts, and the like
        raise TraceSchemaError(f"The column {name!r} holds a value that cannot be read ({error}). Drop it.") from error


def _offsets(lengths: Sequence[int] | np.ndarray, what: str) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise TraceSchemaError(f"{what}: {offsets[-1]} values do not fit one table; write smaller shards.")
    return pa.array(offsets.astype(np.int32))


def _lists(rows: Sequence[np.ndarray], dtype: Any) -> pa.ListArray:
    values = np.concatenate(rows).astype(dtype, copy=False) if len(rows) else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(_offsets([len(row) for row in rows], "a column"), pa.array(values))


def _support_lists(supports: Sequence[SupportRows]) -> pa.ListArray:
    whole = SupportRows.concatenate(supports)
    inner = pa.ListArray.from_arrays(_offsets(whole.sizes, "support_ids"), pa.array(whole.token_ids))
    return pa.ListArray.from_arrays(_offsets([len(rows) for rows in supports], "support_ids"), inner)


def _combine(table: pa.Table, name: str) -> Any:
    column = table[name]
    if column.num_chunks == 1:
        array = column.chunk(0)  # as it is: combining would copy
    else:
        array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if array.null_count:
        raise TraceSchemaError(
            f"Row {int(np.argmax(np.asarray(array.is_null())))} has no {name} ({array.null_count} of {len(array)} rows "
            f"have none). Prompts and traces do not mix; drop the rows without, dataset.filter(lambda row: "
            f"row[{name!r}] is not None)."
        )
    kind = array.type
    wanted = _KIND_OF_VALUES.get(name, "integer")
    for _ in range(2 if name == "support_ids" else 1):
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            raise TraceSchemaError(f"{name} is of type {array.type}, not lists of {wanted} values.")
        kind = kind.value_type
    # Lists that are all empty may come without a type of what they would hold.
    if not (getattr(pa.types, f"is_{wanted}")(kind) or pa.types.is_null(kind)):
        raise TraceSchemaError(f"{name} holds values of type {kind}, which are not {wanted}; convert the column.")
    return array


def _values(array: Any) -> tuple[Any, np.ndarray]:
    """Flat values of a list array that may be a slice, and `[rows + 1]` offsets into them."""
    offsets = np.asarray(array.offsets)
    return array.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets.astype(np.int64) - offsets[0]


def _split(array: Any, dtype: Any, name: str) -> list[np.ndarray]:
    values, offsets = _values(array)
    if values.null_count:
        raise TraceSchemaError(f"{name} holds an empty value (null).")
    flat = values.to_numpy(zero_copy_only=False)
    if np.issubdtype(dtype, np.int32) and flat.dtype != np.int32 and len(flat):
        beyond = np.iinfo(np.int32)
        if flat.min() < beyond.min or flat.max() > beyond.max:
            raise TraceSchemaError(f"{name} holds ids from {flat.min()} to {flat.max()}, beyond int32.")
    flat = flat.astype(dtype, copy=False)
    return [flat[start:stop] for start, stop in itertools.pairwise(offsets.tolist())]


def _split_supports(array: Any) -> list[SupportRows]:
    tokens, bounds = _values(array)
    return SupportRows.from_arrow(tokens).split(np.diff(bounds))


def _read_routes(table: pa.Table) -> list[RoutedExperts]:
    missing = [name for name in _ROUTE_COLUMNS if name not in table.column_names]
    if missing:
        raise TraceSchemaError(f"The traces have routed_experts without the columns {missing} that belong to them.")
    flat = _combine(table, "routed_experts")
    dtype = flat.type.value_type.to_pandas_dtype()
    values = _split(flat, dtype, "routed_experts")
    shapes = _split(_combine(table, "routed_experts_shape"), np.int32, "routed_experts_shape")
    captured = _split(_combine(table, "routed_experts_captured"), np.bool_, "routed_experts_captured")
    layers = _split(_combine(table, "routed_experts_layers"), np.int32, "routed_experts_layers")
    kind = table.schema.field("num_experts").type
    num_experts = table["num_experts"].to_pylist()
    if not pa.types.is_integer(kind):
        raise TraceSchemaError(f"num_experts holds values of type {kind}, which are not integer; convert the column.")
    if None in num_experts:
        raise TraceSchemaError(f"Row {num_experts.index(None)} has no num_experts.")
    routes = []
    for i in range(table.num_rows):
        if len(shapes[i]) != 3 or shapes[i].min() < 0 or math.prod(shapes[i].tolist()) != len(values[i]):
            raise TraceSchemaError(f"Row {i}: {len(values[i])} expert ids do not fill a shape of {shapes[i].tolist()}.")
        routes.append(
            RoutedExperts(
                values[i].reshape(shapes[i]),
                num_experts=num_experts[i],
                layers=layers[i].tolist(),
                captured=captured[i],
                where=f"row {i}",
            )
        )
    return routes
