"""Supports out of vLLM's `CompletionOutput`: from its sampling mask, or from flat processed log-probs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..traces.support import SupportRows
from .errors import SupportCaptureError

logger = logging.getLogger(__name__)

# Equal logits at the k-th place all survive top-k, so a support can be larger than top_k. A few more candidates than
# top_k are asked for, to see them. Full precision hardly ever has ties; in half precision their number grows with the
# number of candidates and with the distance between neighbouring logits, which is 1/8 in bfloat16 from 16 to 32.
# `tests/engine_outputs/test_ties.py` measures them; these are twice the most that it finds.
TIE_SLACK = 4
_SLACK: dict[str, Callable[[int], int]] = {
    "float32": lambda top_k: TIE_SLACK,
    "float16": lambda top_k: 8 + top_k // 8,
    "bfloat16": lambda top_k: 16 + top_k,
}
# A rule that fixes a token may leave the others finite: vLLM sets the logit of the fixed one to 1e9. Below this
# log-prob a token has a probability of exactly 0, and was no candidate.
IMPOSSIBLE = -1e6
# The candidates' probabilities sum to 1 up to float32 rounding when none is missing.
_ROUNDING = 2e-5
# From here on, a sum that is not 1 must have a known cause.
_MASS_TOLERANCE = 1e-3
# The part of a request's tokens whose supports may lack more than that.
_INCOMPLETE = 0.05


def num_candidates(top_k: int, dtype: Any, *bounds: int) -> int:
    """How many candidates per token to ask for, so that all ties at the k-th place are among them.

    Args:
        top_k: the request's top-k.
        dtype: data type of the engine, by name or as torch's. One that is not known counts as bfloat16.
        bounds: what the number cannot exceed: the vocabulary, the engine's max_logprobs. Below 0 is no bound.
    """
    slack = _SLACK.get(str(dtype).removeprefix("torch."), _SLACK["bfloat16"])
    return min(top_k + slack(top_k), *(bound for bound in bounds if bound >= 0), sys.maxsize)


def read_flat_logprobs(
    completion: Any, top_k: int, request: str, trailing: bool = False
) -> tuple[np.ndarray, SupportRows, int]:
    """Log-probs and supports from `flat_logprobs=True`, `logprobs=num_candidates(...)`, processed log-probs.

    Each position holds the sampled token followed by the best candidates; those that truncation removed are `-inf`.

    A sampled token that is not among the candidates is added to them when it is one more of the tie at the k-th place,
    or when there is room for it. It replaces the weakest candidate when that one is less likely, and so cannot be
    among the `top_k`. A row that lacks members of a tie keeps those that were reported.

    Args:
        completion: vLLM's `CompletionOutput` with `T` token ids.
        top_k: the request's top-k.
        request: how to call the request in errors.
        trailing: accept positions after the last token id (an engine may score past a stop string) and drop them.

    Returns:
        `[T]` float64 log-probs of the sampled tokens, their `T` supports, and how many supports were repaired, lack
        members, or may lack members whose probability is too small to be missed in the sum.

    Raises:
        SupportCaptureError: no log-probs, a wrong count, a NaN, a sampled token with probability 0, log-probs that are
            not normalised over the surviving candidates, or too many ties that were not reported to their end.
    """
    if completion.logprobs is None:
        raise SupportCaptureError(
            f"{request}: the engine returned no log-probs for {len(completion.token_ids)} tokens, so their supports "
            "are unknown. Check that the engine's `max_logprobs` covers top_k and that nothing resets `logprobs` in "
            "the request."
        )
    num_tokens, num_positions = len(completion.token_ids), len(completion.logprobs)
    if num_positions != num_tokens and not (trailing and num_positions > num_tokens):
        raise SupportCaptureError(f"{request}: {num_positions} log-prob positions for {num_tokens} tokens.")
    if num_tokens == 0:
        return np.zeros(0), SupportRows.empty(0), 0
    candidates = _Candidates(completion, top_k, request)
    incomplete = candidates.check_mass()
    candidates.add_missing()
    if incomplete.any():
        logger.warning(
            "%s: the supports of %d of %d tokens may lack members: their candidates do not show all of a tie at the "
            "k-th place (top_k=%d).",
            request,
            int(incomplete.sum()),
            num_tokens,
            top_k,
        )
    return candidates.logprobs, candidates.rows(), int((incomplete | candidates.missing).sum())


class _Candidates:
    """The candidates of a completion's `T` tokens, and whether they are all that the tokens were drawn from.

    Args:
        completion, top_k, request: as in `read_flat_logprobs`; there is at least one token.

    Attributes:
        logprobs: `[T]` float64, of the sampled tokens.
        missing: bool `[T]`, whether the sampled token is not among the candidates.

    Raises:
        SupportCaptureError: for positions without the sampled token's log-prob, or one that is NaN or -inf.
    """

    def __init__(self, completion: Any, top_k: int, request: str):
        self._top_k, self._request = top_k, request
        flat, sampled = completion.logprobs, np.asarray(completion.token_ids, dtype=np.int32)
        num_tokens = len(sampled)
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
        self.logprobs = values[first]
        impossible = self.logprobs < IMPOSSIBLE
        if impossible.any():
            position = int(np.argmax(impossible))
            raise SupportCaptureError(
                f"{request}: token {position} (id {sampled[position]}) was sampled with probability 0 after truncation."
            )

        member = values >= IMPOSSIBLE
        member[starts] = False
        self._sampled, self._ids, self._values, self._member = sampled, ids, values, member
        self._starts, self._ends = starts, ends
        self._sizes = np.add.reduceat(member.astype(np.int64), starts)
        self.missing = ~np.logical_or.reduceat(member & is_sampled, starts)
        # A sampled token beyond the candidates is itself part of the mass.
        mass = np.add.reduceat(np.where(member, np.exp(values), 0.0), starts)
        self._mass = mass + np.where(self.missing, np.exp(self.logprobs), 0.0)
        # Where truncation removed none of the reported candidates, it may have left more than those.
        self._full = self._sizes == widths - 1
        self._weakest = np.minimum.reduceat(np.where(member, values, np.inf), starts)

    def _members(self, t: int) -> np.ndarray:
        """Places of token `t`'s members among all entries."""
        return np.flatnonzero(self._member[self._starts[t] : self._ends[t]]) + self._starts[t]

    def _ends_in_a_tie(self) -> np.ndarray:
        """Bool `[T]`: the candidates end within a tie that reaches back to the k-th place."""
        tied = np.zeros(len(self._starts), dtype=bool)
        for t in np.flatnonzero(self._full & (self._sizes >= max(self._top_k, 2))):
            ranked = np.sort(self._values[self._members(t)])[::-1]
            tied[t] = ranked[min(self._top_k, len(ranked) - 1) - 1] == ranked[-1]
        return tied

    def check_mass(self) -> np.ndarray:
        """Bool `[T]`: which supports lack members, or may lack some that are too unlikely to be missed in the sum.

        Raises:
            SupportCaptureError: where the log-probs contradict a support, or too many supports lack members.
        """
        tied, top_k = self._ends_in_a_tie(), self._top_k
        needs_mode = "The engine must run with logprobs_mode='processed_logprobs'."
        self._refuse(
            self._mass > 1 + _MASS_TOLERANCE,
            f"No distribution has that: the engine contradicts itself, or has another mode. {needs_mode}",
        )
        short = self._mass < 1 - _MASS_TOLERANCE
        self._refuse(
            short & self._full & (self._sizes < top_k),
            f"The engine reports no more of them, and top_k={top_k}. Raise its max_logprobs above top_k.",
        )
        # A tie beyond the last of exactly top_k candidates does not show.
        self._refuse(short & ~tied & ~(self._full & (self._sizes == top_k)), needs_mode)
        if short.mean() > _INCOMPLETE:
            self._refuse(
                short & tied,
                f"They end within a tie at the k-th place (top_k={top_k}), as those of {int((short & tied).sum())} of "
                f"{len(short)} tokens do: equal logits all survive top-k, and the engine reports no more of them. "
                "Lower top_k, raise the engine's max_logprobs where it is below 2 * top_k + 16, or let the "
                "engine run in float32, where logits seldom tie.",
            )
            self._refuse(
                short,
                f"They are no more than top_k={top_k}, so others may tie with the last one unseen: raise the "
                f"engine's max_logprobs above top_k. If that is not it: {needs_mode}",
            )
        return (self._mass < 1 - _ROUNDING) | (tied & (np.exp(self._weakest) <= _ROUNDING))

    def _refuse(self, tokens: np.ndarray, reason: str) -> None:
        if tokens.any():
            t = int(np.argmax(tokens))
            beside = f" and the sampled id {self._sampled[t]} beside them" if self.missing[t] else ""
            raise SupportCaptureError(
                f"{self._request}: the {self._sizes[t]} candidates of token {t}{beside} have a total probability of "
                f"{self._mass[t]:.4f} instead of 1. {reason}"
            )

    def add_missing(self) -> None:
        """Put the sampled tokens that are not among the candidates into their supports."""
        replaced = 0
        for t in np.flatnonzero(self.missing).tolist():
            value, weakest = self.logprobs[t], self._weakest[t]
            one_more_of_a_tie = self._full[t] and value == weakest
            if self._sizes[t] >= self._top_k and not one_more_of_a_tie:
                if value <= weakest:
                    raise SupportCaptureError(
                        f"{self._request}: token {t} (id {self._sampled[t]}) was sampled with log-prob {value:.4f}, "
                        f"though {self._sizes[t]} candidates are as likely or likelier and top_k={self._top_k}. "
                        "Something else than the request's top_k chose it."
                    )
                members = self._members(t)
                self._member[members[np.argmin(self._values[members])]] = False
                replaced += 1
            self._member[self._starts[t]] = True
        if self.missing.any():
            logger.warning(
                "%s: the sampled token was missing from %d of %d supports; it replaced the weakest member of %d and "
                "was added to the others.",
                self._request,
                int(self.missing.sum()),
                len(self._sampled),
                replaced,
            )

    def rows(self) -> SupportRows:
        """The `T` supports."""
        sizes = np.add.reduceat(self._member.astype(np.int64), self._starts)
        return SupportRows(self._ids[self._member], np.concatenate([[0], np.cumsum(sizes)]))


