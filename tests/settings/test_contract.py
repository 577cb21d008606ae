"""The contract refuses what cannot be replayed exactly, by name, and nothing else."""

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from trl_support_replay.settings.config import SupportReplayGRPOConfig
from trl_support_replay.settings.contract import (
    UnreplayableSettingError,
    check_contract,
    find_refusals,
    normalize_top_k,
    sampling_settings,
)
from trl_support_replay.settings.shifted import as_arguments

VLLM = {"use_vllm": True, "top_k": 20, "top_p": 0.9}
SERVER = VLLM | {"vllm_mode": "server"}
HF = {"use_vllm": False, "top_p": 0.9}


def config(tmp_path, **kwargs):
    return SupportReplayGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], **kwargs)


@pytest.mark.parametrize("off", [None, 0, -1])
def test_every_spelling_of_top_k_off_is_one(tmp_path, off):
    assert normalize_top_k(off) == 0
    assert not sampling_settings(config(tmp_path, top_k=off)).truncates


@pytest.mark.parametrize(
    "truncation",
    [
        {"top_k": 2},
        {"top_p": 0.99},
        {"min_p": 0.01},
        {"generation_kwargs": {"typical_p": 0.9}},
        {"use_vllm": True, "top_p": 0.95},
        {"use_vllm": True, "min_p": 0.05, "vllm_mode": "server"},
        {"use_vllm": True, "top_k": 20, "vllm_engine_kwargs": {"max_logprobs": 5}},
    ],
)
def test_any_truncation_switches_replay_on(tmp_path, truncation):
    assert check_contract(config(tmp_path, **truncation)).truncates


@pytest.mark.parametrize(
    "kwargs",
    [
        {"top_p": 95},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_p": "0.9"},
        {"top_k": -5},
        {"top_k": 2.5},
        {"top_k": "5"},
        {"top_k": True},
        {"min_p": -0.1},
        {"min_p": 2},
        {"temperature": float("inf")},
        {"temperature": None},
    ],
)
def test_what_is_no_value_of_its_setting_does_not_switch_replay_off(tmp_path, kwargs):
    ((name, value),) = kwargs.items()
    with pytest.raises(UnreplayableSettingError, match=f"^{name}=.*not a value of this setting. Choose") as refused:
        config(tmp_path, **kwargs)
    assert refused.value.setting == name and refused.value.value is value


def test_generation_kwargs_of_another_kind_are_refused(tmp_path):
    with pytest.raises(UnreplayableSettingError, match="generation_kwargs="):
        config(tmp_path, generation_kwargs=[1])


SHIFTED = {"repetition_penalty": 1.1}
INF = float("inf")


@pytest.mark.parametrize("routes", [{}, {"routed_experts_replay": True}], ids=["stock", "routes"])
@pytest.mark.parametrize(
    ("kwargs", "setting"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"generation_kwargs": {"temperature": 0.7}}, "generation_kwargs['temperature']"),
        ({"generation_kwargs": SHIFTED}, "generation_kwargs['repetition_penalty']"),
        ({"generation_kwargs": {"nonsense": 1}}, "generation_kwargs['nonsense']"),
        ({"use_vllm": True, "temperature": 0.005}, "temperature"),
        ({"use_vllm": True, "generation_kwargs": {"temperature": 0.005}}, "temperature"),
        ({"use_vllm": True, "generation_kwargs": {"logit_bias": {5: 1.0}}}, "generation_kwargs['logit_bias']"),
        ({"use_vllm": True, "generation_kwargs": {"extra_args": {"a": 1}}}, "generation_kwargs['extra_args']"),
        ({"use_vllm": True, "vllm_engine_kwargs": {"spec_method": "ngram"}}, "vllm_engine_kwargs['spec_method']"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs['num_beams']"),
        ({"generation_kwargs": {"do_sample": False}}, "generation_kwargs['do_sample']"),
        ({"generation_kwargs": {"sequence_bias": {(5,): 1.0}}}, "generation_kwargs['sequence_bias']"),
        ({"generation_kwargs": {"sequence_bias": [[[5], -INF], [[6], -1.0]]}}, "generation_kwargs['sequence_bias']"),
        ({"generation_kwargs": {"encoder_repetition_penalty": 1.2}}, "generation_kwargs['encoder_repetition_penalty']"),
        ({"use_vllm": True, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"use_vllm": True, "generation_kwargs": {"presence_penalty": 0.5}}, "generation_kwargs['presence_penalty']"),
    ],
)
def test_stock_scoring_is_no_excuse(tmp_path, kwargs, setting, routes):
    """With no token cut the trainer scores over the whole vocabulary, and these draw from something else."""
    with pytest.raises(UnreplayableSettingError) as error:
        config(tmp_path, **kwargs, **routes)
    assert error.value.setting == setting and f"{setting}={error.value.value!r}" in str(error.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"generation_kwargs": {"max_new_tokens": 9, "eos_token_id": [3, 4], "renormalize_logits": True}},
        {"use_vllm": True, "generation_kwargs": {"stop": ["."], "ignore_eos": True, "max_tokens": 9, "logprobs": 1}},
        {"use_vllm": True, "vllm_engine_kwargs": {"enforce_eager": True, "seed": 4, "generation_config": "vllm"}},
        {"use_transformers_continuous_batching": True},
        {"vllm_structured_outputs_regex": "a+"},  # read with vLLM only
        {"use_vllm": True, "temperature": 0.01},
        {"temperature": 0.005},  # `generate` samples at any temperature
    ],
)
def test_what_leaves_the_distribution_alone_is_not_refused(tmp_path, kwargs):
    assert not check_contract(config(tmp_path, **kwargs)).truncates


