"""Reading supports out of vLLM's own output classes, and refusing outputs that do not hold them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import trl.generation.vllm_generation as trl_vllm

from tests.parts import require
from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.engine_outputs.vllm_capture import Capture
from trl_support_replay.engine_outputs.vllm_outputs import read_flat_logprobs, read_sampling_mask
from trl_support_replay.engines.vllm_engine import SupportVLLMGeneration
from trl_support_replay.rollouts.recorder import SupportRecorder
from trl_support_replay.settings.contract import SamplingSettings

require("vllm")
from vllm.logprobs import FlatLogprobs, Logprob  # noqa: E402
from vllm.outputs import CompletionOutput, SamplingMask  # noqa: E402

INF = math.inf


def flat(positions):
    """`positions`: for each token, `(sampled id, its log-prob)` followed by the candidates `(id, log-prob)`."""
    logprobs = FlatLogprobs()
    for entries in positions:
        ids, values = [i for i, _ in entries], [v for _, v in entries]
        logprobs.append_fast(ids, values, iter(range(len(ids))), [None] * len(ids))
    return logprobs


def completion(token_ids, logprobs, mask=None):
    return CompletionOutput(0, "", token_ids, None, logprobs, sampling_mask=mask)


def log(*probabilities):
    return [math.log(p) if p else -INF for p in probabilities]


def test_rows_are_the_finite_candidates_and_logprobs_the_sampled_tokens():
    a, b = log(0.75, 0.25)
    c, d, e = log(0.5, 0.3, 0.2)
    output = completion(
        [7, 3, 9],
        flat(
            [
                [(7, b), (5, a), (7, b), (8, -INF)],  # the sampled token is not the best one
                [(3, 0.0), (3, 0.0), (4, -INF), (5, -INF)],  # a single survivor
                [(9, c), (9, c), (1, d), (2, e)],
            ]
        ),
    )
    logprobs, rows, repaired = read_flat_logprobs(output, top_k=3, request="r")
    np.testing.assert_array_equal(logprobs, [b, 0.0, c])
    assert [sorted(row) for row in rows.to_lists()] == [[5, 7], [3], [1, 2, 9]]
    assert repaired == 0


def test_a_missing_sampled_token_replaces_the_weakest_and_is_counted(caplog):
    best, weak, sampled = log(0.6, 0.1, 0.3)
    output = completion([7], flat([[(7, sampled), (5, best), (6, weak)]]))
    logprobs, rows, repaired = read_flat_logprobs(output, top_k=2, request="request 4")
    assert sorted(rows[0].tolist()) == [5, 7] and repaired == 1 and logprobs[0] == sampled
    assert "request 4" in caplog.text and "1 of 1" in caplog.text


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "message"),
    [
        ([7, 8], None, "request 4: the engine returned no log-probs for 2 tokens"),
        ([7, 8], flat([[(7, 0.0), (7, 0.0)]]), "1 log-prob positions for 2 tokens"),
        ([7], flat([[(7, math.nan), (7, math.nan)]]), "NaN log-probs for token 0"),
        ([7, 8], flat([[(7, 0.0), (7, 0.0)], [(8, 0.0), (8, 0.0), (9, math.nan)]]), "NaN log-probs for token 1"),
        ([7], flat([[(5, 0.0), (5, 0.0)]]), "did not report token 0"),
        ([7], flat([[(7, -INF), (5, 0.0)]]), "probability 0"),
        ([7], flat([[(7, -1.0), (7, -1.0), (5, -2.0)]]), "processed_logprobs"),
        ([7], flat([[]]), "token 0 has no log-probs"),
    ],
)
def test_outputs_without_supports_are_refused_by_name(token_ids, logprobs, message):
    with pytest.raises(SupportCaptureError, match="request 4") as error:
        read_flat_logprobs(completion(token_ids, logprobs), top_k=2, request="request 4")
    assert message in str(error.value)


def test_positions_past_a_stop_string_are_dropped_only_when_stops_are_in_use():
    output = completion([7], flat([[(7, 0.0), (7, 0.0)], [(8, 0.0), (8, 0.0)]]))
    logprobs, rows, _ = read_flat_logprobs(output, top_k=2, request="r", trailing=True)
    assert len(logprobs) == len(rows) == 1
    with pytest.raises(SupportCaptureError, match="2 log-prob positions for 1 tokens"):
        read_flat_logprobs(output, top_k=2, request="r")


def test_an_empty_completion_is_an_empty_trace():
    logprobs, rows, repaired = read_flat_logprobs(completion([], flat([])), top_k=2, request="r")
    assert len(logprobs) == len(rows) == repaired == 0


def test_sampling_mask_rows_are_taken_as_they_are():
    logprobs = [{7: Logprob(-0.5)}, {3: Logprob(0.0)}]
    output = completion([7, 3], logprobs, SamplingMask([[7, 5, 9], [3]]))
    values, rows, repaired = read_sampling_mask(output, "r")
    assert rows.to_lists() == [[7, 5, 9], [3]] and values.tolist() == [-0.5, 0.0] and repaired == 0


@pytest.mark.parametrize(
    ("mask", "logprobs", "message"),
    [
        (None, [{7: Logprob(0.0)}], "no sampling mask"),
        (SamplingMask([[7], [8]]), [{7: Logprob(0.0)}], "2 sampling masks for 1 tokens"),
        (SamplingMask([[8, 9]]), [{7: Logprob(0.0)}], "does not hold id 7"),
        (SamplingMask([[7]]), None, "0 log-prob positions for 1 tokens"),
        (SamplingMask([[7]]), [{7: Logprob(math.nan)}], "log-prob nan"),
    ],
)
def test_sampling_masks_that_do_not_fit_are_refused(mask, logprobs, message):
    with pytest.raises(SupportCaptureError, match=message):
        read_sampling_mask(completion([7], logprobs, mask), "r")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_a_tensor_parallel_engine_records_its_own_outputs_alone(monkeypatch, rank):
    best, weak, sampled = log(0.6, 0.1, 0.3)
    outputs = [
        SimpleNamespace(request_id="4", outputs=[completion([t], flat([[(t, sampled), (5, best), (6, weak)]]))])
        for t in (7, 8, 9, 10)
    ]

    def gather_and_slice(self, prompts):
        """As TRL: each process of the group gets the outputs for the prompts of all of them, and keeps its share."""
        return trl_vllm.extract_logprobs(outputs)[0][rank * len(prompts) : (rank + 1) * len(prompts)]

    monkeypatch.setattr(trl_vllm.VLLMGeneration, "generate", gather_and_slice)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: rank)
    recorder = SupportRecorder()
    engine = object.__new__(SupportVLLMGeneration)
    vars(engine).update(tensor_parallel_size=2, tp_group=None, generation_kwargs={}, _capture=Capture("logprobs"))
    vars(engine).update(_settings=SamplingSettings(top_k=2), _recorder=lambda: recorder, _routers=None)
    config = SimpleNamespace(dtype="float32", max_logprobs=-1, get_vocab_size=lambda: 11)
    vars(engine).update(llm=SimpleNamespace(llm_engine=SimpleNamespace(model_config=config)))
    logprobs = engine.generate([[1], [2]])
    assert [[entry.row for (entry,) in row] for row in logprobs] == [[0], [1]]
    assert recorder.token_ids().tolist() == [[7, 8], [9, 10]][rank]
    assert recorder.repaired == 2  # a sampled token is missing in each
