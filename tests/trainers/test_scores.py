"""Which score each quantity of the loss uses, against what is written out in docs/scores.md."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import trl_support_replay.scoring.head_projection as head_projection
from tests.tiny_models import llama, save, tokenizer_of
from trl_support_replay.checks.support_growth import SupportGrowth
from trl_support_replay.scoring import SupportCSR, score_support_from_logits

WORDS = ["<pad>", "<eos>", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"]


@pytest.fixture(scope="session")
def thirteen_words(tmp_path_factory):
    """A Llama with a vocabulary of 13."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"eos_token_id": 1, "bos_token_id": None}
    model = llama(25, seed=3, vocab_size=13, num_hidden_layers=1, max_position_embeddings=64, **sizes, **special)
    tokenizer = tokenizer_of(WORDS, pad_token="<pad>", eos_token="<eos>")
    return save(model, tmp_path_factory.mktemp("models") / "thirteen", tokenizer)


def letters(completions, **_):
    return [float(len(set(completion))) for completion in completions]


def thirteen(build, path, **settings):
    from datasets import Dataset

    data = Dataset.from_dict({"prompt": ["abc", "bca", "cab", "ddd"]})
    return build(path, train_dataset=data, reward_funcs=letters, max_steps=1, **settings)


def written_out(trainer, inputs, reference_path, kl_scope, entropy_scope):
    """Mean k3 and mean entropy of one batch, token by token from both models' logits in float64."""
    reference = LlamaForCausalLM.from_pretrained(reference_path)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    start = inputs["prompt_ids"].shape[1] - 1
    with torch.no_grad(), trainer.scoring({}):
        policy, reference = (
            model(input_ids=ids, attention_mask=mask).logits[:, start:-1].double()
            for model in (trainer.model, reference)
        )
    k3, entropies = [], []
    for b, sample in enumerate(inputs["support_samples"]):
        for t, row in enumerate(sample.supports.to_lists()):
            sampled = int(sample.completion_ids[t])
            candidates = {"support": row, "full": list(range(13))}
            place = candidates[kl_scope].index(sampled)
            p, r = (torch.log_softmax(z[b, t, candidates[kl_scope]], 0)[place] for z in (policy, reference))
            k3.append(float((r - p).exp() - (r - p) - 1))
            log_p = torch.log_softmax(policy[b, t, candidates[entropy_scope]], 0)
            entropies.append(float(-(log_p.exp() * log_p).sum()))
    return np.mean(k3), np.mean(entropies)


@pytest.mark.parametrize("kl_scope", ["support", "full"])
@pytest.mark.parametrize("entropy_scope", ["support", "full"])
def test_kl_and_entropy_are_of_the_distributions_that_their_scopes_name(
    build, thirteen_words, kl_scope, entropy_scope, monkeypatch
):
    trainer = thirteen(build, thirteen_words, top_p=0.7, beta=0.3, kl_scope=kl_scope, entropy_scope=entropy_scope)
    with torch.no_grad():  # the policy is not the reference
        trainer.model.lm_head.weight.mul_(0.8)
    compute, expected = trainer._compute_loss, []

    def spy(model, inputs):
        expected.append(written_out(trainer, inputs, thirteen_words, kl_scope, entropy_scope))
        return compute(model, inputs)

    monkeypatch.setattr(trainer, "_compute_loss", spy)
    trainer.train()
    ((k3, entropy),) = expected
    log = trainer.state.log_history[0]
    assert log["kl"] == pytest.approx(k3, rel=1e-4) and k3 > 1e-3
    assert log["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert log["support/size_mean"] < 12


class Distributions:
    """Policy and reference over 13 words, and a support that holds part of either."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.policy, self.reference = torch.randn(2, 13, generator=generator, dtype=torch.float64) * 1.5
        self.row = self.policy.argsort(descending=True)[:5].sort().values
        self.p, self.r = self.policy.softmax(0), self.reference.softmax(0)
        self.p_s, self.r_s = (x[self.row] / x[self.row].sum() for x in (self.p, self.r))
        self.kl_s = float((self.p_s * (self.p_s / self.r_s).log()).sum())
        self.mass_ratio = float(self.r[self.row].sum() / self.p[self.row].sum())

    def estimates(self, num, output, seed=0):
        """`k3` and the first-order estimate of `num` samples of the truncated policy, from the package's scores."""
        generator = torch.Generator().manual_seed(seed)
        sampled = self.row[torch.multinomial(self.p_s, num, replacement=True, generator=generator)]
        support = SupportCSR.from_lists([self.row.tolist()] * num)
        p, r = (
            getattr(score_support_from_logits(z.expand(num, 13), sampled, support, outputs=(output,)), output)
            for z in (self.policy, self.reference)
        )
        return (r - p).exp() - (r - p) - 1, p - r


@pytest.mark.parametrize("seed", range(4))
def test_k3_over_supports_estimates_the_kl_of_the_renormalised_policies(seed):
    d = Distributions(seed)
    values, first_order = d.estimates(40_000, "logprobs")
    error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - d.kl_s) < 4 * error and d.kl_s > 10 * error
    assert abs(first_order.mean() - d.kl_s) < 4 * first_order.std() / len(values) ** 0.5