REGEX = {"structured_outputs": {"regex": "a+"}}
REMOVING = [
    (True, {"min_tokens": 4}),
    (True, {"bad_words": ["x"]}),
    (True, REGEX),
    (True, {"structured_outputs": {"json": "{}"}}),
    (True, {"logit_bias": {5: -INF, 7: -INF}}),
    (True, {"thinking_token_budget": 8}),
    (False, {"min_length": 3}),
    (False, {"min_new_tokens": 4, "renormalize_logits": True}),
    (False, {"bad_words_ids": [[3]]}),
    (False, {"suppress_tokens": [3]}),
    (False, {"begin_suppress_tokens": [3]}),
    (False, {"no_repeat_ngram_size": 3}),
    (False, {"encoder_no_repeat_ngram_size": 3}),
    (False, {"sequence_bias": {(5,): -INF}}),
    (False, {"sequence_bias": [[[5], -INF], [[6, 7], -INF]]}),
    (False, {"forced_bos_token_id": 1}),
    (False, {"forced_eos_token_id": 2}),
]


@pytest.mark.parametrize(("use_vllm", "kwargs"), REMOVING)
def test_what_removes_or_fixes_tokens_is_replayed(tmp_path, use_vllm, kwargs):
    """With truncation or alone; alone it has to be bounded where supports are read from so many log-probs."""
    settings = {"use_vllm": use_vllm, "generation_kwargs": kwargs}
    name = next(iter(kwargs))
    assert name in check_contract(config(tmp_path, **settings, top_k=20)).other
    alone = check_contract(config(tmp_path, **settings))
    assert alone.truncates and alone.cutting == {name: kwargs[name]} and str(alone) == f"{name}={kwargs[name]}"
    if use_vllm:
        with pytest.raises(UnreplayableSettingError, match=rf"^generation_kwargs\['{name}'\]=.*Set top_k as well"):
            config(tmp_path, **settings, support_capture="logprobs")


