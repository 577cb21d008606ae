"""Inputs that break careless scorers: overflow, half precision, singletons, masked ids, nothing at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.scoring.inputs import ALL, FAST, head_and_states, random_rows
from tests.scoring.oracle import oracle_scores, scores_from_logits
from trl_support_replay.scoring import (
    LMHead,
    LoRAFactors,
    SupportCSR,
    blocks,
    plan,
    score_support,
    score_support_from_logits,
    tile_pairs,
)
from trl_support_replay.scoring.arguments import FULL_OUTPUTS, OUTPUTS
from trl_support_replay.scoring.precision import full_precision


@pytest.mark.parametrize("implementation", ["auto", "union", "reference"])
def test_ids_that_are_masked_by_a_bias_leave_scores_and_gradients_finite(implementation):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(12, 8, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.zeros(12, dtype=torch.float64)
    bias[7] = -torch.inf
    outputs = ("logprobs", "support_entropy", "full_logprobs", "full_entropy", "log_mass")
    support = SupportCSR.from_lists([[1, 2, 7], [3], [4, 5]])
    scores = score_support(
        hidden, LMHead(weight, bias), torch.tensor([1, 3, 5]), support, outputs=outputs, implementation=implementation
    )
    full = torch.log_softmax(hidden @ weight.T + bias, dim=-1)
    entropy = -(full.exp() * full.masked_fill(full == -torch.inf, 0)).sum(-1)
    torch.testing.assert_close(scores.full_entropy, entropy)
    expected = torch.autograd.grad(entropy.sum() + full[[0, 1, 2], [1, 3, 5]].sum(), (hidden, weight))
    found = torch.autograd.grad(
        scores.full_entropy.sum() + scores.full_logprobs.sum(), (hidden, weight), retain_graph=True
    )
    torch.testing.assert_close(found, expected)
    every = torch.autograd.grad(sum(getattr(scores, name).sum() for name in outputs), (hidden, weight))
    assert all(grad.isfinite().all() for grad in every)


def test_scores_that_only_go_into_a_log_cost_no_backward(monkeypatch):
    def dear(*args):
        raise AssertionError("the whole vocabulary was gone through")

    monkeypatch.setattr("trl_support_replay.scoring.head_projection.vocabulary_gradients", dear)
    hidden, weight = torch.randn(2, 4).requires_grad_(), torch.randn(9, 4).requires_grad_()
    outputs = ("logprobs", "full_entropy", "log_mass")
    support = SupportCSR.from_lists([[1, 2], [3]])
    scores = score_support(hidden, LMHead(weight), torch.tensor([1, 3]), support, outputs=outputs)
    scores.logprobs.sum().backward()
    assert hidden.grad[0].abs().sum() > 0


# --------------------------------------------------------------------------------------------- overflow, precision


@pytest.mark.parametrize("outputs", [("logprobs", "support_entropy"), OUTPUTS], ids=["support", "all"])
@pytest.mark.parametrize("implementation", [*ALL, "from_logits"])
def test_a_huge_logit_outside_the_support_stays_outside(implementation, outputs):
    """Exponentials of filtered-out logits overflow, and infinity times a zero mask is NaN in backward."""
    hidden, weight = head_and_states(6, 4, 30)
    with torch.no_grad():
        hidden[:, 0] = hidden[:, 0].abs() + 1
        weight[11] = torch.tensor([5e3, 0, 0, 0])
    sampled, rows = random_rows(6, 11, max_size=5)
    ids, support = torch.tensor(sampled), SupportCSR.from_lists(rows)
    if implementation == "from_logits":
        scores = score_support_from_logits(hidden @ weight.T, ids, support, outputs=outputs)
    else:
        scores = score_support(hidden, LMHead(weight), ids, support, outputs=outputs, implementation=implementation)
    expected = oracle_scores(hidden, LMHead(weight), sampled, rows)
    for name in outputs:
        torch.testing.assert_close(getattr(scores, name).double(), expected[name], rtol=1e-6, atol=2e-6)
    got = torch.autograd.grad(sum(getattr(scores, name).sum() for name in outputs), (hidden, weight))
    want = torch.autograd.grad(sum(expected[name].sum() for name in outputs), (hidden, weight))
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["bias", "scale", "softcap", "lora"])
@pytest.mark.parametrize("outputs", [("logprobs",), OUTPUTS], ids=["support", "all"])
@pytest.mark.parametrize("implementation", ALL)
def test_large_logits_show_every_part_of_the_head(implementation, outputs, part):
    hidden, weight = head_and_states(10, 8, 40, scale=8.0)
    generator = torch.Generator().manual_seed(1)
    plain = LMHead(weight)
    head = LMHead(
        weight,
        bias=torch.randn(40, generator=generator) * 10 if part == "bias" else None,
        logit_scale=0.25 if part == "scale" else 1.0,
        softcap=30.0 if part == "softcap" else None,
        lora=LoRAFactors(torch.randn(3, 8, generator=generator), torch.randn(40, 3, generator=generator), 2.0)
        if part == "lora"
        else None,
    )
    sampled, rows = random_rows(10, 40, min_size=4)
    ids, support = torch.tensor(sampled), SupportCSR.from_lists(rows)
    scores = score_support(hidden, head, ids, support, outputs=outputs, implementation=implementation)
    expected = oracle_scores(hidden, head, sampled, rows)
    without = oracle_scores(hidden, plain, sampled, rows)
    assert (expected["logprobs"] - without["logprobs"]).abs().max() > 1
    for name in outputs:
        torch.testing.assert_close(getattr(scores, name).double(), expected[name], rtol=2e-6, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("outputs", [("logprobs",), OUTPUTS], ids=["support", "all"])
@pytest.mark.parametrize("implementation", ["reference", "union", "auto"])
def test_half_precision_inputs_accumulate_in_float32(implementation, outputs, dtype):
    hidden, weight = head_and_states(200, 64, 40, dtype=dtype)
    sampled, rows = random_rows(200, 40, min_size=2)
    scores = score_support(
        hidden,
        LMHead(weight),
        torch.tensor(sampled),
        SupportCSR.from_lists(rows),
        outputs=outputs,
        implementation=implementation,
    )
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected = oracle_scores(exact[0], LMHead(exact[1]), sampled, rows)
    for name in outputs:
        assert getattr(scores, name).dtype == torch.float32
        torch.testing.assert_close(getattr(scores, name).double(), expected[name], rtol=1e-5, atol=2e-5)
    got = torch.autograd.grad(scores.logprobs.sum(), (hidden, weight))
    want = torch.autograd.grad(expected["logprobs"].sum(), exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        # Every head row takes part in dozens of tokens, yet is rounded to half precision once.
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=2e-5)


@pytest.mark.parametrize("outputs", [("logprobs",), OUTPUTS], ids=["support", "all"])
@pytest.mark.parametrize("implementation", FAST)
def test_autocast_does_not_lower_the_precision(implementation, outputs):
    hidden, weight = head_and_states(30, 16, 40)
    sampled, rows = random_rows(30, 40, min_size=3)

    def run():
        scores = score_support(
            hidden,
            LMHead(weight),
            torch.tensor(sampled),
            SupportCSR.from_lists(rows),
            outputs=outputs,
            implementation=implementation,
        )
        return scores.logprobs, *torch.autograd.grad(scores.logprobs.sum(), (hidden, weight))

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run()
    for a, b in zip(plain, inside, strict=True):
        assert torch.equal(a, b)


def test_tf32_is_off_inside_and_as_it_was_afterwards():
    matmul, cuda = torch.backends.cuda.matmul, torch.device("cuda")
    before = matmul.fp32_precision
    try:
        for setting in ("tf32", "ieee"):
            matmul.fp32_precision = setting
            with full_precision(cuda):
                with full_precision(cuda):  # as another thread's backward
                    assert matmul.fp32_precision == "ieee"
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == setting
        # Set in the older way, it can still be read in that way.
        torch.set_float32_matmul_precision("high")
        with full_precision(cuda):
            assert matmul.fp32_precision == "ieee"
        assert matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before


# ------------------------------------------------------------------------------------------------------ edge sizes


@pytest.mark.parametrize("outputs", [("logprobs",), ("logprobs", "support_entropy"), OUTPUTS])
@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_nothing_to_project_stays_attached_with_zero_gradients(num_tokens, implementation, outputs):
    hidden, weight = head_and_states(num_tokens)
    bias = torch.zeros(50, requires_grad=True)
    lora = LoRAFactors(torch.ones(2, 8, requires_grad=True), torch.ones(50, 2, requires_grad=True), 1.0)
    sampled = list(range(num_tokens))
    scores = score_support(
        hidden,
        LMHead(weight, bias, lora=lora),
        torch.tensor(sampled, dtype=torch.long),
        SupportCSR.from_lists([[v] for v in sampled]),
        outputs=outputs,
        implementation=implementation,
    )
    for name in set(outputs) - FULL_OUTPUTS:
        values = getattr(scores, name)
        assert torch.equal(values, torch.zeros(num_tokens))
        grads = torch.autograd.grad(values.sum(), (hidden, weight, bias, lora.a, lora.b), retain_graph=True)
        for grad, parameter in zip(grads, (hidden, weight, bias, lora.a, lora.b), strict=True):
            assert torch.equal(grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("implementation", FAST)
def test_singletons_among_others_get_exact_zeros(implementation):
    hidden, weight = head_and_states(20)
    sampled, rows = random_rows(20, 50, min_size=2)
    for i in range(0, 20, 3):
        rows[i] = [sampled[i]]
    scores = score_support(
        hidden,
        LMHead(weight),
        torch.tensor(sampled),
        SupportCSR.from_lists(rows),
        outputs=("logprobs", "support_entropy"),
        implementation=implementation,
    )
    (scores.logprobs.sum() + scores.support_entropy.sum()).backward()
    assert torch.equal(scores.logprobs[::3], torch.zeros(7))
    assert torch.equal(scores.support_entropy[::3], torch.zeros(7))
    assert torch.equal(hidden.grad[::3], torch.zeros(7, 8))
    assert (hidden.grad[1::3] != 0).all()


@pytest.mark.parametrize("outputs", [("logprobs",), OUTPUTS], ids=["support", "all"])
@pytest.mark.parametrize("implementation", ALL)
def test_supports_of_many_sizes_span_all_blocks_and_tiles(implementation, outputs, monkeypatch):
    monkeypatch.setattr(plan, "BLOCK_ROWS", {"cpu": 5})
    monkeypatch.setattr(plan, "PART_COLUMNS", 7)
    monkeypatch.setattr(blocks, "BUFFER_BYTES", 256)
    monkeypatch.setattr(tile_pairs, "TILE_TOKENS", 6)
    monkeypatch.setattr(tile_pairs, "TILE_VOCAB", 11)
    hidden, weight = head_and_states(64, 8, 60, dtype=torch.float64)
    # Dense rows, then narrow ones, the whole vocabulary, and none.
    sampled, rows = random_rows(64, 60, max_size=60)
    rows[:30] = [row[:3] for row in rows[:30]]
    rows[10], rows[11] = list(range(60)), []
    sampled = [int(row[len(row) // 2]) if row else 7 for row in rows]
    scores = score_support(
        hidden,
        LMHead(weight),
        torch.tensor(sampled),
        SupportCSR.from_lists(rows),
        outputs=outputs,
        implementation=implementation,
        empty_rows="full",
    )
    expected = oracle_scores(hidden, LMHead(weight), sampled, rows)
    for name in outputs:
        torch.testing.assert_close(getattr(scores, name), expected[name], rtol=1e-10, atol=1e-10)
    got = torch.autograd.grad(sum(getattr(scores, name).sum() for name in outputs), (hidden, weight))
    want = torch.autograd.grad(sum(expected[name].sum() for name in outputs), (hidden, weight))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("outputs", [("logprobs",), OUTPUTS], ids=["support", "all"])
def test_whole_vocabulary_supports_give_the_full_scores(outputs):
    hidden, weight = head_and_states(9, 8, 50)
    sampled = list(range(9))
    scores = score_support(
        hidden, LMHead(weight), torch.tensor(sampled), SupportCSR.from_lists([list(range(50))] * 9), outputs=outputs
    )
    expected = scores_from_logits(hidden @ weight.T, sampled, [[]] * 9)
    torch.testing.assert_close(scores.logprobs.double(), expected["full_logprobs"], rtol=1e-6, atol=2e-6)
    if scores.log_mass is not None:
        torch.testing.assert_close(scores.log_mass, torch.zeros(9), rtol=0, atol=2e-6)


class _Waits(TorchDispatchMode):
    """Counts operations that would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "item"):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("outputs", [("logprobs",), OUTPUTS], ids=["support", "all"])
