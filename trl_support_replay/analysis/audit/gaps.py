"""A token's gap between training and rollout, split into what it comes from.

The gap of a sampled token is what a trainer without replay sees: its log-prob over the whole vocabulary minus the
log-prob that the engine reported. With `f` a score over the vocabulary and `s` one over the recorded support, `live`
and `replay` the routes of a mixture of experts, and `sampler` the weights that sampled, it is a telescoping sum:

    truncation = f[model, live]     - s[model, live]        (the log of the support's mass)
    routes     = s[model, live]     - s[model, replay]
    staleness  = s[model, replay]   - s[sampler, replay]
    numerics   = s[sampler, replay] - recorded              (whatever is left)

Without routes or without the sampler's weights that part is 0, and what it would have explained is in `numerics`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .token_scores import RecordedTokens, TokenScores

PARTS = ("truncation", "routes", "staleness", "numerics")


@dataclass(frozen=True)
class Scored:
    """The scores of an audit: under the model, through its own routers and the recorded ones, and under the sampler.

    Attributes:
        live: under the model, its own routers choosing.
        replayed: under the model, through recorded experts; `live` where the traces have none.
        sampler: under the weights that sampled, through recorded experts; `None` where they are not given.
    """

    live: TokenScores
    replayed: TokenScores
    sampler: TokenScores | None = None

    @property
    def closest(self) -> TokenScores:
        """The scores that should equal the recorded ones."""
        return self.replayed if self.sampler is None else self.sampler


def split_gaps(tokens: RecordedTokens, scores: Scored) -> dict[str, np.ndarray]:
    """`[N]` float64 nats for each of `PARTS`, and for `total`, which is their sum."""
    live, replayed, closest = scores.live, scores.replayed, scores.closest
    return {
        "truncation": live.full_logprobs - live.logprobs,
        "routes": live.logprobs - replayed.logprobs,
        "staleness": replayed.logprobs - closest.logprobs,
        "numerics": closest.logprobs - tokens.recorded,
        "total": live.full_logprobs - tokens.recorded,
    }