@pytest.mark.parametrize(
    ("kwargs", "bound"),
    [
        ({"allowed_token_ids": [3, 5, 7, 5]}, 3),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, 26),
        ({"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [3, 5]}, 2),
        ({"allowed_token_ids": [3, 5, 7], "top_k": 2}, 2),
    ],
)
def test_a_small_set_of_allowed_tokens_bounds_supports_by_itself(tmp_path, kwargs, bound):
    settings = check_contract(config(tmp_path, use_vllm=True, generation_kwargs=kwargs))
    assert settings.truncates and settings.bound == bound and settings.top_k == kwargs.get("top_k", 0)


def test_trls_regex_is_replayed_and_comes_before_other_constraints(tmp_path):
    args = {"use_vllm": True, "vllm_structured_outputs_regex": "a+"}
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    settings = check_contract(config(tmp_path, **args, top_k=20, generation_kwargs=choice))
    assert settings.other == {"vllm_structured_outputs_regex": "a+"}
    with pytest.raises(UnreplayableSettingError, match="^vllm_structured_outputs_regex='a.'.*Set top_k as well"):
        config(tmp_path, **args, generation_kwargs=choice, support_capture="logprobs")


def test_a_long_constraint_is_shortened_where_it_is_named(tmp_path):
    schema = {"json": {"enum": ["x" * 1000]}}
    settings = check_contract(config(tmp_path, **VLLM, generation_kwargs={"structured_outputs": schema}))
    assert len(str(settings)) < 150 and str(settings).startswith("top_k=20, top_p=0.9, structured_outputs={'json'")


def test_every_refusal_is_found_not_only_the_first(tmp_path):
    args = config(tmp_path, **VLLM)
    args.temperature, args.generation_kwargs = 0.0, {"top_p": 7, "nonsense": 1, "seed": 3, **SHIFTED}
    settings, refused = find_refusals(args)
    names = ["top_p", "temperature", "generation_kwargs['nonsense']"]
    assert [error.setting for error in refused] == names and settings.top_k == 20 and settings.shifts == SHIFTED


@pytest.mark.parametrize(
    ("kwargs", "shifts"),
    [
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1, "generation_kwargs": SHIFTED | {"min_tokens": 2}}, SHIFTED),
        ({"generation_kwargs": {"presence_penalty": 0.1}}, {"presence_penalty": 0.1}),
        ({"generation_kwargs": {"frequency_penalty": -0.1}}, {"frequency_penalty": -0.1}),
        ({"generation_kwargs": {"logit_bias": {5: -INF, 6: 1.0}}}, {"logit_bias": {5: -INF, 6: 1.0}}),
        ({"generation_kwargs": {"logit_bias": {5: -INF}, "presence_penalty": 0.0}}, {}),
    ],
)
def test_shifts_are_replayed_beside_truncation_in_colocated_training(tmp_path, kwargs, shifts):
    args = config(tmp_path, **VLLM, **kwargs)
    assert check_contract(args).shifts == shifts
    plain = SimpleNamespace(**vars(args))  # of a server or a command, which cannot say that it shifts
    if shifts:
        with pytest.raises(UnreplayableSettingError, match="cannot be replayed: it shifts logits"):
            check_contract(plain)


def test_a_bias_of_minus_infinity_shifts_nothing():
    """The support is without its token."""
    assert as_arguments({"logit_bias": {5: -INF, 6: 1.0}}) == {"logit_bias": {6: 1.0}}
    assert as_arguments({"presence_penalty": 0.1}) == {"presence_penalty": 0.1, "logit_bias": {}}


@pytest.mark.parametrize("engine", [VLLM, HF])
@pytest.mark.parametrize("off", [None, -1])
def test_off_is_written_as_every_engine_understands_it(tmp_path, engine, off):
    """`generate` fails at -1, and for `None` it takes the model's own default, which may truncate."""
    args = config(tmp_path, **engine | {"top_k": off, "top_p": 1.0, "min_p": None})
    assert args.top_k == 0 and args.generation_kwargs is None
    args = config(tmp_path, use_vllm=engine["use_vllm"], generation_kwargs={"top_k": off, "top_p": None})
    assert args.generation_kwargs == {"top_k": 0, "top_p": 1.0}


@pytest.mark.parametrize("name", ["generation_kwargs", "vllm_engine_kwargs"])
def test_a_fixed_seed_is_warned_of(tmp_path, caplog, name):
    config(tmp_path, use_vllm=True, **{name: {"seed": 1}})
    assert f"{name}['seed']=1: completions" in caplog.text
    caplog.clear()
    config(tmp_path, use_vllm=True, vllm_mode="server", generation_kwargs={"seed": 1})  # it seeds each sample apart
    assert not caplog.text


