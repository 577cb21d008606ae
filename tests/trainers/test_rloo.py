"""RLOO over supports: stock where there is nothing to replay, exact where there is, and checked."""

import numpy as np
import pytest
import torch
from trl import RLOOConfig, RLOOTrainer

from trl_support_replay import SupportReplayRLOOConfig, SupportReplayRLOOTrainer
from trl_support_replay.analysis.audit import load_traces
from trl_support_replay.checks.replay_check import ReplayGapError
from trl_support_replay.traces.columns import TraceSchemaError
from trl_support_replay.trainers import rloo as rloo_module

from .test_replay import assert_replayed
from .test_stock_equality import TWO_STEPS, VOCABULARY, Steps

OURS = {"trainer_cls": SupportReplayRLOOTrainer, "config_cls": SupportReplayRLOOConfig}
STOCK = {"trainer_cls": RLOOTrainer, "config_cls": RLOOConfig}


def run(build, path, classes, **settings):
    steps = Steps()
    trainer = build(path, callbacks=[steps], max_grad_norm=0.0, optim="sgd", **classes, **settings)
    trainer.train()
    return trainer, steps.gradients


@pytest.mark.parametrize(
    ("top_k", "extra", "ours"),
    [
        (0, {"beta": 0.2}, {}),
        (VOCABULARY, {}, {}),
        (VOCABULARY, {"beta": 0.2, "normalize_advantages": True}, {}),
        (VOCABULARY, {"beta": 0.2}, {"kl_scope": "full"}),
        (VOCABULARY, {"beta": 0.2}, {"kl_scope": "support", "entropy_scope": "full"}),
    ],
    ids=str,
)
def test_without_truncation_training_is_stock(build, tiny_model_path, top_k, extra, ours):
    settings = TWO_STEPS | extra | {"top_k": top_k, "learning_rate": 1e-8}
    stock, expected = run(build, tiny_model_path, STOCK, **settings)
    trainer, gradients = run(build, tiny_model_path, OURS, **settings | ours)
    assert trainer.replays_support == (top_k > 0)
    assert len(gradients) == len(expected) == 2
    for got, want in zip(gradients, expected, strict=True):
        # The ratio is exp of a difference of two sums near -40, whose float32 rounding (4e-6) is a factor of all.
        scale = max(1.0, *(float(gradient.abs().max()) for gradient in want.values()))
        for name in want:
            torch.testing.assert_close(got[name] / scale, want[name] / scale, atol=1e-5, rtol=0)
    assert max(g.abs().max() for g in expected[1].values()) > 1e-4
    for got, want in zip(trainer.state.log_history[:-1], stock.state.log_history[:-1], strict=True):
        for metric in ("loss", "entropy", "kl", "reward"):
            if metric in want:
                # A loss is the mean of ratios, with that rounding, times advantages of up to 8 that cancel.
                assert got[metric] == pytest.approx(want[metric], abs=4e-5 if metric == "loss" else 1e-5)


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 8}, {"min_p": 0.1}], ids=str)
def test_replayed_equals_recorded(build, tiny_model_path, truncation):
    trainer = build(tiny_model_path, **OURS, **truncation, use_vllm=False)
    trainer.train()
    assert_replayed(trainer, 2)


def test_with_vllm(build, vllm, tiny_llama_path):
    settings = {"use_vllm": True, "top_k": 20, "top_p": 0.9, "max_completion_length": 12}
    trainer = build(tiny_llama_path, **OURS, **settings)
    trainer.train()
    assert_replayed(trainer, 2)


def test_adapters_and_their_reference(build, tiny_model_path):
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    trainer = build(tiny_model_path, **OURS, top_p=0.9, beta=0.1, lora=lora)
    trainer.train()
    assert_replayed(trainer, 2)
    kl = [log["kl"] for log in trainer.state.log_history if "kl" in log]
    assert kl[0] == pytest.approx(0, abs=1e-6) and abs(kl[1]) > 1e-6


