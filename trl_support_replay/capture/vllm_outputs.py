"""Supports out of vLLM's `CompletionOutput`: from its sampling mask, or from flat processed log-probs."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ..traces.support import SupportRows
from .recorder import SupportCaptureError

logger = logging.getLogger(__name__)

# Equal logits at the k-th place all survive top-k, so a support can be larger than top_k. A few more candidates are
# asked for than top_k, to see them.
TIE_SLACK = 4
# The candidates' probabilities sum to 1 up to float32 rounding when none is missing.
_MASS_TOLERANCE = 1e-3


def read_flat_logprobs(
    completion: Any, top_k: int, request: str, trailing: bool = False
) -> tuple[np.ndarray, SupportRows, int]:
    """Log-probs and supports from `flat_logprobs=True`, `logprobs=top_k + TIE_SLACK`, processed log-probs.

    Each position holds the sampled token followed by the best candidates; those that truncation removed are `-inf`.

    Args:
        completion: vLLM's `CompletionOutput` with `T` token ids.
        top_k: the request's top-k.
        request: how to call the request in errors.
        trailing: accept positions after the last token id (an engine may score past a stop string) and drop them.

    Returns:
        `[T]` float64 log-probs of the sampled tokens, their `T` supports, and how many supports were repaired because
        the sampled token was not among the candidates (it replaces the weakest).

    Raises:
        SupportCaptureError: no log-probs, a wrong count, a NaN, a sampled token with probability 0, or log-probs that
            are not normalised over the surviving candidates.
    """
    flat = completion.logprobs
    sampled = np.asarray(completion.token_ids, dtype=np.int32)
    num_tokens = len(sampled)
    if flat is None:
        raise SupportCaptureError(
            f"{request}: the engine returned no log-probs for {num_tokens} tokens, so their supports are unknown. "
            "Check that the engine's `max_logprobs` covers top_k and that nothing resets `logprobs` in the request."
        )
    if len(flat) != num_tokens and not (trailing and len(flat) > num_tokens):
        raise SupportCaptureError(f"{request}: {len(flat)} log-prob positions for {num_tokens} tokens.")
    if num_tokens == 0:
        return np.zeros(0), SupportRows.empty(0), 0

    starts = np.asarray(flat.start_indices[:num_tokens], dtype=np.int64)
    ends = np.asarray(flat.end_indices[:num_tokens], dtype=np.int64)
    widths = ends - starts
    if (widths < 1).any() or starts[0] != 0 or (starts[1:] != ends[:-1]).any():
        position = int(np.argmax(widths < 1))
        raise SupportCaptureError(f"{request}: token {position} has no log-probs.")
    ids = np.asarray(flat.token_ids[: ends[-1]], dtype=np.int32)
    values = np.asarray(flat.logprobs[: ends[-1]], dtype=np.float64)
    position_of = np.repeat(np.arange(num_tokens), widths)
    if np.isnan(values).any():
        position = int(position_of[np.argmax(np.isnan(values))])
        raise SupportCaptureError(f"{request}: the engine returned NaN log-probs for token {position}.")

    # The sampled token comes first and again at its rank. It is looked up by its id, not trusted to be first.
    is_sampled = ids == sampled[position_of]
    first = np.full(num_tokens, -1, dtype=np.int64)
    hits = np.flatnonzero(is_sampled)[::-1]
    first[position_of[hits]] = hits
    if (first < 0).any():
        position = int(np.argmax(first < 0))
        raise SupportCaptureError(
            f"{request}: the engine did not report token {position} (id {sampled[position]}), which it sampled."
        )
    logprobs = values[first]
    if np.isneginf(logprobs).any():
        position = int(np.argmax(np.isneginf(logprobs)))
        raise SupportCaptureError(
            f"{request}: token {position} (id {sampled[position]}) was sampled with probability 0 after truncation."
        )

    member = np.isfinite(values)
    member[starts] = False
    sizes = np.add.reduceat(member.astype(np.int64), starts)
    mass = np.add.reduceat(np.where(member, np.exp(values), 0.0), starts)
    missing = ~np.logical_or.reduceat(member & is_sampled, starts)
    # A sampled token beyond the candidates is itself part of the mass.
    short = (mass + np.where(missing, np.exp(logprobs), 0.0)) < 1 - _MASS_TOLERANCE
    if (short & (sizes <= top_k)).any() or short.mean() > 0.05 or (mass > 1 + _MASS_TOLERANCE).any():
        position = int(np.argmax(short | (mass > 1 + _MASS_TOLERANCE)))
        raise SupportCaptureError(
            f"{request}: the {sizes[position]} candidates of token {position} have a total probability of "
            f"{mass[position]:.4f} instead of 1. The engine must run with logprobs_mode='processed_logprobs'."
        )
    if short.any():
        logger.warning(
            "%s: more than %d tokens tie at the top_k=%d cut for %d of %d tokens; the rest of the tie is not recorded.",
            request,
            TIE_SLACK,
            top_k,
            int(short.sum()),
            num_tokens,
        )
    if missing.any():
        for position in np.flatnonzero(missing):
            finite = np.flatnonzero(member[starts[position] : ends[position]]) + starts[position]
            weakest = finite[np.argmin(values[finite])] if len(finite) else starts[position]
            ids[weakest] = sampled[position]
            member[weakest] = True
        sizes = np.add.reduceat(member.astype(np.int64), starts)
        logger.warning(
            "%s: the sampled token was missing from %d of %d supports and replaced their weakest member.",
            request,
            int(missing.sum()),
            num_tokens,
        )
    rows = SupportRows(ids[member], np.concatenate([[0], np.cumsum(sizes)]))
    return logprobs, rows, int(missing.sum() + (short & ~missing).sum())


def read_sampling_mask(completion: Any, request: str, trailing: bool = False) -> tuple[np.ndarray, SupportRows, int]:
    """Log-probs and supports from the engine's own sampling mask (`return_sampling_mask=True`, `logprobs=0`).

    Arguments, results and errors as in `read_flat_logprobs`; the mask is exact, so a sampled token that is missing from
    it is an error, not a repair.
    """
    sampled = np.asarray(completion.token_ids, dtype=np.int32)
    mask = completion.sampling_mask
    if mask is None:
        raise SupportCaptureError(
            f"{request}: the engine returned no sampling mask for {len(sampled)} tokens. It needs vLLM 0.28 or newer "
            "with Model Runner V2; with support_capture='logprobs' any supported vLLM works."
        )
    token_ids = mask.token_ids
    if len(token_ids) != len(sampled) and not (trailing and len(token_ids) > len(sampled)):
        raise SupportCaptureError(f"{request}: {len(token_ids)} sampling masks for {len(sampled)} tokens.")
    rows = SupportRows.from_ragged(token_ids[: len(sampled)])
    contained = rows.contains(sampled)
    if not contained.all():
        position = int(np.argmin(contained))
        raise SupportCaptureError(
            f"{request}: the sampling mask of token {position} does not hold id {sampled[position]}, which was sampled."
        )
    return _sampled_logprobs(completion, sampled, request), rows, 0


def read_sampled_logprobs(completion: Any, request: str) -> tuple[np.ndarray, SupportRows, int]:
    """Log-probs of the sampled tokens (`logprobs=0`), each with a support of itself only, when nothing is truncated.

    Arguments, results and errors as in `read_flat_logprobs`.
    """
    sampled = np.asarray(completion.token_ids, dtype=np.int32)
    return _sampled_logprobs(completion, sampled, request), SupportRows.from_ragged(sampled[:, None].tolist()), 0


def _sampled_logprobs(completion: Any, sampled: np.ndarray, request: str) -> np.ndarray:
    if completion.logprobs is None or len(completion.logprobs) < len(sampled):
        found = 0 if completion.logprobs is None else len(completion.logprobs)
        raise SupportCaptureError(f"{request}: {found} log-prob positions for {len(sampled)} tokens.")
    values = [completion.logprobs[i][int(token)].logprob for i, token in enumerate(sampled)]
    logprobs = np.asarray(values, dtype=np.float64)
    if not np.isfinite(logprobs).all():
        position = int(np.argmin(np.isfinite(logprobs)))
        raise SupportCaptureError(f"{request}: token {position} has log-prob {logprobs[position]}.")
    return logprobs
