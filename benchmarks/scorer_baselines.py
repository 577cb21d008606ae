"""Other ways to the same log-probs, for `benchmarks.scorer` to compare with.

- `trl`: TRL's fused head as its GRPO trainer calls it: log-probs and entropy over the whole vocabulary.
- `gather`: `weight[ids]` for every pair of token and candidate at once, a dot product, an `index_add` in backward.
- `chunks`: the same in chunks of pairs, each recomputed in backward: a pair projection that holds one chunk of gathered
  rows at a time, after what SkyRL's authors say of theirs.
- `gemm`: nothing but the products of a dense head: logits of 512 tokens at a time, and the products of their backward.
  No log-probs; no scorer over the whole vocabulary can be faster.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

PAIRS_A_CHUNK = 4_096
TOKENS_A_CHUNK = 512


def trl(hidden: torch.Tensor, weight: torch.Tensor, sampled: torch.Tensor, ids, offsets) -> torch.Tensor:
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

    outputs = _ChunkedLogProbFunction.apply(
        hidden, weight, None, sampled, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs", "entropy")
    )
    return outputs[0]


def gather(hidden: torch.Tensor, weight: torch.Tensor, sampled: torch.Tensor, ids, offsets) -> torch.Tensor:
    rows = torch.repeat_interleave(offsets.diff())
    return _logprobs((weight[ids] * hidden[rows]).sum(-1), rows, offsets)


def chunks(hidden: torch.Tensor, weight: torch.Tensor, sampled: torch.Tensor, ids, offsets) -> torch.Tensor:
    rows = torch.repeat_interleave(offsets.diff())

    def dots(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (weight[ids] * hidden[rows]).sum(-1)

    parts = zip(ids.split(PAIRS_A_CHUNK), rows.split(PAIRS_A_CHUNK), strict=True)
    logits = torch.cat([checkpoint(dots, *part, use_reentrant=False) for part in parts])
    return _logprobs(logits, rows, offsets)


def _logprobs(logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The sampled token is the first of each row."""
    zeros = logits.new_zeros(len(offsets) - 1)
    highest = zeros.new_full(zeros.shape, -torch.inf).scatter_reduce(0, rows, logits.detach(), "amax")
    total = zeros.index_add(0, rows, (logits - highest[rows]).exp())
    return logits[offsets[:-1]] - highest - total.log()


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return torch.cat([(part @ weight.T)[:, 0] for part in hidden.split(TOKENS_A_CHUNK)])

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        logits = hidden.new_ones(min(TOKENS_A_CHUNK, len(hidden)), len(weight))
        grad_hidden = torch.cat([logits[: len(part)] @ weight for part in hidden.split(TOKENS_A_CHUNK)])
        if not ctx.needs_input_grad[1]:
            return grad_hidden, None
        grad_weight = torch.zeros_like(weight)
        for part in hidden.split(TOKENS_A_CHUNK):
            grad_weight.addmm_(logits[: len(part)].T, part)
        return grad_hidden, grad_weight


def gemm(hidden: torch.Tensor, weight: torch.Tensor, sampled: torch.Tensor, ids, offsets) -> torch.Tensor:
    return _Products.apply(hidden, weight)


BASELINES = {"gather": gather, "chunks": chunks, "gemm": gemm, "trl": trl}
# Their time does not depend on the supports.
DENSE = ("gemm", "trl")
