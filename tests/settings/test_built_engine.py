"""A vLLM configuration, once it is built, tells what breaks replay, whichever spelling made it so."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from trl_support_replay.engine_outputs.vllm_capture import CAPTURE_SCHEDULER, WORKER_EXTENSION
from trl_support_replay.settings.built_engine import engine_refusals
from trl_support_replay.settings.contract import UnreplayableSettingError

pytest.importorskip("vllm", reason="builds configurations of vLLM")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(path)
    return str(path)


@pytest.fixture
def built(model):
    from vllm.engine.arg_utils import EngineArgs

    def built(**kwargs):
        settings = {"logprobs_mode": "processed_logprobs", "dtype": "float32", "skip_tokenizer_init": True} | kwargs
        return EngineArgs(model=model, **settings).create_engine_config()

    return built


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("kwargs", "setting"),
    [
        ({"speculative_config": NGRAM}, "speculative_config"),
        ({"spec_method": "ngram", "spec_tokens": 2}, "speculative_config"),
        ({"logits_processors": ["some.module:Processor"]}, "logits_processors"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode"),
        ({"scheduler_cls": "some.module.Scheduler"}, "scheduler_cls"),
        ({"worker_cls": "some.module.Worker"}, "worker_cls"),
    ],
)
def test_each_spelling_is_found(built, kwargs, setting):
    (error,) = engine_refusals(built(**kwargs))
    assert error.setting == f"the engine's {setting}" and len(str(error)) < 600
    assert f"--{setting.replace('_', '-')}" in error.remedy


def test_an_ordinary_engine_is_not_refused(built):
    assert not engine_refusals(built(seed=3, max_num_seqs=4, max_logprobs=40, enable_prefix_caching=False))
    ours = {"scheduler_cls": CAPTURE_SCHEDULER, "worker_extension_cls": WORKER_EXTENSION}
    assert not engine_refusals(built(**ours))


def test_a_setting_of_a_newer_release_is_refused_by_name(built):
    config = built()
    known = [(f.name, object, dataclasses.field(default=None)) for f in dataclasses.fields(config)]
    new = [
        ("new_config", object, dataclasses.field(default=None)),
        ("another", object, dataclasses.field(default=None)),
    ]
    newer = dataclasses.make_dataclass("Newer", [*known, *new])(
        new_config={"on": True}, model_config=config.model_config
    )
    (error,) = engine_refusals(newer)
    assert error.setting == "the engine's new_config" and "it is unknown here" in str(error)


def test_logits_processors_of_installed_packages_are_refused(built, tmp_path, monkeypatch):
    """vLLM loads them into each engine, without any setting."""
    folder = tmp_path / "shouting-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[vllm.logits_processors]\nloud = shouting:Processor\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (error,) = engine_refusals(built())
    assert "the entry point loud of shouting" in error.setting and error.value == "shouting:Processor"

    from trl_support_replay import SupportReplayGRPOConfig
    from trl_support_replay.server.command import ServeOptionError, serve_command

    kwargs = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "top_k": 8}
    with pytest.raises(UnreplayableSettingError, match="entry point loud of shouting.* Uninstall shouting"):
        SupportReplayGRPOConfig(use_vllm=True, **kwargs)
    assert SupportReplayGRPOConfig(use_vllm=True, vllm_mode="server", **kwargs)  # the server has packages of its own
    assert SupportReplayGRPOConfig(**kwargs)
    with pytest.raises(ServeOptionError, match="entry point loud of shouting"):
        serve_command(["model"], on_cpu=False)
