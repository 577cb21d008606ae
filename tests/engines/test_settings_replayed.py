"""Each setting that is replayed, on a real engine: scores over the recorded supports are what the engine drew from.

The largest gap of each setting goes into the results as a property, from which docs/compatibility.md is written.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import trl_support_replay.engine_outputs.vllm_outputs as vllm_outputs
from tests.tiny_models import llama, save
from trl_support_replay import score_support_from_logits
from trl_support_replay.engine_outputs.vllm_outputs import num_candidates, read_flat_logprobs
from trl_support_replay.engines.continuous_batching import BatchRecorder, recording_batches
from trl_support_replay.engines.transformers_generate import ScoresRecorder, recording
from trl_support_replay.libraries.rebind import rebound
from trl_support_replay.scoring import SupportCSR
from trl_support_replay.settings.contract import check_contract
from trl_support_replay.settings.sampling_table.generate import IN_CONTINUOUS_BATCHING

INF, TEMPERATURE, TOKENS = float("inf"), 0.7, 24
MOST, LEAST = 3e-5, 1e-2  # nats: a gap that is rounding, and one that is not


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    # vLLM's attention on a CPU needs heads of 32.
    return save(
        llama(sharpness=20, hidden_size=128, intermediate_size=256), tmp_path_factory.mktemp("models") / "tiny-chars"
    )


@pytest.fixture(scope="module")
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def settings_of(use_vllm, kwargs):
    """What the contract makes of them; they are replayed, or this is an error."""
    own = {name: kwargs.get(name) for name in ("top_p", "top_k", "min_p")}
    args = SimpleNamespace(
        **own, temperature=TEMPERATURE, repetition_penalty=1.0, use_vllm=use_vllm,
        generation_kwargs={name: value for name, value in kwargs.items() if name not in own},
    )  # fmt: skip
    settings = check_contract(args)
    assert settings.truncates
    return settings


@torch.no_grad()
def gaps(model, prompt, ids, logprobs, rows):
    """`[T]` of scores over the recorded supports, and over the whole vocabulary, to the recorded log-probs."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    support, sampled = SupportCSR.from_lists(rows.to_lists()), torch.tensor(ids)
    names = ("logprobs", "full_logprobs")
    scores = score_support_from_logits(logits, sampled, support, temperature=TEMPERATURE, outputs=names)
    return [np.abs(getattr(scores, name).numpy() - logprobs) for name in names]


def assert_replayed(found, record_property, name):
    """`found`: `(replayed, over the vocabulary)` of each completion."""
    largest = max(float(gap.max()) for gap, _ in found)
    record_property(name, f"{largest:.1e}")
    assert largest <= MOST and max(float(full.max()) for _, full in found) >= LEAST


# ------------------------------------------------------------------------------------------------------- transformers

GENERATE = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.8},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "top_h": {"top_h": 0.5},
    "bad_words_ids": {"bad_words_ids": [[40], [50, 51], [60]]},
    "suppress_tokens": {"suppress_tokens": [2, *range(30, 60)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 80))},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "min_length": {"min_length": 20, "eos_token_id": list(range(2, 60))},
    "min_new_tokens": {"min_new_tokens": 16, "eos_token_id": list(range(2, 60))},
    "sequence_bias of -inf": {"sequence_bias": [[[i], -INF] for i in range(30, 60)]},
    "forced_bos_token_id": {"forced_bos_token_id": 45},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "suppress_tokens with top_k": {"suppress_tokens": list(range(30, 60)), "top_k": 20},
}


@pytest.mark.parametrize("name", GENERATE)
def test_generate_is_replayed(model, record_property, name):
    kwargs = GENERATE[name]
    settings_of(False, kwargs)
    torch.manual_seed(1)
    width = 1 if name == "forced_bos_token_id" else 6  # it is for a prompt of one token
    prompts = torch.randint(3, 99, (6, width))
    prompts[0, : width - 1] = 0  # padding on the left
    mask = torch.ones_like(prompts)
    mask[0, : width - 1] = 0
    config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, max_new_tokens=TOKENS, **{"top_k": 0, "eos_token_id": 2} | kwargs
    )
    recorder = ScoresRecorder()
    with recording(model, recorder):
        output = model.generate(prompts, attention_mask=mask, generation_config=config)
    completions = recorder.trim(output[:, width:].tolist())
    found = [
        gaps(model, prompt[m.bool()].tolist(), ids, logprobs, rows)
        for prompt, m, ids, (logprobs, rows) in zip(
            prompts, mask, completions, recorder.collect(completions), strict=True
        )
    ]
    assert_replayed(found, record_property, f"gap, transformers `generate`, {name}")


BATCHED = {name: GENERATE[name] for name in IN_CONTINUOUS_BATCHING}