def test_routes(build, moe_path):
    trainer = build(moe_path, **OURS, top_p=0.9, routed_experts_replay=True, use_vllm=False)
    trainer.train()
    assert_replayed(trainer, 2)
    assert all(log["routes/agreement"] > 0.9 for log in trainer.state.log_history if "routes/agreement" in log)


@pytest.mark.parametrize("scope", ["support", "full"])
def test_the_penalty_compares_what_kl_scope_says(build, tiny_model_path, scope):
    """Against both distributions written out from the logits of policy and reference."""
    trainer = build(tiny_model_path, **OURS, top_p=0.7, beta=0.1, kl_scope=scope)
    with torch.no_grad():  # the policy is not the reference
        trainer.model.lm_head.weight.mul_(0.9)
    compute, seen = trainer._compute_loss, []
    trainer._compute_loss = lambda model, inputs: (seen.append(inputs), compute(model, inputs))[1]
    batch = []
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: (batch.append(score(inputs)), batch[-1])[1]
    trainer.args.max_steps = 1
    reference = type(trainer.model).from_pretrained(tiny_model_path)
    policy = type(trainer.model).from_pretrained(tiny_model_path)
    policy.load_state_dict(trainer.model.state_dict())
    trainer.train()
    output = batch[0]
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    start = output["prompt_ids"].shape[1] - 1
    with torch.no_grad():
        logits = [m(input_ids=ids, attention_mask=mask).logits[:, start:-1].double() for m in (policy, reference)]
    differences = []
    for b, sample in enumerate(output["support_samples"]):
        for t, row in enumerate(sample.supports.to_lists()):
            candidates = row if scope == "support" else list(range(VOCABULARY))
            place = candidates.index(int(sample.completion_ids[t]))
            p, r = (torch.log_softmax(z[b, t, candidates], 0)[place] for z in logits)
            differences.append(float(p - r))
    kl = next(log["kl"] for log in trainer.state.log_history if "kl" in log)
    assert kl == pytest.approx(np.mean(differences), abs=1e-5) and abs(kl) > 1e-3


def test_shifted_records_stop_the_run(build, tiny_model_path, monkeypatch):
    collect = rloo_module.collect_samples

    def shifted(*args, **kwargs):
        collected = collect(*args, **kwargs)
        for sample in collected.samples:
            sample.sampling_logprobs[:] = np.roll(sample.sampling_logprobs, 1)
        return collected

    monkeypatch.setattr(rloo_module, "collect_samples", shifted)
    with pytest.raises(ReplayGapError, match="shifted by one"):
        build(tiny_model_path, **OURS, top_p=0.9).train()


def test_evaluation_is_stock_and_traces_are_saved(build, tiny_model_path, tmp_path):
    from .conftest import sums

    more = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "eval_dataset": sums(4)}
    trainer = build(tiny_model_path, **OURS, top_p=0.9, save_traces=str(tmp_path / "traces"), **more)
    trainer.train()
    assert any("eval_loss" in log for log in trainer.state.log_history)
    assert load_traces(tmp_path / "traces", 100).num_saved == 8


def test_what_it_does_not_do_is_refused(build, tiny_model_path, tmp_path):
    trainer = build(tiny_model_path, **OURS, top_p=0.9, save_traces=str(tmp_path / "traces"))
    trainer.train()
    from datasets import Dataset

    saved = Dataset.from_parquet([str(p) for p in sorted((tmp_path / "traces").glob("*.parquet"))])
    with pytest.raises(TraceSchemaError, match="SupportReplayGRPOTrainer can"):
        build(tiny_model_path, **OURS, top_p=0.9, train_dataset=saved)
    with pytest.raises(ValueError, match="vllm_mode='server' is not supported"):
        SupportReplayRLOOConfig(str(tmp_path), use_vllm=True, vllm_mode="server", top_k=5, bf16=False, use_cpu=True)
    with pytest.raises(TypeError, match="needs a SupportReplayRLOOConfig"):
        build(tiny_model_path, trainer_cls=SupportReplayRLOOTrainer)
