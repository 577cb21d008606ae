"""Models that saved traces are scored with: an adapter on the Hub, at a revision of its own."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from trl_support_replay.analysis.models import load_model
from trl_support_replay.traces.record import fingerprint


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """What is on this machine of the Hub: `add(repo, revision, folder)` puts a commit there, named by its revision."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def add(repo, revision, folder):
        place = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        commit = f"{revision:0<40}".replace("v", "a").replace("m", "b")
        shutil.copytree(folder, place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / revision).write_text(commit)
        return commit

    return add


@pytest.mark.needs("peft")
def test_a_revision_is_that_of_an_adapter_and_not_of_its_base(tiny_model_path, hub_cache, tmp_path):  # noqa: F811
    from peft import LoraConfig, get_peft_model

    hub_cache("me/base", "main", tiny_model_path)
    ids = torch.arange(3, 9)[None]
    expected = {}
    for seed, revision in enumerate(("v1", "main")):
        torch.manual_seed(seed)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained("me/base").eval(),
            LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
        )
        expected[revision] = model(ids).logits
        model.save_pretrained(tmp_path / revision)
        commit = hub_cache("me/adapter", revision, tmp_path / revision)
    assert (expected["v1"] - expected["main"]).abs().max() > 1e-3
    for revision in (None, "v1"):
        model, config = load_model("--model", "me/adapter", dtype="float32", revision=revision)
        torch.testing.assert_close(model(ids).logits, expected[revision or "main"])
        assert config.vocab_size == 99
    assert fingerprint("me/adapter") == commit and fingerprint("me/adapter", "v1") != commit
    assert fingerprint("me/unknown") is None
