"""Scores recorded tokens at another temperature from the log-probs of all candidates, without another forward."""

from __future__ import annotations

import numpy as np

from .token_scores import RecordedTokens


def logprobs_at_temperature(
    tokens: RecordedTokens, candidates: np.ndarray, temperature: float, other: float
) -> np.ndarray:
    """`[N]` support log-probs of the sampled tokens at temperature `other`.

    Log-probs over a support are its logits up to a constant, which a support cancels:
    `log pi' = l T / T' - logsumexp(l T / T')`.

    Args:
        tokens: `N` recorded tokens.
        candidates: `[nnz]` log-probs of all candidates at `temperature`.
    """
    scaled = candidates * (temperature / other)
    sizes = tokens.supports.sizes
    rows = np.repeat(np.arange(len(sizes)), sizes)
    # The largest log-prob of a support is at least -log of its size, so its exponential is in range unshifted for
    # every temperature ratio below some hundreds.
    sums = np.bincount(rows, weights=np.exp(scaled), minlength=len(sizes))
    sampled = scaled[tokens.supports.token_ids == tokens.sampled_ids[rows]]
    return sampled - np.log(sums)
