"""Routed experts through the real trainer: recorded by the generator, replayed in every scoring pass."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import Qwen3MoeForCausalLM

import trl_support_replay.trainers.grpo as trainer_module
from trl_support_replay.checks.replay_check import ReplayGapError
from trl_support_replay.rollouts.collect import collect_samples
from trl_support_replay.routing import UnreplayableRouterError
from trl_support_replay.traces.routes import RoutedExperts, RoutesError

from .test_multi_turn import rollout
from .test_replay import assert_replayed

HF = {"use_vllm": False, "routed_experts_replay": True, "max_completion_length": 10, "learning_rate": 1e-2}


def moved(trainer, path):
    fresh = Qwen3MoeForCausalLM.from_pretrained(path)
    return {
        n: (p - q).abs().max().item()
        for (n, p), q in zip(trainer.model.named_parameters(), fresh.parameters(), strict=True)
    }


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"top_p": 0.9}, id="top_p"),
        pytest.param({}, id="without truncation"),
        pytest.param({"top_k": 8, "gradient_checkpointing": False}, id="no gradient checkpointing"),
        pytest.param(
            {"top_k": 8, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, id="re-entrant checkpoints"
        ),
        pytest.param(
            {"top_k": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}, id="splits"
        ),
        pytest.param({"top_k": 8, "beta": 0.1, "routes_for_reference": "replay"}, id="reference replays"),
        pytest.param({"top_k": 8, "beta": 0.1}, id="reference routes live"),
        pytest.param({"top_k": 8, "router_aux_loss_coef": 0.01}, id="load-balancing loss"),
        pytest.param({"top_k": 8, "rollout_func": rollout()}, id="two turns"),
        pytest.param({"top_k": 8, "pad_to_multiple_of": 8}, id="padded to multiples"),
    ],
)
def test_training_through_recorded_routes(build, moe_path, settings):
    trainer = build(moe_path, **HF | settings)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "support/logprob_gap_max" in log]
    assert len(logs) == 2
    for log in logs:
        assert log["support/logprob_gap_max"] <= 1e-4 and log["sampling/outside_10pct"] == 0
    routed = [log for log in trainer.state.log_history if "routes/agreement" in log]
    # The generator and the policy are the same model, so the live router agrees up to rounding.
    assert len(routed) == trainer.state.global_step and routed[0]["routes/agreement"] > 0.99
    assert {"routes/agreement_layer_1", "routes/agreement_layer_2"} <= set(routed[0])
    assert "routes/agreement_layer_0" not in routed[0]
    # Of the 4 completions of a pass, those that are sampled to the end of the batch have a last token that no router
    # saw. The passes of a step are added up.
    passes = settings.get("gradient_accumulation_steps", 1)
    assert all(log["routes/uncaptured"] <= 4 * passes for log in routed)
    change = moved(trainer, moe_path)
    assert min(v for n, v in change.items() if n.endswith("mlp.gate.weight")) > 0
    assert not any("forward" in vars(m) for n, m in trainer.model.named_modules() if n.endswith("gate"))


def test_lora_on_a_routed_model(build, moe_path):
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    trainer = build(moe_path, **HF, top_k=8, beta=0.1, lora=lora)
    trainer.train()
    assert_replayed(trainer, 2)


def cut_rollout(keep, observed=0, again=False, shared=False, keep_last=lambda b, ids: len(ids)):
    """Two turns of which only a beginning is kept.

    Args:
        keep, keep_last: how many tokens of the first and the last turn completion `b` keeps.
        observed: number of observation tokens between the turns.
        again: sample the first turn twice, and keep the second try.
        shared: all completions of a prompt start with the first one's first turn.
    """

    def run(prompts, trainer):
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)

        def sample(histories, keep):
            ids, values = trainer._generate_single_turn(histories, None, {}, trainer.num_generations)
            if shared and histories is prompt_ids:
                ids, values = [ids[0]] * len(ids), [values[0]] * len(ids)
            kept = [keep(b, row) for b, row in enumerate(ids)]
            return [x[:n] for x, n in zip(ids, kept, strict=True)], [x[:n] for x, n in zip(values, kept, strict=True)]

        if again:
            sample(prompt_ids, keep)
        first, first_values = sample(prompt_ids, keep)
        between = [5] * observed
        second, second_values = sample(
            [p + a + between for p, a in zip(prompt_ids, first, strict=True)], lambda b, ids: max(keep_last(b, ids), 1)
        )
        turns = list(zip(first, second, strict=True))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [a + between + b for a, b in turns],
            "logprobs": [a + [0.0] * observed + b for a, b in zip(first_values, second_values, strict=True)],
            "env_mask": [[1] * len(a) + [0] * observed + [1] * len(b) for a, b in turns],
        }

    return run


def before_stop(b, ids):
    """Up to the first small letter, as a trim at a stop string leaves it."""
    return next((i for i, token in enumerate(ids) if 69 <= token <= 94), len(ids))


CUTS = {
    "in the middle": cut_rollout(lambda b, ids: len(ids) // 2),
    "observations behind the cut": cut_rollout(lambda b, ids: len(ids) // 2, observed=3),
    "the last token": cut_rollout(lambda b, ids: len(ids) - 1),
    "the whole turn": cut_rollout(lambda b, ids: 0),
    "each completion elsewhere": cut_rollout(lambda b, ids: 2 * b, observed=1),
    "at a stop string": cut_rollout(before_stop),
    "a second try": cut_rollout(lambda b, ids: 4, again=True),
    "one turn for all completions": cut_rollout(lambda b, ids: 2 + b, shared=True),
    "the last turn too": cut_rollout(lambda b, ids: 4, keep_last=lambda b, ids: 1 + b),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_turn_that_is_cut_and_sampled_on_from(build, moe_path, cut):
    trainer = build(moe_path, **HF | {"top_p": 0.9, "rollout_func": CUTS[cut], "replay_check": "off"})
    trainer.train()
    logs = [log for log in trainer.state.log_history if "support/logprob_gap_max" in log]
    assert len(logs) == 2 and all(log["support/logprob_gap_max"] <= 2e-5 for log in logs)
    # Only the last token of a completion has no routes, when the engine did not run it.
    assert all(log["routes/uncaptured"] <= 4 for log in trainer.state.log_history if "routes/uncaptured" in log)


def test_turns_of_another_history_are_refused(build, moe_path):
    def from_the_middle(prompts, trainer):
        output = cut_rollout(lambda b, ids: 4)(prompts, trainer)
        return output | {name: [row[1:] for row in output[name]] for name in ("completion_ids", "logprobs", "env_mask")}

    trainer = build(moe_path, **HF, top_p=0.9, rollout_func=from_the_middle)
    with pytest.raises(RoutesError, match="completion 0: token 0 was sampled at position .* not off its beginning"):
        trainer.train()


def test_a_completion_of_which_nothing_sampled_is_left(build, moe_path):
    def dropped(prompts, trainer):
        output = cut_rollout(lambda b, ids: 4)(prompts, trainer)
        for name, end in (("completion_ids", 2), ("logprobs", 0.0), ("env_mask", 1)):
            output[name][1] = [end]
        return output

    trainer = build(moe_path, **HF, top_p=0.9, rollout_func=dropped)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "support/logprob_gap_max" in log]
    assert len(logs) == 2
    assert all(log["support/logprob_gap_max"] <= 2e-5 and log["support/synthetic_eos"] == 1 for log in logs)


def edit_samples(trainer, edit):
    """Change the recorded routes of a batch before anything is scored."""
    import trl_support_replay.trainers.grpo as module

    collect = module.collect_samples

    def edited(*args, **kwargs):
        collected = collect(*args, **kwargs)
        edit(collected.samples)
        return collected

    return module, edited


def swap_two(samples):
    n = min(len(samples[0].routes), len(samples[1].routes)) - 1
    a, b = samples[0].routes, samples[1].routes
    a.experts[:n], b.experts[:n] = b.experts[:n].copy(), a.experts[:n].copy()


def shift_by_one(samples):
    for sample in samples:
        n = sample.routes.captured_prefix
        sample.routes.experts[:n] = np.roll(sample.routes.experts[:n], 1, axis=0)


@pytest.mark.parametrize("edit", [swap_two, shift_by_one])
def test_wrong_routes_are_found_by_the_gap(build, moe_path, monkeypatch, edit):
    trainer = build(moe_path, **HF, top_p=0.9)
    module, edited = edit_samples(trainer, edit)
    monkeypatch.setattr(module, "collect_samples", edited)
    with pytest.raises(ReplayGapError):
        trainer.train()
    assert not trainer._routes.of(trainer.model).is_open  # nothing is left behind


def test_the_live_gap_is_logged_when_asked_for(build, moe_path, monkeypatch):
    """With a perturbed generator, replaying only the supports leaves a gap that replaying the routes removes."""
    trainer = build(moe_path, **HF, top_p=0.9, routes_gap_steps=1)
    generate = trainer._generate_single_turn

    def perturbed(*args, **kwargs):
        gates = [m for n, m in trainer.model.named_modules() if n.endswith("mlp.gate")]
        hooks = [gate.register_forward_pre_hook(lambda m, a: (a[0] + 0.5 * a[0].roll(1, -1), *a[1:])) for gate in gates]
        try:
            return generate(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    monkeypatch.setattr(trainer, "_generate_single_turn", perturbed)
    trainer.args.replay_check = "off"
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["routes/agreement"] < 0.9
    assert log["routes/logprob_gap_live_max"] > 1e-2
    assert log["support/logprob_gap_mean"] < 0.5 * log["routes/logprob_gap_live_mean"]


def test_routes_of_the_next_token_are_told_by_the_live_routers(build, moe_path, monkeypatch):
    def shifted(*args, **kwargs):
        collected = collect_samples(*args, **kwargs)
        collected.samples = [
            replace(s, routes=s.routes.take(np.roll(np.arange(len(s.routes)), 1))) for s in collected.samples
        ]
        return collected

    monkeypatch.setattr(trainer_module, "collect_samples", shifted)
    with pytest.raises(ReplayGapError, match="recorded routes are not those of these tokens: through the live routers"):
        build(moe_path, **HF, top_p=0.9).train()


def test_dense_models_are_refused(build, tiny_model_path):
    trainer = build(tiny_model_path, **HF)
    with pytest.raises(UnreplayableRouterError):
        trainer.train()


def test_a_rollout_without_routes_is_refused(build, moe_path):
    from .test_multi_turn import supports_of

    trainer = build(moe_path, **HF, top_p=0.9, rollout_func=rollout(supports_of))
    with pytest.raises(RoutesError, match="has no routes, which routed_experts_replay=True asks for"):
        trainer.train()


def too_short(routes):
    return routes[:-1]  # whose last token would be taken for padding


def other_layers(routes):
    return RoutedExperts(routes.experts, captured=routes.captured, layers=(0, 2), num_experts=routes.num_experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (too_short, r"sample 1: recorded tokens \d+, expected"),
        (other_layers, r"recorded layers \(0, 2\), expected \(1"),
    ],
)
def test_routes_of_other_tokens_or_layers_are_refused(build, moe_path, monkeypatch, change, message):
    def edit(samples):
        samples[1] = replace(samples[1], routes=change(samples[1].routes))

    trainer = build(moe_path, **HF, top_p=0.9)
    module, edited = edit_samples(trainer, edit)
    monkeypatch.setattr(module, "collect_samples", edited)
    with pytest.raises(RoutesError, match=message):
        trainer.train()


def test_a_trainer_without_replay_in_the_same_process_is_untouched(build, moe_path, tmp_path):
    replaying = build(moe_path, **HF, top_p=0.9)
    replaying.train()
    plain = build(moe_path, use_vllm=False, max_completion_length=10, output_dir=str(tmp_path / "plain"))
    plain.train()
    assert not any(key.startswith("routes/") for log in plain.state.log_history for key in log)
    assert plain._routes._replays == {}
