"""Trainers with a loss of their own: a batch with recorded supports is scored over them, or an error says why not."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.utils import split_tensor_dict

from trl_support_replay import SupportReplayGRPOTrainer, SupportReplayRLOOConfig, SupportReplayRLOOTrainer
from trl_support_replay.trainers.passes import UnscoredBatchError

HF = {"use_vllm": False, "top_p": 0.9}


def scored(trainer, model, inputs, **kwargs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, length, **kwargs)[0]


def policy_gradient(trainer, logps, inputs):
    """A loss, and the log ratio of every sequence, kept in `trainer.ratios`."""
    on = inputs["completion_mask"]
    old = inputs.get("old_per_token_logps")
    ratio = logps - (logps.detach() if old is None else old)
    trainer.ratios += (ratio * on).sum(1).detach().exp().tolist()
    return -(ratio.exp() * inputs["advantages"][:, None] * on).sum() / on.sum()


class OwnLoss(SupportReplayGRPOTrainer):
    compute_entropy = True

    def _compute_loss(self, model, inputs):
        self.ratios = getattr(self, "ratios", [])
        return policy_gradient(self, scored(self, model, inputs, compute_entropy=self.compute_entropy), inputs)


class WithoutEntropy(OwnLoss):
    compute_entropy = False


class OwnComputeLoss(SupportReplayGRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.ratios = getattr(self, "ratios", [])
        return policy_gradient(self, scored(self, model, inputs), inputs)


class InHalves(SupportReplayGRPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return sum(self._compute_loss(model, half) for half in split_tensor_dict(inputs, 2)) / 2


class GMPOSecond(SupportReplayGRPOTrainer, GMPOTrainer):
    pass


class GMPOFirst(GMPOTrainer, SupportReplayGRPOTrainer):
    pass


@pytest.mark.parametrize("trainer_cls", [OwnLoss, WithoutEntropy, OwnComputeLoss])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_own_losses_are_scored_over_supports(build, tiny_model_path, trainer_cls, num_iterations):
    # Tiny steps: every ratio would be 1 but for what scoring leaves out.
    trainer = build(tiny_model_path, trainer_cls, **HF, num_iterations=num_iterations, learning_rate=1e-9)
    trainer.train()
    assert len(trainer.ratios) == 8
    assert max(abs(ratio - 1) for ratio in trainer.ratios) < 1e-4
    (gaps,) = {len([log for log in trainer.state.log_history if "support/logprob_gap_max" in log])}
    assert gaps == 2 // num_iterations


@pytest.mark.parametrize("trainer_cls", [GMPOSecond, GMPOFirst])
def test_gmpo_replays_in_either_order_of_bases(build, tiny_model_path, trainer_cls, monkeypatch):
    ratios = []
    score = SupportReplayGRPOTrainer._get_per_token_logps_and_entropies

    def keep(self, model, *args, **kwargs):
        found = score(self, model, *args, **kwargs)
        batch = self._pass.inputs
        if "old_per_token_logps" in batch:
            ratios.extend(((found[0] - batch["old_per_token_logps"]) * batch["completion_mask"]).sum(1).exp().tolist())
        return found

    monkeypatch.setattr(SupportReplayGRPOTrainer, "_get_per_token_logps_and_entropies", keep)
    trainer = build(tiny_model_path, trainer_cls, **HF, num_iterations=2, learning_rate=1e-9, max_steps=2)
    trainer.train()
    assert len(ratios) == 8 and max(abs(ratio - 1) for ratio in ratios) < 1e-4
    assert all(log["support/logprob_gap_max"] < 1e-4 for log in trainer.state.log_history if "support/size_mean" in log)
    assert any("support/entropy" in log for log in trainer.state.log_history)


def test_a_loss_may_take_its_batch_in_parts(build, tiny_model_path):
    losses = {}
    for trainer_cls in (SupportReplayGRPOTrainer, InHalves):
        trainer = build(tiny_model_path, trainer_cls, **HF, loss_type="grpo", max_steps=1)
        trainer.train()
        log = trainer.state.log_history[0]
        assert log["support/logprob_gap_max"] < 1e-4
        losses[trainer_cls] = log["grad_norm"]
    assert losses[InHalves] == pytest.approx(losses[SupportReplayGRPOTrainer], rel=1e-4)


def shuffled(names, order=(2, 0, 3, 1)):
    class Shuffled(SupportReplayGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            inputs = super()._prepare_inputs(generation_batch)
            for name, value in list(inputs.items()):
                if isinstance(value, list) or (name in names and isinstance(value, torch.Tensor) and value.dim()):
                    inputs[name] = [value[i] for i in order] if isinstance(value, list) else value[list(order)]
            return inputs

    return Shuffled


def test_a_batch_may_be_reordered_in_place_with_its_samples(build, tiny_model_path):
    norms = []
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "sampling_per_token_logps")
    for trainer_cls in (SupportReplayGRPOTrainer, shuffled(names)):
        trainer = build(tiny_model_path, trainer_cls, **HF, max_steps=1)
        trainer.train()
        assert trainer.state.log_history[0]["support/logprob_gap_max"] < 1e-4
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    with pytest.raises(RuntimeError, match="reorders or cuts a batch has to do the same to its support_samples"):
        build(tiny_model_path, shuffled(()), **HF, max_steps=1).train()


def test_full_kl_is_complete_only_after_scoring(build, tiny_model_path):
    class ReadsTooEarly(SupportReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            reference = inputs["ref_per_token_logps"]
            return ((scored(self, model, inputs) - reference) ** 2).mean()

    trainer = build(tiny_model_path, ReadsTooEarly, **HF, beta=0.1, kl_scope="full")
    with pytest.raises(UnscoredBatchError, match="'ref_per_token_logps'.*before the policy was scored.*kl_scope"):
        trainer.train()


def test_full_kl_of_an_own_loss_is_that_of_grpo(build, tiny_model_path):
    kl = {}
    for trainer_cls in (SupportReplayGRPOTrainer, GMPOSecond):
        trainer = build(tiny_model_path, trainer_cls, **HF, beta=0.1, kl_scope="full", max_steps=3, learning_rate=1e-2)
        trainer.train()
        kl[trainer_cls] = trainer.state.log_history[0]["kl"]
    # Before the first update, policy and reference are one.
    assert kl[GMPOSecond] == pytest.approx(kl[SupportReplayGRPOTrainer], abs=1e-6)


def test_full_kl_keeps_its_gradient_when_the_batch_is_first_scored_without(build, tiny_model_path):
    class LooksFirst(SupportReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            with torch.no_grad():
                scored(self, model, inputs)
            return super()._compute_loss(model, inputs)

    norms = {}
    for trainer_cls in (SupportReplayGRPOTrainer, LooksFirst):
        # Only the penalty has a gradient, from the second step on.
        rewards = {"reward_funcs": lambda completions, **_: [1.0] * len(completions)}
        options = {"beta": 1.0, "kl_scope": "full", "learning_rate": 1e-2, "warmup_steps": 0, "max_steps": 3}
        trainer = build(tiny_model_path, trainer_cls, **HF, **rewards, **options, num_iterations=3)
        trainer.model.lm_head.weight.data.add_(torch.randn_like(trainer.model.lm_head.weight) / 10)
        trainer.train()
        norms[trainer_cls] = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert norms[LooksFirst] == pytest.approx(norms[SupportReplayGRPOTrainer], rel=1e-3)


def test_full_kl_of_a_copy_made_after_scoring_is_refused(build, tiny_model_path):
    class Reweighs(SupportReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            weights = scored(self, model, inputs).detach().mean(1).exp()
            return super()._compute_loss(model, {**inputs, "advantages": inputs["advantages"] * weights})

    with pytest.raises(UnscoredBatchError, match="'ref_per_token_logps'.*kl_scope='support'"):
        build(tiny_model_path, Reweighs, **HF, beta=0.1, kl_scope="full").train()
    build(tiny_model_path, Reweighs, **HF, beta=0.1, kl_scope="support").train()


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_scores_of_another_model_are_not_taken_for_the_policys(build, tiny_model_path, num_iterations):
    class Teacher(SupportReplayGRPOTrainer):
        with_policy = True

        def _compute_loss(self, model, inputs):
            if not hasattr(self, "teacher"):
                self.teacher = copy.deepcopy(self.model).requires_grad_(False)
                self.teacher.lm_head.weight.mul_(1.3)
            with torch.no_grad():
                self.taught = scored(self, self.teacher, inputs)
            if not self.with_policy:
                return sum(p.sum() for p in model.parameters()) * 0 + self.taught.sum()
            self.own = scored(self, model, inputs).detach()
            return super()._compute_loss(model, inputs)

    trainer = build(tiny_model_path, Teacher, **HF, num_iterations=num_iterations)
    trainer.train()
    assert (trainer.taught - trainer.own).abs().max() > 1e-2
    assert trainer.state.log_history[0]["support/logprob_gap_max"] < 1e-4
    with pytest.raises(UnscoredBatchError, match="computed its loss without scoring the batch"):
        build(tiny_model_path, type("Only", (Teacher,), {"with_policy": False}), **HF).train()


def test_another_model_needs_the_head(build, tiny_model_path):
    class Teacher(SupportReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            with torch.no_grad():
                scored(self, AutoModelForCausalLM.from_pretrained(tiny_model_path), inputs)

    with pytest.raises(UnscoredBatchError, match="LlamaForCausalLM is neither the policy.*add_replay_head"):
        build(tiny_model_path, Teacher, **HF).train()


def test_a_loss_that_calls_the_model_by_itself_is_refused(build, tiny_model_path):
    class ByHand(SupportReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            return model(input_ids=ids).logits.logsumexp(-1).mean()

    with pytest.raises(UnscoredBatchError, match="without their supports.*_get_per_token_logps_and_entropies"):
        build(tiny_model_path, ByHand, **HF).train()


def test_a_loss_may_call_the_model_on_other_tokens(build, tiny_model_path):
    class WithAuxiliaryLoss(SupportReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            other = torch.full((2, inputs["prompt_ids"].size(1) + 4), 40)
            return super()._compute_loss(model, inputs) + model(input_ids=other, labels=other).loss

    trainer = build(tiny_model_path, WithAuxiliaryLoss, **HF)
    trainer.train()
    assert trainer.state.log_history[0]["support/logprob_gap_max"] < 1e-4


def test_a_loss_that_scores_nothing_is_refused(build, tiny_model_path):
    class Nothing(SupportReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return sum(p.sum() for p in model.parameters()) * 0

    with pytest.raises(UnscoredBatchError, match="Nothing computed its loss without scoring the batch"):
        build(tiny_model_path, Nothing, **HF).train()


def test_generation_that_records_nothing_is_refused(build, tiny_model_path):
    class OwnGeneration(SupportReplayGRPOTrainer):
        def _generate(self, prompts):
            return GRPOTrainer._generate(self, prompts)

    with pytest.raises(UnscoredBatchError, match="OwnGeneration sampled completions without recording.*super"):
        build(tiny_model_path, OwnGeneration, **HF).train()


def test_scoring_outside_of_a_pass_names_its_batch(build, tiny_model_path):
    class Rescores(SupportReplayGRPOTrainer):
        named = True

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            if self.named and self.model.training:
                with torch.no_grad(), self.scoring(output):
                    self.again = scored(self, self.model, output)
                recorded = torch.tensor([x for t in output["support_samples"] for x in t.sampling_logprobs])
                self.gap = (self.again[output["completion_mask"].bool()] - recorded).abs().max().item()
            elif self.model.training:
                scored(self, self.model, output)
            return output

    trainer = build(tiny_model_path, Rescores, **HF, max_steps=1)
    trainer.train()
    assert trainer.gap < 1e-4
    trainer = build(tiny_model_path, type("Unnamed", (Rescores,), {"named": False}), **HF, max_steps=1)
    with pytest.raises(UnscoredBatchError, match="with self.scoring"):
        trainer.train()


def test_rloo_with_an_own_loss(build, tiny_model_path):
    class OwnRLOO(SupportReplayRLOOTrainer):
        def _compute_loss(self, model, inputs):
            self.ratios = getattr(self, "ratios", [])
            return policy_gradient(self, scored(self, model, inputs), inputs)

    trainer = build(tiny_model_path, OwnRLOO, SupportReplayRLOOConfig, **HF, learning_rate=1e-9)
    trainer.train()
    assert len(trainer.ratios) == 8 and max(abs(ratio - 1) for ratio in trainer.ratios) < 1e-4


def test_an_argument_given_twice_is_refused(build, tiny_model_path):
    with pytest.raises(TypeError, match="eval_dataset"):
        SupportReplayGRPOTrainer(tiny_model_path, None, None, None, None, eval_dataset=None)


def test_stock_runs_leave_own_losses_alone(build, tiny_model_path):
    trainer = build(tiny_model_path, OwnLoss, use_vllm=False, learning_rate=1e-9)
    trainer.train()
    assert len(trainer.ratios) == 8 and isinstance(trainer, GRPOTrainer)
