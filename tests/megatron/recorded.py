"""Random trajectories, as an engine would have recorded them."""

from __future__ import annotations

import numpy as np

from trl_support_replay.traces import RoutedExperts, RoutesField, SupportField, SupportRows, Trajectory, TrajectoryTrace

EOS = 1


def random_support(rng: np.random.Generator, sampled: np.ndarray, vocab: int) -> SupportRows:
    """One row for each sampled id, with it, of 1 to 12 ids."""
    rows = []
    for token in sampled:
        size = int(rng.integers(1, 13))
        others = rng.permutation(np.setdiff1d(np.arange(vocab), [token]))[: size - 1]
        rows.append(rng.permutation(np.append(others, token)).astype(np.int32))
    return SupportRows.from_ragged(rows)


def random_trajectory(
    seed: int,
    *,
    vocab: int,
    num_layers: int = 0,
    top_k: int = 2,
    num_experts: int = 8,
    synthetic_eos: bool = False,
    longest: int = 6,
) -> Trajectory:
    """Two sampled turns with an observation between them; routes for all but the last token if there are layers."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return rng.integers(2, vocab, count).astype(np.int32)

    fields: list = [SupportField(vocab)]
    if num_layers:
        fields.append(RoutesField(tuple(range(num_layers)), top_k, num_experts))
    trace = TrajectoryTrace(ids(int(rng.integers(1, 4))), fields, eos_token_ids=[EOS])
    for turn in range(2):
        sampled = ids(int(rng.integers(2, longest)))
        logprobs = rng.normal(-2.0, 0.5, len(sampled)).astype(np.float32)
        trace.append_sampled(sampled, logprobs, support=random_support(rng, sampled, vocab))
        if turn == 0:
            trace.append_observation(ids(int(rng.integers(1, 3))))
    if synthetic_eos:
        trace.append_synthetic_eos(EOS)
    if num_layers:
        num_rows = trace.num_prompt_tokens + len(trace) - 1
        experts = rng.random((num_rows, num_layers, num_experts)).argsort(axis=-1)[..., :top_k]
        trace.record("routed_experts", RoutedExperts(experts, num_experts=num_experts), 0)
    return trace.finalize()