def read_sampling_mask(completion: Any, request: str, trailing: bool = False) -> tuple[np.ndarray, SupportRows, int]:
    """Log-probs and supports from sampling masks, the engine's own or those taken in its worker (`logprobs=0`).

    Arguments, results and errors as in `read_flat_logprobs`; a mask is exact, so a sampled token that is missing from
    it is an error, not a repair.
    """
    sampled = np.asarray(completion.token_ids, dtype=np.int32)
    mask = completion.sampling_mask
    if mask is None:
        raise SupportCaptureError(
            f"{request}: the engine returned no sampling mask for {len(sampled)} tokens. It needs vLLM 0.28 or newer; "
            "with support_capture='logprobs' any supported vLLM works."
        )
    token_ids = mask.token_ids
    if len(token_ids) != len(sampled) and not (trailing and len(token_ids) > len(sampled)):
        raise SupportCaptureError(f"{request}: {len(token_ids)} sampling masks for {len(sampled)} tokens.")
    rows = SupportRows.from_ragged([np.asarray(ids, dtype=np.int32) for ids in token_ids[: len(sampled)]])
    contained = rows.contains(sampled)
    if not contained.all():
        position = int(np.argmin(contained))
        raise SupportCaptureError(
            f"{request}: the sampling mask of token {position} does not hold id {sampled[position]}, which was sampled."
        )
    return _sampled_logprobs(completion, sampled, request), rows, 0


def read_sampled_logprobs(completion: Any, request: str) -> tuple[np.ndarray, SupportRows, int]:
    """Log-probs of the sampled tokens (`logprobs=0`), each with a support of itself only, when no token is cut.

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
