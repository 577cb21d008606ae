"""Arguments of a scoring call: checked, and turned into the kind of product and the plan that they ask for."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence

import numpy as np
import torch

from .candidates import SupportCSR
from .lm_head import VocabShard
from .plan import CandidatePlan
from .precision import compute_dtype
from .projection import check_temperature

OUTPUTS = ("logprobs", "support_entropy", "full_logprobs", "full_entropy", "log_mass")
FULL_OUTPUTS = frozenset(("full_logprobs", "full_entropy", "log_mass"))
IMPLEMENTATIONS = ("auto", "reference", "union", "sparse", "triton")
EMPTY_ROWS = ("error", "full")


def choose_kernel(implementation: str, hidden: torch.Tensor, weight: torch.Tensor) -> str:
    """The kind of product that a plan is made for."""
    device, dtype = weight.device.type, compute_dtype(hidden, weight)
    can_sparse = device == "cpu" and weight.dtype == dtype
    if implementation == "sparse" and not can_sparse:
        raise ValueError(
            f"implementation='sparse' needs a weight in {dtype} on a CPU, not {weight.dtype} on {weight.device}. Use "
            "'union' or 'auto'."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU, for tests
    if implementation == "triton" and not (_has_triton() and (device == "cuda" or interpreted)):
        raise ValueError(
            f"implementation='triton' needs the triton package and a weight on a CUDA device, not on {weight.device}. "
            "Use 'union' or 'auto'."
        )
    if implementation == "auto":
        return "sparse" if can_sparse else "triton" if device == "cuda" and _has_triton() else "union"
    return "union" if implementation == "reference" else implementation


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def plan_for(support: SupportCSR, shard: VocabShard | None, num_vocab: int, kernel: str) -> CandidatePlan:
    """The plan of this rank's part of the vocabulary.

    Raises:
        ValueError: a candidate beyond the head, or one twice in a row.
    """
    start, stop = (0, num_vocab) if shard is None else (shard.start, shard.stop)
    if shard is None or shard.group is None:  # with several shards, all of them have to be asked
        support.check_range(stop)
    return support.plan(start, stop, kernel)


def check_arguments(
    inputs: torch.Tensor,
    sampled_ids: torch.Tensor,
    support: SupportCSR,
    temperature: float,
    outputs: Sequence[str],
    empty_rows: str,
) -> None:
    if not isinstance(support, SupportCSR):
        raise TypeError(
            f"support is a {type(support).__name__}, not a SupportCSR. Make one: SupportCSR.from_numpy(token_ids, "
            "offsets), or SupportCSR.from_lists(rows)."
        )
    if inputs.dim() != 2 or sampled_ids.shape != inputs.shape[:1] or len(support) != len(inputs):
        raise ValueError(
            f"Scoring needs one row of states, one sampled id and one support a token, not shapes "
            f"{tuple(inputs.shape)} and {tuple(sampled_ids.shape)} and {len(support)} supports."
        )
    check_temperature(temperature)
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown or not outputs:
        raise ValueError(f"outputs={tuple(outputs)}: choose one or more among {', '.join(OUTPUTS)}.")
    if "log_mass" in outputs and support.shifts is not None:
        raise ValueError(
            "outputs has log_mass, and the supports carry shifts of their logits: the support is part of the shifted "
            "distribution, and the whole vocabulary would be scored without shifts. Leave log_mass out."
        )
    if empty_rows not in EMPTY_ROWS:
        raise ValueError(f"empty_rows='{empty_rows}' is not among {', '.join(EMPTY_ROWS)}.")
    if empty_rows == "error" and support.num_empty:
        raise ValueError(
            f"{support.num_empty} of {len(support)} tokens have no recorded support (first: token "
            f"{np.flatnonzero(np.diff(support.offsets) == 0)[0]}). Leave them out, or pass empty_rows='full' to score "
            "them over the whole vocabulary."
        )