@pytest.mark.parametrize(
    ("kwargs", "setting"),
    [
        (VLLM | {"top_k": 1}, "top_k"),
        (VLLM | {"vllm_mode": "server", "vllm_engine_kwargs": {"seed": 1}}, "vllm_engine_kwargs"),
        (VLLM | {"temperature": 0.0}, "temperature"),
        (HF | {"temperature": 0.0}, "temperature"),
        (SERVER | {"repetition_penalty": 1.1}, "repetition_penalty"),
        (VLLM | {"top_k": 0, "support_capture": "logprobs"}, "top_p"),
        (VLLM | {"top_k": None, "top_p": 1.0, "min_p": 0.1, "support_capture": "logprobs"}, "min_p"),
        (VLLM | {"top_p": 1.2}, "top_p"),
        (VLLM | {"generation_kwargs": {"temperature": 0.7}}, "generation_kwargs['temperature']"),
        (VLLM | {"generation_kwargs": {"top_k": 1}}, "top_k"),
        (SERVER | {"generation_kwargs": {"presence_penalty": 0.1}}, "generation_kwargs['presence_penalty']"),
        (SERVER | {"generation_kwargs": {"frequency_penalty": -0.1}}, "generation_kwargs['frequency_penalty']"),
        (SERVER | {"generation_kwargs": {"repetition_penalty": 1.2}}, "generation_kwargs['repetition_penalty']"),
        (SERVER | {"generation_kwargs": {"logit_bias": {5: 1.0}}}, "generation_kwargs['logit_bias']"),
        (VLLM | {"generation_kwargs": {"repetition_penalty": 0.0}}, "generation_kwargs['repetition_penalty']"),
        (VLLM | {"generation_kwargs": {"presence_penalty": "0.1"}}, "generation_kwargs['presence_penalty']"),
        (VLLM | {"generation_kwargs": {"logit_bias": {5: INF}}}, "generation_kwargs['logit_bias']"),
        (VLLM | {"generation_kwargs": {"logit_bias": {"5": 1.0}}}, "generation_kwargs['logit_bias']"),
        (
            SERVER | {"generation_kwargs": {"logit_bias": {5: -INF, 6: 1.0}}},
            "generation_kwargs['logit_bias']",
        ),
        (
            VLLM | {"vllm_mode": "server", "generation_kwargs": {"logit_bias": {5: -INF}}},
            "generation_kwargs['logit_bias']",
        ),
        (VLLM | {"generation_kwargs": {"n": 2}}, "generation_kwargs['n']"),
        (VLLM | {"generation_kwargs": {"logprobs": 5}}, "generation_kwargs['logprobs']"),
        (
            VLLM | {"vllm_engine_kwargs": {"speculative_config": {"method": "ngram"}}},
            "vllm_engine_kwargs['speculative_config']",
        ),
        (VLLM | {"vllm_engine_kwargs": {"logits_processors": ["a.b"]}}, "vllm_engine_kwargs['logits_processors']"),
        (
            VLLM | {"vllm_engine_kwargs": {"spec_method": "ngram", "spec_tokens": 3}},
            "vllm_engine_kwargs['spec_method']",
        ),
        (VLLM | {"vllm_engine_kwargs": {"spec_tokens": 3}}, "vllm_engine_kwargs['spec_tokens']"),
        (VLLM | {"vllm_engine_kwargs": {"watermark_config": {"key": 7}}}, "vllm_engine_kwargs['watermark_config']"),
        (VLLM | {"vllm_engine_kwargs": {"enable_trace_replay": True}}, "vllm_engine_kwargs['enable_trace_replay']"),
        (VLLM | {"vllm_engine_kwargs": {"max_modle_len": 9}}, "vllm_engine_kwargs['max_modle_len']"),
        (VLLM | {"generation_kwargs": {"trace_decode_token_ids": [1]}}, "generation_kwargs['trace_decode_token_ids']"),
        (
            VLLM | {"generation_kwargs": {"routed_experts_prompt_start": 4}},
            "generation_kwargs['routed_experts_prompt_start']",
        ),
        (VLLM | {"temperature": 0.009}, "temperature"),
        (HF | {"generation_kwargs": {"use_mtp": True}}, "generation_kwargs['use_mtp']"),
        (HF | {"generation_kwargs": {"speculation_type": "x"}}, "generation_kwargs['speculation_type']"),
        (HF | {"generation_kwargs": {"assistant_early_exit": 4}}, "generation_kwargs['assistant_early_exit']"),
        (
            HF | {"generation_kwargs": {"assistant_ensemble_weight": 0.5}},
            "generation_kwargs['assistant_ensemble_weight']",
        ),
        (HF | {"generation_kwargs": {"token_healing": True}}, "generation_kwargs['token_healing']"),
        (HF | {"generation_kwargs": {"stop_strings": ["."]}}, "generation_kwargs['stop_strings']"),
        (HF | {"generation_kwargs": {"stop": ["."]}}, "generation_kwargs['stop']"),
        (VLLM | {"vllm_engine_kwargs": {"logprobs_mode": "raw_logprobs"}}, "vllm_engine_kwargs['logprobs_mode']"),
        (
            VLLM | {"vllm_engine_kwargs": {"max_logprobs": 5}, "support_capture": "logprobs"},
            "vllm_engine_kwargs['max_logprobs']",
        ),
        (VLLM | {"vllm_engine_kwargs": {"max_logprobs": "many"}}, "vllm_engine_kwargs['max_logprobs']"),
        (VLLM | {"generation_kwargs": {1: 2}}, "generation_kwargs[1]"),
        (
            HF | {"use_transformers_continuous_batching": True, "routed_experts_replay": True},
            "use_transformers_continuous_batching",
        ),
        (
            HF | {"use_transformers_continuous_batching": True, "generation_kwargs": {"no_repeat_ngram_size": 2}},
            "generation_kwargs['no_repeat_ngram_size']",
        ),
        (HF | {"use_transformers_continuous_batching": True, "repetition_penalty": 1.3}, "repetition_penalty"),
        (HF | {"generation_kwargs": {"num_beams": 2}}, "generation_kwargs['num_beams']"),
        (HF | {"generation_kwargs": {"do_sample": False}}, "generation_kwargs['do_sample']"),
        (HF | {"generation_kwargs": {"guidance_scale": 1.5}}, "generation_kwargs['guidance_scale']"),
    ],
)
def test_refusals_name_setting_and_value(tmp_path, kwargs, setting):
    with pytest.raises(UnreplayableSettingError) as error:
        config(tmp_path, **kwargs)
    assert error.value.setting == setting
    assert f"{setting}={error.value.value!r}" in str(error.value)


