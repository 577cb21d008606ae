"""Where there is nothing to replay, or the support is the whole vocabulary, training is stock TRL's."""

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
VOCABULARY = 99
STOCK = {}  # logs and gradients of stock runs, by their settings: many tests compare with the same


class Steps(TrainerCallback):
    """Keeps the gradient of every optimizer step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def run(build, path, stock, **settings):
    steps = Steps()
    classes = {"trainer_cls": GRPOTrainer, "config_cls": GRPOConfig} if stock else {}
    trainer = build(path, callbacks=[steps], max_grad_norm=0.0, optim="sgd", **classes, **settings)
    trainer.train()
    return trainer, steps.gradients


def assert_equal(build, path, ours, stock):
    key = repr(stock)
    if key not in STOCK:
        trainer, gradients = run(build, path, True, **stock)
        STOCK[key] = trainer.state.log_history, gradients
    expected, expected_gradients = STOCK[key]
    trainer, gradients = run(build, path, False, **ours)
    assert len(gradients) == len(expected_gradients) > 0
    biggest = 0.0
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert got.keys() == want.keys()
        # Sums of large terms that cancel are rounded as the terms are.
        scale = max(1.0, *(float(gradient.abs().max()) for gradient in want.values()))
        for name in want:
            torch.testing.assert_close(got[name], want[name], atol=1e-6 * scale, rtol=1e-5)
            biggest = max(biggest, want[name].abs().max().item())
    assert biggest > 1e-4  # the comparison is of something
    for got, want in zip(trainer.state.log_history[:-1], expected[:-1], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-6)
        for metric in ("entropy", "kl", "reward"):
            if metric in want:
                assert got[metric] == pytest.approx(want[metric], abs=1e-5)
    return trainer


# Two steps a generation, so that the second has a ratio that is not 1.
TWO_STEPS = {"num_iterations": 2, "max_steps": 2, "learning_rate": 1e-2}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_without_truncation_training_is_stock(build, tiny_model_path, loss_type):
    settings = TWO_STEPS | {"loss_type": loss_type}
    trainer = assert_equal(build, tiny_model_path, settings, settings)
    assert not trainer.replays_support


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_support_of_the_whole_vocabulary_is_stock(build, tiny_model_path, loss_type):
    stock = TWO_STEPS | {"loss_type": loss_type, "top_k": VOCABULARY}
    trainer = assert_equal(build, tiny_model_path, stock, stock)
    assert trainer.replays_support
    assert trainer.state.log_history[0]["support/size_mean"] == VOCABULARY


@pytest.mark.parametrize("kl_scope", ["support", "full"])
@pytest.mark.parametrize("entropy_scope", ["support", "full"])
@pytest.mark.parametrize(
    "extra",
    [
        {"beta": 0.2},
        {"beta": 0.2, "use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
        {"entropy_coef": 0.1},
        {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 3.0},
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.1},
        {
            "beta": 0.2,
            "use_bias_correction_kl": True,
            "entropy_coef": 0.1,
            "top_entropy_quantile": 0.5,
            "off_policy_mask_threshold": 0.1,
            "loss_type": "grpo",
        },
    ],
    ids=lambda extra: " ".join(extra),
)
def test_every_scope_is_stock_over_the_whole_vocabulary(build, tiny_model_path, kl_scope, entropy_scope, extra):
    stock = TWO_STEPS | extra | {"top_k": VOCABULARY}
    assert_equal(build, tiny_model_path, stock | {"kl_scope": kl_scope, "entropy_scope": entropy_scope}, stock)


@pytest.mark.parametrize("kl_scope", ["support", "full"])
def test_every_scope_is_stock_with_the_reference_under_an_adapter(build, tiny_model_path, kl_scope):
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    stock = TWO_STEPS | {"beta": 0.2, "entropy_coef": 0.1, "top_k": VOCABULARY, "lora": lora}
    assert_equal(build, tiny_model_path, stock | {"kl_scope": kl_scope}, stock)