@pytest.mark.parametrize("name", BATCHED)
def test_continuous_batching_is_replayed(model, record_property, name):
    from transformers.generation import ContinuousBatchingConfig

    torch.manual_seed(1)
    prompts = [torch.randint(3, 99, (3 + 5 * i,)).tolist() for i in range(8)]
    config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, max_new_tokens=TOKENS,
        **{"top_k": 0, "eos_token_id": 2, "pad_token_id": 0} | GENERATE[name],
    )  # fmt: skip
    # Few requests and tokens a batch, so that prompts are cut into parts and requests wait for others.
    batching = ContinuousBatchingConfig(max_requests_per_batch=3, max_batch_tokens=16, num_blocks=32)
    recorder = BatchRecorder()
    with recording_batches(model, recorder, batching):
        outputs = model.generate_batch(prompts, config, batching)
    completions = [output.generated_tokens for output in outputs.values()]
    found = [
        gaps(model, prompt, ids, logprobs, rows)
        for prompt, ids, (logprobs, rows) in zip(prompts, completions, recorder.collect(completions), strict=True)
    ]
    assert_replayed(found, record_property, f"gap, transformers continuous batching, {name}")


# --------------------------------------------------------------------------------------------------------------- vLLM

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["red", "green"]}, "b": {"type": "integer"}}}
GRAMMAR = 'root ::= ("ab" | "cd") root | "z"'
VLLM = {
    "top_k": {"top_k": 5},
    "top_k with top_p and min_p": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "structured_outputs, a regex": {"structured_outputs": {"regex": "[a-z ]{4,20}(x|y)"}, "top_k": 20},
    "structured_outputs, a JSON schema": {"structured_outputs": {"json": SCHEMA}, "top_k": 20},
    "structured_outputs, a grammar": {"structured_outputs": {"grammar": GRAMMAR}, "top_k": 9},
    "structured_outputs, a choice alone": {"structured_outputs": {"choice": ["red", "green", "grey", "rot"]}},
    "allowed_token_ids alone": {"allowed_token_ids": [2, *range(40, 52)]},
    "allowed_token_ids with top_k": {"allowed_token_ids": [2, *range(40, 52)], "top_k": 5},
    "bad_words": {"bad_words": [*map(chr, range(50, 90)), "th"], "top_k": 20},
    "min_tokens": {"min_tokens": 16, "stop_token_ids": list(range(40, 60)), "top_k": 20},
    "logit_bias of -inf": {"logit_bias": {i: -INF for i in range(30, 60)}, "top_k": 20},
    "thinking_token_budget": {"thinking_token_budget": 6, "top_k": 20},
}  # fmt: skip
PROMPTS = 5


@pytest.fixture(scope="module")
def vllm_outputs_of(model_path):
    """The outputs of one batch, in which the settings stand side by side, and how each is read."""
    pytest.importorskip("vllm", reason="samples with vLLM")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # other tests may have an engine in this process
        llm = LLM(
            model=model_path, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=16, max_logprobs=99,
            logprobs_mode="processed_logprobs", enable_prefix_caching=False,
            reasoning_config={"reasoning_start_str": "(", "reasoning_end_str": ")"},
        )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    requests, params, bounds = [], [], {}
    for name, kwargs in VLLM.items():
        bounds[name] = settings_of(True, kwargs).bound
        own = dict(kwargs)
        if "structured_outputs" in own:
            own["structured_outputs"] = StructuredOutputsParams(**own["structured_outputs"])
        for i in range(PROMPTS):
            requests.append({"prompt_token_ids": tokenizer(f"{i}: What is it? (")["input_ids"]})
            own["top_k"] = bounds[name]
            params.append(
                SamplingParams(
                    temperature=TEMPERATURE,
                    max_tokens=TOKENS,
                    logprobs=num_candidates(bounds[name], "float32", 99),
                    flat_logprobs=True,
                    **own,
                )  # fmt: skip
            )
    outputs = llm.generate(requests, params, use_tqdm=False)
    names = [name for name in VLLM for _ in range(PROMPTS)]
    return {name: (bounds[name], [o for o, n in zip(outputs, names, strict=True) if n == name]) for name in VLLM}


def read(model, outputs_of, name):
    bound, outputs = outputs_of[name]
    found, sizes = [], []
    for output in outputs:
        completion = output.outputs[0]
        logprobs, rows, repaired = read_flat_logprobs(completion, bound, name)
        assert repaired == 0
        found.append(gaps(model, output.prompt_token_ids, list(completion.token_ids), logprobs, rows))
        sizes += rows.sizes.tolist()
    return found, sizes


@pytest.mark.needs("vllm")
@pytest.mark.parametrize("name", VLLM)
def test_vllm_is_replayed(model, vllm_outputs_of, record_property, name):
    found, sizes = read(model, vllm_outputs_of, name)
    assert max(sizes) > 1 and (
        name not in ("thinking_token_budget", "structured_outputs, a choice alone") or 1 in sizes
    )
    assert_replayed(found, record_property, f"gap, vLLM, {name}")


@pytest.mark.needs("vllm")
def test_the_candidates_beside_a_fixed_token_are_not_members(model, vllm_outputs_of):
    """vLLM sets the logit of a fixed token to 1e9, which leaves the others of the top k finite."""
    with rebound(vllm_outputs, IMPOSSIBLE=-1e30):
        found, sizes = read(model, vllm_outputs_of, "thinking_token_budget")
    assert min(sizes) == 20 and max(float(gap.max()) for gap, _ in found) >= LEAST