def test_model_defaults_are_checked_where_generate_would_use_them(tmp_path):
    inherited = GenerationConfig(encoder_repetition_penalty=1.5)
    with pytest.raises(UnreplayableSettingError, match="generation_config.encoder_repetition_penalty=1.5"):
        check_contract(config(tmp_path, **HF), inherited)
    with pytest.raises(UnreplayableSettingError, match="generation_config.encoder_repetition_penalty=1.5"):
        check_contract(config(tmp_path, use_vllm=False), inherited)
    # A value of None leaves the model's own in place.
    off = {"generation_kwargs": {"encoder_repetition_penalty": None}}
    with pytest.raises(UnreplayableSettingError, match="generation_config.encoder_repetition_penalty=1.5"):
        check_contract(config(tmp_path, **HF, **off), inherited)
    off = {"generation_kwargs": {"encoder_repetition_penalty": 1.0}}
    assert check_contract(config(tmp_path, **HF, **off), inherited).truncates
    # What `generate` does not read is nobody's business.
    assert check_contract(config(tmp_path, **HF), GenerationConfig(chat_format="chatml")).truncates
    # vLLM is given every sampling parameter, so the model's defaults do not reach it.
    assert check_contract(config(tmp_path, **VLLM), inherited).top_k == 20
    # TRL passes the repetition penalty itself.
    assert check_contract(config(tmp_path, **HF), GenerationConfig(repetition_penalty=1.1)).truncates


