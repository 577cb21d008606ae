"""Support scores in the place of Megatron's output layer, and the loss over them."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.megatron import recorded, scoring_parity, tiny_gpt
from tests.megatron.ranks import run_on_ranks
from tests.megatron.scoring_parity import OUTPUTS, ScoringParity
from tests.megatron.tiny_gpt import VOCAB
from trl_support_replay.megatron import (
    MegatronRouterReplay,
    MicroBatch,
    Tokens,
    collect_scores,
    mean_metrics,
    policy_loss,
    score_vocab_parallel_logits,
    split_scores,
    support_forward,
)

LOGPROBS = ("logprobs",)
SCORE_TOLERANCE, GRAD_TOLERANCE = 1e-6, 3e-6
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CONTEXT = {"context_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
# Whole experts on each rank: with split ones, the ranks of a tensor-parallel group would have to be as many.
WHOLE_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def check(ranks: list[ScoringParity], settings: dict[str, Any], outputs: tuple[str, ...] = OUTPUTS) -> None:
    split_vocabulary = settings.get("tensor_model_parallel_size", 1) > 1
    for rank, parity in enumerate(ranks):
        where = f"rank {rank}: {parity}"
        assert set(parity.score) == set(outputs), where
        assert max(parity.score.values()) <= SCORE_TOLERANCE, where
        assert parity.hidden_grad <= SCORE_TOLERANCE, where
        assert parity.grad[0] <= GRAD_TOLERANCE, where
        if parity.num_scored:
            assert parity.collectives == (["max", "sum"] if split_vocabulary else []), where
    copies = len(ranks) // (settings.get("context_parallel_size", 1) * settings.get("pipeline_model_parallel_size", 1))
    num_tokens = sum(batch.num_loss_tokens for batch in scoring_parity.micro_batches(packed=False))
    assert sum(parity.num_scored for parity in ranks) == copies * num_tokens


@pytest.mark.parametrize(("how", "outputs"), [("head", OUTPUTS), ("head", LOGPROBS), ("logits", OUTPUTS)])
@pytest.mark.parametrize("layout", [{}, {"tied": True}, {"packed": True}], ids=["rows", "tied", "packed"])
def test_one_process_against_the_definition(how: str, outputs: tuple[str, ...], layout: dict[str, bool]) -> None:
    check([scoring_parity.compare({}, how, outputs, **layout)], {}, outputs)


def test_two_tensor_and_sequence_parallel_ranks() -> None:
    check(run_on_ranks(2, "tests.megatron.scoring_parity:compare", TENSOR), TENSOR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings", "how", "outputs", "layout"),
    [
        (2, TENSOR, "head", LOGPROBS, {}),
        (2, TENSOR, "logits", OUTPUTS, {}),
        (2, TENSOR, "head", OUTPUTS, {"tied": True}),
        (2, TENSOR, "head", OUTPUTS, {"packed": True}),
        (2, {**DENSE, "tensor_model_parallel_size": 2}, "head", OUTPUTS, {}),
        (2, CONTEXT, "head", OUTPUTS, {}),
        (2, CONTEXT, "head", OUTPUTS, {"packed": True}),
        (2, PIPELINE, "head", OUTPUTS, {"tied": True}),
        (4, {**TENSOR, "tensor_model_parallel_size": 4}, "head", OUTPUTS, {}),
        (4, {**TENSOR, "tensor_model_parallel_size": 4}, "head", LOGPROBS, {"packed": True}),
        (4, {**TENSOR, **CONTEXT, **WHOLE_EXPERTS}, "head", OUTPUTS, {"packed": True}),
        (4, {**TENSOR, **PIPELINE, **WHOLE_EXPERTS}, "head", OUTPUTS, {"tied": True}),
    ],
)
def test_ranks(
    num_ranks: int, settings: dict[str, Any], how: str, outputs: tuple[str, ...], layout: dict[str, bool]
) -> None:
    tied, packed = layout.get("tied", False), layout.get("packed", False)
    ranks = run_on_ranks(num_ranks, "tests.megatron.scoring_parity:compare", settings, how, outputs, tied, packed)
    check(ranks, settings, outputs)


# In a loop


def build(**settings: Any) -> GPTModel:
    return tiny_gpt.build_chunks(tiny_gpt.config(**settings))[0]


def micro_batch(seed: int = 0) -> MicroBatch:
    return MicroBatch.from_traces(
        [recorded.random_trace(seed + i, vocab=VOCAB, num_layers=2, synthetic_eos=i == 0) for i in range(2)],
        width=20,
    )


def run(model: GPTModel, batches: list[MicroBatch], loss_of: Callable[[int], Any], **schedule: Any) -> list[Any]:
    indices = iter(range(len(batches)))

    def forward_step(iterator: Any, module: GPTModel) -> Any:
        i = next(indices)
        return support_forward(module, batches[i].tokens, batches[i].attention_mask()), loss_of(i)

    only = schedule.get("forward_only", False)
    with MegatronRouterReplay(model).schedule(forward_step, lambda i: batches[i].routes, only) as step:
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=model,
            num_microbatches=len(batches),
            seq_length=20,
            micro_batch_size=2,
            forward_only=only,
            collect_non_loss_data=schedule.get("collect_non_loss_data", False),
        )


def test_old_and_reference_passes_are_the_training_pass_without_gradient() -> None:
    batches = [micro_batch(0), micro_batch(10)]
    policy, reference = build(), build()
    with torch.no_grad():
        reference.output_layer.weight.mul_(1.5)
        old, ref = (
            run(model, batches, lambda i: collect_scores, forward_only=True, collect_non_loss_data=True)
            for model in (policy, reference)
        )
    assert [scores.shape for scores in old] == [(2, 20, 1)] * 2
    assert not any(scores.requires_grad for scores in old)
    seen: list[torch.Tensor] = []

    def loss_of(i: int) -> Any:
        loss = policy_loss(
            batches[i].tokens,
            torch.ones(2, 1),
            batches[i].num_loss_tokens,
            old_logprobs=old[i][..., 0],
            ref_logprobs=ref[i][..., 0],
            beta=0.1,
        )
        return lambda scores: seen.append(scores.detach().clone()) or loss(scores)

    reports = run(policy, batches, loss_of)
    assert all(torch.equal(new, before) for new, before in zip(seen, old, strict=True))
    metrics = mean_metrics(reports)
    assert metrics["ratio"] == 1.0
    assert metrics["clipped_fraction"] == 0.0
    mask = torch.stack([batch.tokens.loss_mask for batch in batches])
    gap = (torch.stack(ref) - torch.stack(old))[..., 0][mask]
    assert metrics["kl"] == pytest.approx((gap.exp() - gap - 1).mean().item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(-1 + 0.1 * metrics["kl"], rel=1e-5)
    assert policy.output_layer.weight.grad.abs().max() > 0


def test_a_micro_batch_without_targets_takes_part() -> None:
    batch = micro_batch()
    empty = Tokens(**{**vars(batch.tokens), "loss_mask": torch.zeros_like(batch.tokens.loss_mask)})
    model = build(**DENSE)
    scores = support_forward(model, empty, batch.attention_mask())
    assert torch.equal(scores, torch.zeros(2, 20, 1))
    # A whole micro-batch may be without targets too, where all of its completions are truncated and masked.
    assert policy_loss(empty, torch.ones(2, 1), 0)(scores)[0] == 0
    loss, report = policy_loss(empty, torch.ones(2, 1), batch.num_loss_tokens)(scores)
    loss.backward()
    assert report["sums"].tolist() == [0.0] * 5
    assert all(bool((p.grad == 0).all()) for p in model.parameters())


def test_the_output_layer_is_left_as_it_was() -> None:
    batch = micro_batch()
    model = build(**DENSE)
    support_forward(model, batch.tokens, batch.attention_mask())
    assert "forward" not in vars(model.output_layer)
    of_another_stage = torch.zeros(16, 2, tiny_gpt.HIDDEN)
    with pytest.raises(ValueError, match=re.escape("16 positions and 2 rows for tokens of shape (2, 20)")):
        support_forward(model, batch.tokens, batch.attention_mask()[..., :16, :16], decoder_input=of_another_stage)
    assert "forward" not in vars(model.output_layer)
    logits = model(batch.tokens.input_ids, batch.tokens.position_ids, batch.attention_mask())
    assert logits.shape == (2, 20, VOCAB)


def test_a_support_without_its_token_and_a_wrong_temperature() -> None:
    batch = micro_batch()
    model = build(**DENSE)
    shifted = Tokens(**{**vars(batch.tokens), "target_ids": batch.tokens.target_ids.roll(1, dims=1)})
    with pytest.raises(ValueError, match="not among the .* ids of its support"):
        support_forward(model, shifted, batch.attention_mask())
    with pytest.raises(ValueError, match="temperature=0"):
        support_forward(model, batch.tokens, batch.attention_mask(), temperature=0)


@pytest.mark.parametrize("skipped", [False, True])
def test_a_bias_counts_where_the_layer_adds_it(skipped: bool) -> None:
    batch = micro_batch()
    model = build(**DENSE)
    model.output_layer.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCAB))
    model.output_layer.skip_bias_add = skipped
    scores = support_forward(model, batch.tokens, batch.attention_mask(), outputs=OUTPUTS)
    logits = model(batch.tokens.input_ids, batch.tokens.position_ids, batch.attention_mask())
    want = score_vocab_parallel_logits(logits, batch.tokens, torch.distributed.group.WORLD, outputs=OUTPUTS)
    torch.testing.assert_close(scores, want, rtol=1e-5, atol=1e-6)
    if skipped:
        scores[..., 0].sum().backward()
        assert model.output_layer.bias.grad is None


@pytest.mark.parametrize("setting", ["use_mup", "defer_embedding_wgrad_compute"])
def test_settings_that_the_scorer_refuses(setting: str) -> None:
    batch = micro_batch()
    model = build(**DENSE)
    setattr(model.config, setting, True)
    with pytest.raises(ValueError, match=f"with {setting}=True"):
        support_forward(model, batch.tokens, batch.attention_mask())


def test_a_loss_that_megatron_would_divide_by_tokens_is_refused_in_training() -> None:
    batch = micro_batch()
    model = build(**DENSE)
    model.config.calculate_per_token_loss = True
    with pytest.raises(ValueError, match="Set calculate_per_token_loss=False"):
        support_forward(model, batch.tokens, batch.attention_mask())
    with torch.no_grad():
        assert support_forward(model, batch.tokens, batch.attention_mask()).shape == (2, 20, 1)


def test_output_layers_and_scores_of_another_kind() -> None:
    batch = micro_batch()
    model = build(**DENSE)
    model.output_layer = torch.nn.Linear(tiny_gpt.HIDDEN, VOCAB)
    with pytest.raises(ValueError, match="The output layer is a Linear"):
        support_forward(model, batch.tokens, batch.attention_mask())
    group = torch.distributed.group.WORLD
    with pytest.raises(ValueError, match=re.escape("Logits of shape (2, 19, 96) for tokens of (2, 20)")):
        score_vocab_parallel_logits(torch.zeros(2, 19, VOCAB), batch.tokens, group)
    with pytest.raises(ValueError, match=re.escape("Scores of shape (2, 20, 1) do not hold the 2 outputs")):
        split_scores(torch.zeros(2, 20, 1), ("logprobs", "log_mass"))
    with pytest.raises(ValueError, match="collect_non_loss_data=True"):
        collect_scores(torch.zeros(2, 20, 1), non_loss_data=False)
    with pytest.raises(ValueError, match="beta=0.1 needs ref_logprobs"):
        policy_loss(batch.tokens, torch.ones(2, 1), 1, beta=0.1)


# The loss


@given(seed=st.integers(0, 1000), epsilon=st.floats(0.05, 0.5), beta=st.sampled_from([0.0, 0.2]))
def test_policy_loss_token_by_token(seed: int, epsilon: float, beta: float) -> None:
    batch = micro_batch(seed)
    tokens = batch.tokens
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(2, 20, 1, generator=generator).double() - 2).requires_grad_()
    ref = torch.randn(2, 20, generator=generator).double() - 2
    advantages = torch.randn(2, 1, generator=generator).double()
    loss, report = policy_loss(
        tokens, advantages, batch.num_loss_tokens, ref_logprobs=ref if beta else None, epsilon=epsilon, beta=beta
    )(scores)
    loss.backward()

    total, clipped = 0.0, 0
    grad = torch.zeros(2, 20, dtype=torch.double)
    for row, position in tokens.loss_mask.nonzero().tolist():
        logprob = scores[row, position, 0].item()
        old = tokens.recorded_logprobs[row, position].item()
        ratio = 1.0 if old != old else math.exp(logprob - old)
        advantage = advantages[row, 0].item()
        bounded = min(max(ratio, 1 - epsilon), 1 + epsilon)
        is_clipped = bounded * advantage < ratio * advantage
        clipped += is_clipped
        total -= bounded * advantage if is_clipped else ratio * advantage
        grad[row, position] = 0 if is_clipped else -ratio * advantage
        if beta:
            gap = ref[row, position].item() - logprob
            exp = math.exp(gap)
            total += beta * (exp - gap - 1)
            grad[row, position] += beta * (1 - exp)
    count = batch.num_loss_tokens
    assert batch.num_synthetic_eos == 1
    assert loss.item() == pytest.approx(total / count, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(scores.grad[..., 0], grad / count, rtol=1e-5, atol=1e-9)
    metrics = mean_metrics([report, report])
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-9, abs=1e-12)
    assert metrics["clipped_fraction"] == pytest.approx(clipped / count)
