"""A digest per trace, which finds damage however a table was stored and read.

Parquet pages can carry checksums, but `datasets` does not verify them, and its Arrow files have none. A column with a
CRC-32 per row goes through every format, through `select`, `filter` and `concatenate_datasets`, and costs little beside
reading the table (`benchmarks/traces.py`).
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from .errors import TraceSchemaError
from .sampling import SETTINGS, sampling_rows

if TYPE_CHECKING:
    from .columns import Trace

logger = logging.getLogger(__name__)

DIGEST, REWARD_DIGEST = "trace_digest", "reward_digest"


def trace_digest(trace: Trace, sampling: Mapping[str, Any] | None) -> int:
    """CRC-32 of all that decides a trace's log-probs: tokens, mask, log-probs, supports, routes, sampling settings.

    It does not depend on the integer and list types that a table stores them in.

    Args:
        trace: the trace.
        sampling: its `temperature`, `top_p`, `top_k` and `min_p`; one that is missing counts as null.
    """
    values = [(sampling or {}).get(name) for name in SETTINGS]
    settings = [float(value) if isinstance(value, int | float) else np.nan for value in values]
    logprobs = trace.sampling_logprobs
    parts: list[np.ndarray] = [
        np.array(settings, "<f8"),
        trace.prompt_ids.astype("<i4", copy=False),
        trace.completion_ids.astype("<i4", copy=False),
        trace.loss_mask.astype("?", copy=False),
        np.where(np.isnan(logprobs), np.nan, logprobs).astype("<f4", copy=False),  # any NaN is as good as another
        trace.supports.sizes.astype("<i4"),
        trace.supports.token_ids.astype("<i4", copy=False),
    ]
    if (routes := trace.routes) is not None:
        shape = np.array([routes.num_experts, *routes.experts.shape, *routes.layers], "<i4")
        parts += [shape, routes.captured, routes.experts.astype("<i4")]
    digest = zlib.crc32(np.array([part.size for part in parts], "<i8").data)
    for part in parts:
        digest = zlib.crc32(np.ascontiguousarray(part).data, digest)
    return digest


def reward_digests(rewards: Sequence[Any]) -> list[int]:
    """CRC-32 of each reward, as a table gives it back."""
    return [zlib.crc32(repr(reward).encode()) for reward in rewards]


def check_digests(table: pa.Table, traces: Sequence[Trace]) -> None:
    """Compare a table's traces with the digests that were saved with them.

    Rows without a digest pass, as tables of users' own making have none; that is logged once. A reward may have been
    changed on purpose, so one that differs is logged and not refused.

    Args:
        table: what was read.
        traces: its rows.

    Raises:
        TraceSchemaError: naming the first row that differs from its digest.
    """
    saved = _saved(table, DIGEST)
    if None in saved:
        _say_unprotected()
    if any(digest is not None for digest in saved):
        sampling = sampling_rows(table, "The traces", SETTINGS)
        for i, (digest, settings) in enumerate(zip(saved, sampling, strict=True)):
            if digest is not None and settings is None:
                raise TraceSchemaError(f"Row {i} has no `sampling`, which was saved with it. Drop the row.")
        differ = [
            i
            for i, (digest, trace, settings) in enumerate(zip(saved, traces, sampling, strict=True))
            if digest is not None and digest != trace_digest(trace, settings)
        ]
        if differ:
            raise TraceSchemaError(
                f"Row {differ[0]} is not what was saved ({len(differ)} of {len(traces)} rows differ): its tokens, "
                f"mask, log-probs, supports, routes or sampling settings do not fit its {DIGEST}. The file is damaged: "
                "restore it from a copy, or drop the rows. If the columns were changed on purpose, drop the digests: "
                f"dataset.remove_columns({DIGEST!r})."
            )
    if "reward" not in table.column_names:
        if REWARD_DIGEST in table.column_names:
            logger.warning(
                "The traces have a %s and no reward. If you did not drop it, the file is damaged: restore it from a "
                "copy. If you did, drop both.",
                REWARD_DIGEST,
            )
        return
    found = reward_digests(table["reward"].to_pylist())
    changed = [i for i, old in enumerate(_saved(table, REWARD_DIGEST)) if old not in (None, found[i])]
    if changed:
        logger.warning(
            "The reward of %d of %d traces (first: row %d) is not the one that was saved. If you did not change it, "
            "the file is damaged: restore it from a copy. If you did, dataset.remove_columns('%s') ends this warning.",
            len(changed),
            len(traces),
            changed[0],
            REWARD_DIGEST,
        )


def _saved(table: pa.Table, name: str) -> list[int | None]:
    if name not in table.column_names:
        return [None] * table.num_rows
    kind = table.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise TraceSchemaError(f"{name} holds values of type {kind}, not integers. Drop the column, or convert it.")
    return table[name].to_pylist()


@functools.cache
def _say_unprotected() -> None:
    logger.warning(
        "Traces without %s: damage to their tokens, log-probs or supports may go unnoticed. `traces_to_table` writes "
        "digests; traces of earlier versions have none.",
        DIGEST,
    )