def test_model_defaults_can_switch_truncation_on_without_vllm(tmp_path):
    settings = check_contract(config(tmp_path, use_vllm=False), GenerationConfig(min_p=0.2))
    assert settings.min_p == 0.2 and settings.truncates
    inherited = GenerationConfig(suppress_tokens=[3, 4], no_repeat_ngram_size=3)
    stock = {"use_vllm": False, "generation_kwargs": {"no_repeat_ngram_size": 0}}
    assert check_contract(config(tmp_path, **stock), inherited).cutting == {"suppress_tokens": [3, 4]}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"support_capture": "mask"},
        {"synthetic_eos": "drop"},
        {"replay_check": "no"},
        {"kl_scope": "both"},
        {"entropy_scope": "x"},
    ],
)
def test_unknown_choices_list_the_known_ones(tmp_path, kwargs):
    ((name, value),) = kwargs.items()
    with pytest.raises(ValueError, match=f"{name}='{value}' is not one of"):
        config(tmp_path, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"replay_tolerance": "0.1"}, "^replay_tolerance='0.1' is not a number"),
        ({"routes_gap_steps": True}, "^routes_gap_steps=True is not a number"),
        ({"routes_gap_steps": -1}, "^routes_gap_steps=-1 is a number of optimizer steps; 0 is never"),
        ({"support_mass_floor": "half"}, "^support_mass_floor='half' is not a number"),
        ({"vllm_engine_kwargs": "{eager"}, "^vllm_engine_kwargs='{eager' is not JSON: "),
        ({"vllm_engine_kwargs": "[1]"}, "^vllm_engine_kwargs='.1.' is not a JSON object"),
    ],
)
def test_values_of_another_kind_are_named(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **kwargs)


@pytest.mark.parametrize("replay", [{"top_k": 20}, {}], ids=["replay", "stock"])
@pytest.mark.parametrize("urls", [["http://a:8000"], ["http://me:secret@a:8000", "http://b:8000"]])
def test_servers_that_nccl_would_not_reach_are_refused(tmp_path, urls, replay):
    with pytest.raises(ValueError, match="^vllm_server_urls='http://a:8000.*Set vllm_server_base_url instead"):
        config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_urls=urls, **replay)
    shared = {"weight_sync": "filesystem", "weight_sync_dir": "unread"}
    assert config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_urls=urls, **shared, **replay)


@pytest.mark.parametrize("replay", [{"top_k": 20}, {"routed_experts_replay": True}])
def test_the_data_type_of_the_engine_has_a_setting_of_its_own(tmp_path, replay):
    with pytest.raises(ValueError, match=r"^vllm_engine_kwargs\['dtype'\]='bfloat16' .* Set vllm_dtype='bfloat16'"):
        config(tmp_path, use_vllm=True, vllm_engine_kwargs={"dtype": "bfloat16"}, **replay)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_engine_is_shared_by_processes_with_trls_own_setting_only(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}'\\]=2: TRL would not know.* vllm_tensor_parallel_size"):
        config(tmp_path, **VLLM, vllm_engine_kwargs={name: 2})
    assert config(tmp_path, **VLLM, vllm_engine_kwargs={name: 1})


def test_a_server_has_to_be_told_how_long_completions_may_be(tmp_path):
    server = {"use_vllm": True, "vllm_mode": "server", "max_completion_length": None}
    shared = {"weight_sync": "filesystem", "weight_sync_dir": "unread"}
    for ours in ({"top_k": 20}, {"routed_experts_replay": True}, shared):
        with pytest.raises(ValueError, match="^max_completion_length=None with vllm_mode='server'.*Set max_comp"):
            config(tmp_path, **server, **ours)
    assert config(tmp_path, **server).max_completion_length is None  # TRL's own client


def test_engine_arguments_may_be_json(tmp_path):
    kwargs = {"enforce_eager": True}
    assert config(tmp_path, vllm_engine_kwargs='{"enforce_eager": true}').vllm_engine_kwargs == kwargs


def test_a_tolerance_of_zero_points_to_the_switch(tmp_path):
    with pytest.raises(ValueError, match="replay_check='off'"):
        config(tmp_path, replay_tolerance=0.0)


def test_every_field_has_help():
    from dataclasses import fields

    from trl import GRPOConfig

    own = {f.name for f in fields(SupportReplayGRPOConfig)} - {f.name for f in fields(GRPOConfig)}
    assert len(own) >= 8
    for f in fields(SupportReplayGRPOConfig):
        if f.name in own:
            assert len(f.metadata["help"]) > 40, f.name


def test_server_settings_stand_alone():
    """The contract needs only the fields it names, so a server can ask it too."""
    args = SimpleNamespace(
        temperature=1.0, top_p=0.9, top_k=0, min_p=None, repetition_penalty=1.0, generation_kwargs=None, use_vllm=True
    )
    assert check_contract(args).truncates
    args.support_capture = "logprobs"
    with pytest.raises(UnreplayableSettingError, match="top_p=0.9 .* Set top_k as well"):
        check_contract(args)