@pytest.mark.parametrize("seed", range(4))
def test_k3_over_the_vocabulary_adds_the_ratio_of_the_masses(seed):
    """Under truncated sampling it estimates KL(p_S || r_S) + rho - 1 - log rho, rho = r(S) / p(S): not the full KL."""
    d = Distributions(seed)
    values, first_order = d.estimates(40_000, "full_logprobs")
    rho = d.mass_ratio
    expected = d.kl_s + rho - 1 - np.log(rho)
    error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - expected) < 4 * error
    assert abs(first_order.mean() - d.kl_s + np.log(rho)) < 4 * first_order.std() / len(values) ** 0.5
    assert abs(values.mean() - (d.p * (d.p / d.r).log()).sum()) > 4 * error


@pytest.fixture
def projected(monkeypatch):
    """How many tokens were projected on the whole vocabulary, call by call."""
    counts = []
    project = head_projection.project_vocabulary

    def counted(inputs, *args):
        counts.append(inputs.hidden.shape[0])
        return project(inputs, *args)

    monkeypatch.setattr(head_projection, "project_vocabulary", counted)
    return counts


@pytest.mark.parametrize(
    "settings",
    [{}, {"beta": 0.1}, {"entropy_coef": 0.1, "entropy_scope": "support"}, {"off_policy_mask_threshold": 0.5}],
    ids=str,
)
def test_asking_for_nothing_full_costs_nothing_full(build, thirteen_words, projected, settings):
    trainer = thirteen(build, thirteen_words, top_p=0.7, num_iterations=2, **settings)
    projected.clear()  # the probe of the model, once at construction
    trainer.train()
    assert projected and set(projected) == {0}


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.1, "kl_scope": "full"}, {"entropy_coef": 0.1}, {"entropy_scope": "full"}, {"support_growth": True}],
    ids=str,
)
def test_what_is_full_is_paid_for(build, thirteen_words, projected, settings):
    """So that the test above can fail."""
    trainer = thirteen(build, thirteen_words, top_p=0.7, **settings)
    projected.clear()  # the probe of the model, once at construction
    trainer.train()
    assert max(projected) > 0


# ------------------------------------------------------------------------------------------------- support growth


def test_growth_is_measured_from_the_first_look_at_the_batch(build, thirteen_words, monkeypatch):
    settings = {"top_p": 0.7, "support_growth": True, "num_iterations": 3, "learning_rate": 0.5, "optim": "sgd"}
    trainer = thirteen(build, thirteen_words, **settings)
    trainer.args.max_steps = 3
    compute, masses = trainer._compute_loss, []

    def spy(model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        start = inputs["prompt_ids"].shape[1] - 1
        with torch.no_grad(), trainer.scoring({}):
            p = trainer.model(input_ids=ids, attention_mask=mask).logits[:, start:-1].softmax(-1)
        masses.append(
            {
                (bytes(sample.completion_ids), t): float(p[b, t, row].sum())
                for b, sample in enumerate(inputs["support_samples"])
                for t, row in enumerate(sample.supports.to_lists())
            }
        )
        return compute(model, inputs)

    monkeypatch.setattr(trainer, "_compute_loss", spy)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "support/outside_mass" in log]
    assert len(logs) == len(masses) == 3
    for log, now in zip(logs, masses, strict=True):
        grown = [masses[0][token] - mass for token, mass in now.items()]
        assert log["support/outside_mass"] == pytest.approx(np.mean([1 - mass for mass in now.values()]), abs=1e-5)
        assert log["support/outside_mass_growth"] == pytest.approx(np.mean(grown), abs=1e-5)
        assert log["support/outside_mass_growth_max"] == pytest.approx(max(0.0, *grown), abs=1e-5)
    assert logs[0]["support/outside_mass_growth"] == 0
    assert abs(logs[2]["support/outside_mass_growth"]) > 1e-3


def test_no_growth_is_measured_unasked(build, thirteen_words):
    trainer = thirteen(build, thirteen_words, top_p=0.7)
    trainer.train()
    assert not any("support/outside_mass" in log for log in trainer.state.log_history)


def test_a_low_mass_is_warned_of_once_a_batch(caplog):
    from trl_support_replay.traces.support import SupportRows

    def gather(row):
        return np.array([row])

    sample = SimpleNamespace(loss_mask=np.ones(2, bool), supports=SupportRows.from_ragged([[1, 2], [3]]))
    growth = SupportGrowth(floor=0.6)
    with caplog.at_level(logging.WARNING):
        growth.start()
        growth.measure([sample], torch.tensor([[0.9, 0.7]]).log(), 4, gather)
        assert not caplog.records
        for _ in range(2):
            metrics = growth.measure([sample], torch.tensor([[0.3, 0.5]]).log(), 5, gather)
        assert len(caplog.records) == 1
        growth.start()
        growth.measure([sample], torch.tensor([[0.3, 0.5]]).log(), 6, gather)
    assert len(caplog.records) == 2
    assert "hold 0.400 of the policy's mass" in caplog.text and "support_mass_floor=0.6" in caplog.text
    assert "0.400 left them" in caplog.text.split("\n")[0]
    assert metrics["support/outside_mass_growth_max"].value == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize("floor", [-0.1, 1.5])
def test_a_floor_that_is_no_mass_is_refused(tmp_path, floor):
    from trl_support_replay import SupportReplayGRPOConfig

    with pytest.raises(ValueError, match="between 0 and 1"):
        SupportReplayGRPOConfig(str(tmp_path), support_mass_floor=floor, bf16=False, use_cpu=True)
