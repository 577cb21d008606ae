"""Finite differences and the float64 oracle on random inputs, for every output and every part of the head."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scoring.oracle import oracle_scores
from trl_support_replay.scoring import LMHead, LoRAFactors, SupportCSR, score_support
from trl_support_replay.scoring.arguments import OUTPUTS

FAST = ("union", "sparse")


def problem(seed, num_tokens, width, vocab, *, parts=(), dtype=torch.float64, max_size=6, allow_empty=True):
    """Random tokens, supports of 0 to `max_size` ids and a head with the named parts."""
    rng = np.random.default_rng(seed)

    def tensor(*shape):
        return torch.tensor(rng.standard_normal(shape), dtype=dtype).requires_grad_()

    rows, sampled = [], []
    for _ in range(num_tokens):
        size = int(rng.integers(0 if allow_empty else 1, min(max_size, vocab) + 1))
        ids = rng.permutation(vocab)[:size].tolist()
        rows.append(ids)
        sampled.append(int(rng.choice(ids)) if ids else int(rng.integers(vocab)))
    lora = LoRAFactors(tensor(2, width), tensor(vocab, 2), 0.7) if "lora" in parts else None
    head = LMHead(
        tensor(vocab, width),
        tensor(vocab) if "bias" in parts else None,
        logit_scale=0.6 if "scale" in parts else 1.0,
        softcap=1.5 if "softcap" in parts else None,
        lora=lora,
    )
    return tensor(num_tokens, width), head, sampled, rows


def leaves(hidden, head):
    found = [hidden, head.weight]
    if head.bias is not None:
        found.append(head.bias)
    if head.lora is not None:
        found += [head.lora.a, head.lora.b]
    return found


ALL_PARTS = [parts for n in range(5) for parts in itertools.combinations(("bias", "scale", "softcap", "lora"), n)]


@pytest.mark.parametrize("parts", ALL_PARTS, ids="-".join)
@pytest.mark.parametrize("implementation", FAST)
def test_gradients_of_every_output_match_finite_differences(implementation, parts):
    hidden, head, sampled, rows = problem(3, 7, 3, 9, parts=parts)

    def scores(*inputs):
        hidden, weight, *rest = inputs
        bias = rest.pop(0) if head.bias is not None else None
        lora = LoRAFactors(*rest, head.lora.scaling) if rest else None
        result = score_support(
            hidden,
            LMHead(weight, bias, logit_scale=head.logit_scale, softcap=head.softcap, lora=lora),
            torch.tensor(sampled),
            SupportCSR.from_lists(rows),
            temperature=0.8,
            outputs=OUTPUTS,
            empty_rows="full",
            implementation=implementation,
        )
        return tuple(getattr(result, name) for name in OUTPUTS)

    assert torch.autograd.gradcheck(scores, leaves(hidden, head))


@pytest.mark.parametrize("implementation", ["reference", *FAST])
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 40),
    width=st.integers(1, 6),
    vocab=st.integers(1, 25),
    parts=st.sampled_from(ALL_PARTS),
    outputs=st.lists(st.sampled_from(OUTPUTS), min_size=1, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
)
def test_values_and_gradients_match_the_oracle(
    implementation, seed, num_tokens, width, vocab, parts, outputs, temperature
):
    hidden, head, sampled, rows = problem(seed, num_tokens, width, vocab, parts=parts)
    scores = score_support(
        hidden,
        head,
        torch.tensor(sampled, dtype=torch.long),
        SupportCSR.from_lists(rows),
        temperature=temperature,
        outputs=outputs,
        empty_rows="full",
        implementation=implementation,
    )
    assert {name for name in OUTPUTS if getattr(scores, name) is not None} == set(outputs)
    expected = oracle_scores(hidden, head, sampled, rows, temperature) if num_tokens else {}
    rng = np.random.default_rng(seed)
    upstream = {name: torch.tensor(rng.standard_normal(num_tokens)) for name in outputs}
    wanted_loss = hidden.sum() * 0 + sum(p.sum() * 0 for p in leaves(hidden, head))
    for name in expected.keys() & upstream.keys():
        torch.testing.assert_close(getattr(scores, name), expected[name], rtol=1e-10, atol=1e-10)
        wanted_loss = wanted_loss + (expected[name] * upstream[name]).sum()
    wanted = torch.autograd.grad(wanted_loss, leaves(hidden, head))
    got = torch.autograd.grad(
        sum((getattr(scores, name) * upstream[name]).sum() for name in outputs), leaves(hidden, head)
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
