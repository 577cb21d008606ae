"""From the log-probs of finished completions back to the supports of their tokens, with every invariant checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..traces.columns import Trace
from ..traces.rollout_keys import ROLLOUT_KEY, ROUTES_KEY
from ..traces.routes import RoutedExperts
from ..traces.shifts import LogitShifts
from ..traces.support import SupportError, SupportRows
from .recorder import SupportRecorder

_WHAT_TO_RETURN = (
    "Replay compares scores with the log-probs that the engine reported, so rollout_func has to return them: those of "
    "the trainer's own generation as they are, or those of another engine over the support, with the supports under "
    f"{ROLLOUT_KEY!r}."
)


@dataclass
class Collected:
    """Completions with their supports.

    Attributes:
        samples: one `Trace` a completion.
        tool_mask: the rollout's mask of sampled tokens (1) and observations (0), or `None` when all were sampled.
        logprobs: the recorded log-probs; NaN for a synthetic end of sequence.
        num_synthetic: how many completions end in a token that nobody sampled.
    """

    samples: list[Trace] = field(default_factory=list)
    tool_mask: list[list[int]] | None = None
    logprobs: list[list[float]] = field(default_factory=list)
    num_synthetic: int = 0


def collect_samples(
    recorder: SupportRecorder,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    tool_mask: Sequence[Sequence[int]] | None,
    logprobs: Sequence[Sequence[float | None]] | None,
    given: Sequence[Any] | None,
    given_routes: Sequence[RoutedExperts] | None = None,
    *,
    vocab_size: int,
    eos_token_ids: Collection[int],
    synthetic_eos: str,
    leave_out: Sequence[bool],
    asked_by: str,
    shifts: LogitShifts | None = None,
) -> Collected:
    """Find the support of every sampled token of `B` completions.

    Args:
        recorder: the batch's recorder.
        prompt_ids: `B` prompts.
        completion_ids: `B` completions.
        tool_mask: 1 for sampled tokens and 0 for observations; `None` when all were sampled.
        logprobs: the completions' log-probs, as the rollout passed them on; `None` for an observation, or for all of
            them, which is refused.
        given: supports that a custom rollout returned itself under `ROLLOUT_KEY`; `None` when it did not.
        given_routes: `P + T` routes of each completion that a custom rollout returned under `ROUTES_KEY`, or `None`.
        vocab_size: number of rows of the LM head.
        eos_token_ids: ids that may stand at the end without having been sampled.
        synthetic_eos: `"full_vocab"`, `"mask"` or `"error"`.
        leave_out: completions that leave the loss altogether (truncated ones, when those are masked).
        asked_by: the sampling settings that switched replay on, for errors.
        shifts: settings that shift logits by the tokens of one request, which a completion then has to be.

    Raises:
        SupportError: naming completion, token and numbers, when a sampled token has no support, is not in it, or is not
            the token that was sampled there.
    """
    _check_logprobs_given(logprobs)
    assert logprobs is not None
    if shifts is not None and (tool_mask is not None or given is not None):
        raise SupportError(
            f"{shifts}: what these settings do depends on where each request began, and a completion of several "
            "requests or of a rollout_func does not tell. Leave them out, or sample each completion by one request."
        )
    table, sampled_there = recorder.table(), recorder.token_ids()
    collected = Collected(tool_mask=None if tool_mask is None else [list(mask) for mask in tool_mask])
    for name, of_rollout in ((ROLLOUT_KEY, given), (ROUTES_KEY, given_routes)):
        if of_rollout is not None and len(of_rollout) != len(completion_ids):
            raise SupportError(f"{name!r} holds {len(of_rollout)} completions, but there are {len(completion_ids)}.")
    for b, ids in enumerate(completion_ids):
        where = f"completion {b}"
        if not len(prompt_ids[b]):
            raise SupportError(f"{where} has no prompt (prompt_ids is empty), so nothing predicts its first token.")
        token_ids = np.asarray(ids, dtype=np.int64)
        mask = np.ones(len(ids), bool) if tool_mask is None else np.asarray(tool_mask[b], bool)
        for name, other in (("log-probs", logprobs[b]), ("entries in its mask", mask)):
            if len(other) != len(ids):
                raise SupportError(f"{where} has {len(ids)} tokens and {len(other)} {name}.")
        indices = recorder.row_indices(logprobs[b])
        indices[~mask] = -1
        if given is None:
            traced = indices >= 0
            _check_same_tokens(token_ids[traced], sampled_there[indices[traced]], np.flatnonzero(traced), where)
            rows = table.take(indices)
        else:
            rows = _given_rows(given[b], where)
            if len(rows) != len(ids):
                raise SupportError(f"{where} has {len(ids)} tokens and {len(rows)} rows under {ROLLOUT_KEY!r}.")
            if (rows.sizes[~mask] > 0).any():
                token = int(np.flatnonzero(~mask & (rows.sizes > 0))[0])
                raise SupportError(f"{where}: token {token} is an observation, but its row is not empty.")
        _check_rows(rows, token_ids, vocab_size, where)
        values = _numbers(logprobs[b], where)
        unknown = np.flatnonzero((rows.sizes > 0) & ~np.isfinite(values))
        if len(unknown):
            value = logprobs[b][unknown[0]]
            raise SupportError(
                f"{where}: token {unknown[0]} was sampled, and its log-prob is {value}. {_WHAT_TO_RETURN}"
            )
        unsupported = np.flatnonzero(mask & (rows.sizes == 0))
        if len(unsupported):
            if given is None and len(unsupported) == mask.sum() > 1:
                raise SupportError(
                    f"{where} came back without supports, which {asked_by} asks for. Return them from rollout_func "
                    f"under {ROLLOUT_KEY!r} (for each completion, one list of ids a token, empty for observations), or "
                    "pass on unchanged the log-probs that the trainer's own generation returned for this batch; or "
                    "leave out the settings that cut tokens."
                )
            _check_synthetic_eos(token_ids, unsupported, eos_token_ids, synthetic_eos, where)
            collected.num_synthetic += 1
            # Nobody sampled it, so there is no log-prob to correct for: TRL reads NaN as a ratio of exactly 1.
            values[-1] = float("nan")
            if synthetic_eos == "mask":
                collected.tool_mask = collected.tool_mask or [[1] * len(x) for x in completion_ids]
                collected.tool_mask[b][-1] = 0
                mask[-1] = False
        if leave_out[b]:
            mask = np.zeros_like(mask)
        prompt = np.asarray(prompt_ids[b], dtype=np.int32)
        whole = np.concatenate([prompt, token_ids])
        if given_routes is not None:
            routes: RoutedExperts | None = given_routes[b]
            if routes is not None:
                routes.check(num_tokens=len(whole), where=f"{where}, {ROUTES_KEY!r}")
        else:
            routes = recorder.routes_of(indices, whole, len(prompt), where)
            if routes is None and not rows.nnz:
                routes = recorder.no_routes(len(whole))  # nothing that was sampled is left
        recorded = np.where(rows.sizes > 0, values, np.nan).astype(np.float32)
        trace = Trace(prompt, token_ids.astype(np.int32), mask, recorded, rows, routes, shifts=shifts)
        collected.samples.append(trace)
        collected.logprobs.append(values)
    return collected


def _check_logprobs_given(logprobs: Sequence[Sequence[float | None] | None] | None) -> None:
    lacking = [] if logprobs is None else [b for b, values in enumerate(logprobs) if values is None]
    if logprobs is None or lacking:
        where = f" for completion {lacking[0]}" if lacking else ""
        raise SupportError(f"rollout_func returned 'logprobs': None{where}. {_WHAT_TO_RETURN}")


def _numbers(logprobs: Sequence[float | None], where: str) -> list[float]:
    try:
        return [float("nan") if x is None else float(x) for x in logprobs]
    except (TypeError, ValueError):
        raise SupportError(f"{where} has log-probs that are not one number per token: {logprobs!r:.80}.") from None


def _given_rows(rows: Any, where: str) -> SupportRows:
    try:
        return rows if isinstance(rows, SupportRows) else SupportRows.from_ragged(rows)
    except (TypeError, SupportError) as error:
        raise SupportError(
            f"{where}: {ROLLOUT_KEY!r} needs one list of integer ids per token, not {rows!r:.80} ({error})."
        ) from error


def _check_same_tokens(token_ids: np.ndarray, sampled: np.ndarray, positions: np.ndarray, where: str) -> None:
    """The tokens that come back are the ones that were sampled: a re-tokenised history changes them."""
    differs = token_ids != sampled
    if differs.any():
        first = int(np.argmax(differs))
        raise SupportError(
            f"{where}: token {positions[first]} was sampled as id {sampled[first]} and came back as {token_ids[first]} "
            f"({int(differs.sum())} of {len(sampled)} differ). A rollout must append to the sampled ids; re-tokenising "
            "the decoded history shifts every position."
        )


def _check_synthetic_eos(
    token_ids: np.ndarray, unsupported: np.ndarray, eos_token_ids: Collection[int], synthetic_eos: str, where: str
) -> None:
    last = len(token_ids) - 1
    if not (len(unsupported) == 1 and unsupported[0] == last and int(token_ids[last]) in eos_token_ids):
        raise SupportError(
            f"{where}: {len(unsupported)} of {len(token_ids)} loss-bearing tokens have no recorded support (first at "
            f"token {unsupported[0]}, id {token_ids[unsupported[0]]}). Only one end-of-sequence token at the very end "
            "may be without. If they were sampled, their supports were lost on the way: a rollout must hand on the "
            "log-probs that it was given for this batch, not plain floats made of them. If not, they belong in the "
            "mask as 0."
        )
    if synthetic_eos == "error":
        raise SupportError(
            f"{where} ends in an end-of-sequence token (id {token_ids[last]}) that was not sampled, and "
            "synthetic_eos='error' refuses it. Set synthetic_eos to 'full_vocab' or 'mask'."
        )


def _check_rows(rows: SupportRows, token_ids: np.ndarray, vocab_size: int, where: str) -> None:
    """A row holds its sampled token; with a hint when the rows are simply shifted."""
    empty = rows.sizes == 0
    contained = rows.contains(token_ids) | empty
    if not contained.all():
        bad = int(np.argmin(contained))
        hint = "The row of a sampled token must hold it"
        for shift in (1, -1):
            fits = rows.contains(np.roll(token_ids, shift)) | empty
            fits = fits[1:] if shift > 0 else fits[:-1]
            if len(fits) > 2 and fits.all():
                hint = f"The rows are shifted by one: row t holds the token at t{-shift:+d} throughout"
        raise SupportError(
            f"{where}: the support of token {bad} ({rows.sizes[bad]} ids) does not hold the sampled id "
            f"{token_ids[bad]} ({int((~contained).sum())} of {len(token_ids)} tokens are missing from their rows). "
            f"{hint}."
        )
    rows.validate(vocab_size=vocab_size, where=where)
