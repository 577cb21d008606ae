"""The Triton kernels against the reference: on a CPU by Triton's interpreter, or on a GPU.

TRITON_INTERPRET=1 python -m tests.scoring.triton_cases
python -m tests.scoring.triton_cases --device cuda
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from trl_support_replay.scoring import (
    CandidateShifts,
    LMHead,
    LoRAFactors,
    SupportCSR,
    kernels_triton,
    plan,
    score_support,
)

OUTPUTS = ("logprobs", "support_entropy")


def check(dtype: torch.dtype, width: int, parts: str, device: str) -> None:
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape):
        values = torch.randn(shape, generator=generator).to(device, dtype)
        if parts == "column-major" and len(shape) == 2:
            values = values.T.contiguous().T
        return values.requires_grad_()

    vocab, num_tokens = 61, 21
    rows = [torch.randperm(vocab, generator=generator)[: 1 + i * 2 % 23].tolist() for i in range(num_tokens)]
    sampled = torch.tensor([row[0] for row in rows], device=device)
    hidden, weight, bias, a, b = (
        leaf(num_tokens, width),
        leaf(vocab, width),
        leaf(vocab),
        leaf(2, width),
        leaf(vocab, 2),
    )
    leaves = [hidden, weight] + ([bias, a, b] if parts == "all" else [])
    head = LMHead(weight, bias, softcap=3.0, lora=LoRAFactors(a, b, 0.5)) if parts == "all" else LMHead(weight)
    upstream = torch.randn(num_tokens, generator=generator).to(device)
    support = SupportCSR.from_lists(rows, device)
    rng, count = np.random.default_rng(0), len(support.token_ids)
    shifts = CandidateShifts(rng.normal(size=count), rng.choice([1, 1.3], count), rng.normal(size=count))
    shifts = shifts if parts == "shifted" else None
    results = []
    for implementation in ("reference", "triton", "triton"):
        scores = score_support(
            hidden,
            head,
            sampled,
            SupportCSR.from_numpy(support.token_ids, support.offsets, device, shifts),
            outputs=OUTPUTS,
            implementation=implementation,
        )
        loss = (scores.logprobs * upstream).sum() + scores.support_entropy.sum()
        results.append((scores.logprobs, scores.support_entropy, *torch.autograd.grad(loss, leaves)))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 2e-2)
    for want, got, again in zip(*results, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert torch.equal(got, again)  # the same bits at every run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    plan.BLOCK_ROWS = {device: 6}
    if device == "cpu":  # small ones, so that small inputs have several; and the interpreter is slow
        kernels_triton.BLOCK_PAIRS, kernels_triton.BLOCK_WIDTH = 4, 16
    for dtype, width, *cases in (
        (torch.float64, 16, "all", "shifted"),
        (torch.float32, 37, "plain", "column-major", "all"),
        (torch.bfloat16, 21, "column-major"),
        (torch.float16, 5, "all"),
    ):
        for parts in cases:
            check(dtype, width, parts, device)
    # Pairs one by one and union products side by side in one plan.
    support = SupportCSR.from_lists([[i, i + 20, i + 40] for i in range(6)] + [list(range(20))] * 6, device)
    assert {type(block).__name__ for block in support.plan(0, 61, "triton").blocks} == {"TritonBlock", "UnionBlock"}
    print("all cases pass")


if __name__ == "__main__":
    main()
