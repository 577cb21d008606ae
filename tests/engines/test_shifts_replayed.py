"""Penalties and finite biases on real engines: scores of the shifted logits are what the engine drew from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.tiny_models import llama, save
from trl_support_replay import score_support_from_logits
from trl_support_replay.engine_outputs.vllm_outputs import num_candidates, read_flat_logprobs
from trl_support_replay.engines.transformers_generate import ScoresRecorder, recording
from trl_support_replay.scoring import CandidateShifts, SupportCSR
from trl_support_replay.traces.shifts import LogitShifts

TEMPERATURE, TOKENS, TOP_K, PAD = 0.7, 24, 20, 2
MOST, LEAST = 3e-5, 1e-2  # nats: a gap that is rounding, and one that is not
BIAS = {i: (-1.5, 2.0, 0.5)[i % 3] for i in range(3, 99, 2)}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    # vLLM's attention on a CPU needs heads of 32.
    return save(
        llama(sharpness=20, hidden_size=128, intermediate_size=256), tmp_path_factory.mktemp("models") / "tiny-chars"
    )


@pytest.fixture(scope="module")
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@torch.no_grad()
def gaps(model, shifts, prompt, padding, ids, logprobs, rows):
    """Largest distance to the recorded log-probs, of scores with shifts and without."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    history = np.array([*padding, *prompt]), np.array(ids)
    of_tokens = CandidateShifts(*shifts.of_request(*history, rows.token_ids, rows.offsets))
    found = []
    for of_support in (of_tokens, None):
        support = SupportCSR.from_numpy(rows.token_ids, rows.offsets, shifts=of_support)
        scores = score_support_from_logits(logits, torch.tensor(ids), support, temperature=TEMPERATURE)
        found.append(float(np.abs(scores.logprobs.numpy() - logprobs).max()))
    return found


def assert_replayed(found, record_property, name):
    shifted, plain = (max(gap) for gap in zip(*found, strict=True))
    record_property(name, f"{shifted:.1e}")
    assert shifted <= MOST and plain >= LEAST, (shifted, plain)


GENERATE = {
    "repetition_penalty": ({"repetition_penalty": 1.5}, LogitShifts(repetition_penalty=1.5)),
    "sequence_bias": ({"sequence_bias": [[[i], b] for i, b in BIAS.items()]}, LogitShifts(logit_bias=BIAS)),
    "both": (
        {"repetition_penalty": 1.5, "sequence_bias": [[[i], b] for i, b in BIAS.items()]},
        LogitShifts(repetition_penalty=1.5, logit_bias=BIAS),
    ),
}


@pytest.mark.parametrize("name", GENERATE)
def test_generate(model, record_property, name):
    kwargs, shifts = GENERATE[name]
    torch.manual_seed(1)
    prompts = torch.randint(3, 99, (6, 6))
    prompts[:3, :5] = PAD  # which is the end of sequence, and then counts as seen
    mask = (prompts != PAD).long()
    config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, max_new_tokens=TOKENS, top_k=TOP_K, eos_token_id=PAD, pad_token_id=PAD,
        **kwargs,
    )  # fmt: skip
    recorder = ScoresRecorder()
    with recording(model, recorder):
        output = model.generate(prompts, attention_mask=mask, generation_config=config)
    completions = recorder.trim(output[:, 6:].tolist())
    found = [
        gaps(model, shifts, prompt[m.bool()].tolist(), prompt[~m.bool()].tolist(), ids, logprobs, rows)
        for prompt, m, ids, (logprobs, rows) in zip(
            prompts, mask, completions, recorder.collect(completions), strict=True
        )
    ]
    assert_replayed(found, record_property, f"gap, transformers `generate`, {name}")


VLLM = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": BIAS},
    "all of them": {
        "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.5, "logit_bias": BIAS,
    },
}  # fmt: skip
PROMPTS = 5


@pytest.fixture(scope="module")
def vllm_outputs(model_path):
    pytest.importorskip("vllm", reason="samples with vLLM")
    from vllm import LLM, SamplingParams

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # other tests may have an engine in this process
        llm = LLM(
            model=model_path, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=16, max_logprobs=99,
            logprobs_mode="processed_logprobs",
        )  # fmt: skip
    rng = np.random.default_rng(2)
    requests = [{"prompt_token_ids": rng.integers(3, 99, 6).tolist()} for _ in range(PROMPTS)] * len(VLLM)
    params = [
        SamplingParams(
            temperature=TEMPERATURE, max_tokens=TOKENS, top_k=TOP_K, top_p=0.9, flat_logprobs=True,
            logprobs=num_candidates(TOP_K, "float32", 99), **kwargs,
        )
        for kwargs in VLLM.values()
        for _ in range(PROMPTS)
    ]  # fmt: skip
    outputs = llm.generate(requests, params, use_tqdm=False)
    return {name: outputs[i * PROMPTS : (i + 1) * PROMPTS] for i, name in enumerate(VLLM)}


@pytest.mark.needs("vllm")
@pytest.mark.parametrize("name", VLLM)
def test_vllm(model, vllm_outputs, record_property, name):
    shifts, found = LogitShifts(**VLLM[name]), []
    for output in vllm_outputs[name]:
        completion = output.outputs[0]
        logprobs, rows, _ = read_flat_logprobs(completion, TOP_K, name)
        found.append(gaps(model, shifts, output.prompt_token_ids, [], list(completion.token_ids), logprobs, rows))
    assert_replayed(found, record_property, f"gap, vLLM, {name}")
