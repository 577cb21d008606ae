"""The scores recorder against the scores that `generate` itself returns."""

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.engines.transformers_generate import ScoresRecorder, recording


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
    return model


class Ban(LogitsProcessor):
    """A custom processor; `generate` runs it before its own warpers."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 7] = -torch.inf
        return scores


SAMPLING = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1, "temperature": 0.7},
    {"top_k": 9, "top_p": 0.7, "temperature": 1.3},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02},
]


def generate(model, recorder, **sampling):
    torch.manual_seed(1)
    prompts = torch.randint(3, 61, (5, 4))
    config = GenerationConfig(
        do_sample=True, max_new_tokens=14, output_scores=True, return_dict_in_generate=True, pad_token_id=0,
        eos_token_id=2, top_k=sampling.pop("top_k", 0), **sampling,
    )  # fmt: skip
    with recording(model, recorder):
        output = model.generate(prompts, generation_config=config, logits_processor=LogitsProcessorList([Ban()]))
    completions = []
    for row in output.sequences[:, 4:].tolist():
        completions.append(row[: row.index(2) + 1] if 2 in row else row)
    return completions, output.scores


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_rows_and_logprobs_are_those_of_the_returned_scores(model, sampling):
    recorder = ScoresRecorder()
    completions, scores = generate(model, recorder, **sampling)
    sizes = []
    for b, (logprobs, rows) in enumerate(recorder.collect(completions)):
        assert len(rows) == len(logprobs) == len(completions[b])
        for t, token in enumerate(completions[b]):
            finite = torch.isfinite(scores[t][b]).nonzero()[:, 0].tolist()
            assert sorted(rows[t].tolist()) == finite and token in finite and 7 not in finite
            assert logprobs[t] == pytest.approx(scores[t][b].log_softmax(-1)[token].item(), abs=1e-6)
            sizes.append(len(finite))
    assert max(sizes) > 1 and "_get_logits_processor" not in vars(model)


def test_without_truncation_only_the_sampled_token_is_kept(model):
    recorder = ScoresRecorder(truncates=False)
    completions, scores = generate(model, recorder)
    for b, (logprobs, rows) in enumerate(recorder.collect(completions)):
        assert rows.to_lists() == [[token] for token in completions[b]]
        want = [scores[t][b].log_softmax(-1)[token].item() for t, token in enumerate(completions[b])]
        np.testing.assert_allclose(logprobs, want, atol=1e-6)


def test_tokens_that_were_not_drawn_are_refused(model):
    recorder = ScoresRecorder()
    completions, _ = generate(model, recorder, top_k=2)
    longest = max(completions, key=len)
    b = completions.index(longest)
    with pytest.raises(SupportCaptureError, match="has 15 tokens, but 14 steps"):
        recorder.collect([*completions[:b], [*longest, 5], *completions[b + 1 :]])
    with pytest.raises(SupportCaptureError, match="is not in its recorded support"):
        recorder.collect([*completions[:b], [*longest[:-1], 7], *completions[b + 1 :]])


class StopEachElsewhere(StoppingCriteria):
    """Stops sequence `b` after `b + 2` tokens. `generate` draws on for it until the last one is done."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - 4 >= torch.arange(len(input_ids)) + 2


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("stop", ["ids", "criteria"])
def test_what_generate_fills_in_behind_an_end_is_trimmed(model, monkeypatch, stop, truncates):
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    stops = list(range(20, 26)) if stop == "ids" else None
    config = GenerationConfig(
        do_sample=True, max_new_tokens=14, pad_token_id=5, eos_token_id=stops, top_k=0, top_p=0.8 if truncates else 1.0
    )
    given = StoppingCriteriaList([StopEachElsewhere()] if stops is None else [])
    recorder, told = ScoresRecorder(truncates=truncates), []
    torch.manual_seed(2)
    with recording(model, recorder, told.append):
        output = model.generate(torch.randint(3, 61, (5, 4)), generation_config=config, stopping_criteria=given)
    filled = output[:, 4:].tolist()
    trimmed = recorder.trim(filled)
    assert told == [stops or []]
    if stops is None:
        assert [len(ids) for ids in trimmed] == [2, 3, 4, 5, 6]
    for whole, ids in zip(filled, trimmed, strict=True):
        assert ids == whole[: len(ids)]
        assert stops is None or (not set(ids[:-1]) & set(stops) and (ids[-1] in stops or len(ids) == 14))
    assert len({len(ids) for ids in trimmed}) > 2
    for ids, (logprobs, rows) in zip(trimmed, recorder.collect(trimmed), strict=True):
        assert len(rows) == len(logprobs) == len(ids) and rows.contains(np.array(ids)).all()
    short = min(range(5), key=lambda b: len(trimmed[b]))
    with pytest.raises(SupportCaptureError, match=f"stopped it after {len(trimmed[short])}"):
        recorder.collect([*trimmed[:short], filled[short], *trimmed[short + 1 :]])


def test_the_model_is_left_alone_after_an_error(model):
    with pytest.raises(RuntimeError, match="boom"), recording(model, ScoresRecorder()):
        raise RuntimeError("boom")
    assert not {"_get_logits_processor", "_get_stopping_criteria"} & set(vars(model))
