"""The tables of settings know every field of the packages that are installed, so that a new one is noticed here."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from transformers import GenerationConfig, TrainingArguments
from trl import GRPOConfig, RLOOConfig

from trl_support_replay.settings.sampling_table import generate, sglang, trl, unknown, vllm
from trl_support_replay.settings.sampling_table.effects import biases


def names(cls):
    return {field.name for field in dataclasses.fields(cls)}


def test_every_field_of_generate_has_a_class():
    assert set(vars(GenerationConfig())) <= set(generate.CONFIG)


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_every_field_that_trl_adds_has_a_class(config):
    assert names(config) - names(TrainingArguments) <= {*trl.ALWAYS, *trl.WITH_VLLM, *trl.WITHOUT_VLLM}


def test_every_sampling_parameter_of_vllm_has_a_class():
    pytest.importorskip("vllm", reason="compares with the fields of the installed vLLM")
    from vllm import SamplingParams

    assert set(SamplingParams.__struct_fields__) <= set(vllm.REQUEST)


def test_every_engine_argument_of_vllm_has_a_class():
    pytest.importorskip("vllm", reason="compares with the fields of the installed vLLM")
    from vllm import LLM
    from vllm.engine.arg_utils import AsyncEngineArgs

    own = set(inspect.signature(LLM).parameters) - {"kwargs"}
    assert names(AsyncEngineArgs) | own <= set(vllm.ENGINE)


def test_every_field_of_a_built_vllm_has_a_class():
    pytest.importorskip("vllm", reason="compares with the fields of the installed vLLM")
    from vllm.config import ModelConfig, VllmConfig

    assert names(VllmConfig) | names(ModelConfig) <= set(vllm.BUILT)


TABLES = [vllm.REQUEST, vllm.ENGINE, vllm.BUILT, generate.CONFIG, sglang.REQUEST, trl.ALWAYS]


@pytest.mark.parametrize("table", TABLES)
def test_a_refusal_has_a_reason_and_a_way_out(table):
    for name, field in table.items():
        if not field.replayed:
            refused = field.refused("some value")
            assert refused is not None and len(refused.reason) > 10 and refused.remedy, name


@pytest.mark.parametrize("table", TABLES)
def test_the_defaults_of_a_library_are_never_refused(table):
    for name, field in table.items():
        for value in field.off:
            assert field.refused(value) is None and not field.narrows(value), name


INF = float("inf")


@pytest.mark.parametrize(
    ("bias", "removes"),
    [
        ({5: -INF}, True),
        ({5: -INF, 6: -100.0}, False),
        ([[[5], -INF]], True),
        ([[[5, 6], -INF], [[7], 0.5]], False),
        ("text", False),
        (3.0, False),
    ],
)
def test_a_bias_that_is_only_ever_minus_infinity_removes_tokens(bias, removes):
    assert biases().narrows(bias) == removes and (biases().refused(bias) is None) == removes


def test_unknown_names_are_compared_with_the_known_ones():
    assert unknown("repetition_penalti", vllm.REQUEST).remedy.startswith("Did you mean repetition_penalty?")
    assert unknown("zzz", vllm.REQUEST).remedy == "Leave it out"