def test_no_step_waits_for_the_device(outputs):
    hidden, weight = head_and_states(40, 8, 50)
    sampled, rows = random_rows(40, 50)
    support = SupportCSR.from_lists(rows)
    with _Waits() as mode:
        scores = score_support(
            hidden, LMHead(weight), torch.tensor(sampled), support, outputs=outputs, implementation="union"
        )
        scores.logprobs.sum().backward()
    # One look at the tokens that a CPU can afford; a GPU asserts on the device.
    assert mode.waits == ["_local_scalar_dense"]


def test_a_plan_is_made_once():
    hidden, weight = head_and_states()
    sampled, rows = random_rows(12, 50)
    support = SupportCSR.from_lists(rows)
    for _ in range(2):
        score_support(hidden, LMHead(weight), torch.tensor(sampled), support)
    assert len(support._plans) == 1
    assert support.plan(0, 50, "sparse") is support.plan(0, 50, "sparse")


def test_other_devices_are_refused_by_name():
    for name in ("mps", "xpu"):
        with pytest.raises(ValueError, match=f"cannot be scored on '{name}'.* cpu and cuda devices"):
            plan.make_plan(np.array([1, 2]), np.array([0, 2]), 0, 5, kernel="union", device=torch.device(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\) for a weight of 5 rows"),
        ({"lora": LoRAFactors(torch.zeros(2, 4), torch.zeros(4, 2), 1.0)}, r"b \(4, 2\) do not fit"),
    ],
)
def test_head_parts_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LMHead(torch.zeros(5, 4), **arguments)
