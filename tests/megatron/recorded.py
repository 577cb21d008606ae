"""Random traces, as an engine would have recorded them."""

from __future__ import annotations

import numpy as np

from trl_support_replay.traces import RoutedExperts, SupportRows
from trl_support_replay.traces.columns import Trace

EOS = 1


def random_support(rng: np.random.Generator, sampled: np.ndarray, vocab: int) -> SupportRows:
    """One row for each sampled id, with it, of 1 to 12 ids."""
    rows = []
    for token in sampled:
        size = int(rng.integers(1, 13))
        others = rng.permutation(np.setdiff1d(np.arange(vocab), [token]))[: size - 1]
        rows.append(rng.permutation(np.append(others, token)).astype(np.int32))
    return SupportRows.from_ragged(rows)


def random_trace(
    seed: int,
    *,
    vocab: int,
    num_layers: int = 0,
    top_k: int = 2,
    num_experts: int = 8,
    synthetic_eos: bool = False,
    longest: int = 6,
) -> Trace:
    """Two sampled turns with an observation between them; routes for all but the last token if there are layers."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return rng.integers(2, vocab, count).astype(np.int32)

    prompt, observation = ids(int(rng.integers(1, 4))), ids(int(rng.integers(1, 3)))
    turns = [ids(int(rng.integers(2, longest))) for _ in range(2)]
    end = np.full(int(synthetic_eos), EOS, dtype=np.int32)
    completion = np.concatenate([turns[0], observation, turns[1], end])
    was_sampled = np.zeros(len(completion), dtype=bool)
    was_sampled[: len(turns[0])] = True
    was_sampled[len(turns[0]) + len(observation) : len(completion) - len(end)] = True
    in_loss = was_sampled.copy()
    if synthetic_eos:
        in_loss[-1] = True
    logprobs = -np.abs(rng.normal(2.0, 0.5, len(completion)))
    routes = None
    if num_layers:
        num_tokens = len(prompt) + len(completion)
        experts = rng.random((num_tokens - 1, num_layers, num_experts)).argsort(axis=-1)[..., :top_k]
        routes = RoutedExperts.from_prefix(experts, num_tokens, num_experts=num_experts)
    return Trace(
        prompt_ids=prompt,
        completion_ids=completion,
        loss_mask=in_loss,
        sampling_logprobs=np.where(was_sampled, logprobs, np.nan).astype(np.float32),
        supports=SupportRows.concatenate(
            [
                random_support(rng, turns[0], vocab),
                SupportRows.empty(len(observation)),
                random_support(rng, turns[1], vocab),
                SupportRows.empty(len(end)),
            ]
        ),
        routes=routes,
    )
