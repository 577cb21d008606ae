"""What runs in vLLM's worker, by itself: which ids are taken, and which engines are refused."""

from __future__ import annotations

from dataclasses import make_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.parts import require

require("vllm")
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

from trl_support_replay.engine_outputs import vllm_worker  # noqa: E402
from trl_support_replay.engine_outputs.vllm_capture import CAPTURE_SCHEDULER, Capture, built_capture  # noqa: E402
from trl_support_replay.engines import vllm_captures  # noqa: E402
from trl_support_replay.settings.contract import SamplingSettings  # noqa: E402

INF = float("inf")


def test_ids_are_those_that_can_be_drawn():
    logits = torch.tensor(
        [
            [1.0, 2.0, -INF, 0.0, -INF],
            [1.0, 2.0, 3.0, 4.0, 5.0],  # not asked for
            [1.0, 2.0, -INF, 1e9, 0.0],  # vLLM forces a token like this
            [float("nan")] * 5,
        ]
    )
    masks = vllm_worker.finite_rows(logits.log_softmax(-1), np.array([True, False, True, True]))
    assert masks.token_ids.dtype == np.int32
    assert [masks.slice_request(i, 1).token_ids.tolist() for i in range(4)] == [[0, 1, 3], [], [3], []]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculative_config": object()}, "drafts tokens"),
        ({"parallel_config": SimpleNamespace(enable_batch_sharded_sampling=True)}, "enable_batch_sharded_sampling"),
        ({"sampler": SimpleNamespace()}, "a sampler of its own, SimpleNamespace"),
        ({}, None),
    ],
)
def test_engines_whose_supports_cannot_be_taken_are_refused(changes, says):
    runner = object.__new__(GPUModelRunner)
    fine = {"speculative_config": None, "parallel_config": SimpleNamespace(), "sampler": object.__new__(Sampler)}
    vars(runner).update(fine | changes)
    worker = vllm_worker.CaptureWorkerExtension()
    worker.model_runner = runner
    if says is None:
        assert vllm_worker._obstacle(runner) is None
    else:
        with pytest.raises(RuntimeError, match=says):
            worker.support_replay_capture()


def test_another_model_runner_is_refused_by_its_name():
    worker = vllm_worker.CaptureWorkerExtension()
    worker.model_runner = SimpleNamespace()
    with pytest.raises(RuntimeError, match="types.SimpleNamespace, another model runner than V1"):
        worker.support_replay_capture()
    llm = SimpleNamespace(collective_rpc=lambda method: getattr(worker, method)())
    with pytest.raises(ValueError, match="support_capture='worker' is not available: .* Set support_capture="):
        vllm_captures.open_capture(llm, Capture("worker"))


def test_a_vllm_that_is_otherwise_leaves_supports_to_logprobs(monkeypatch):
    monkeypatch.setattr(vllm_worker, "ModelRunnerOutput", make_dataclass("ModelRunnerOutput", ["logprobs"]))
    with pytest.raises(ImportError, match="ModelRunnerOutput.sampling_masks of this vLLM is not"):
        vllm_worker._check_seam()
    monkeypatch.setattr(vllm_captures, "_seam_obstacle", lambda: "its sampler is another")
    assert vllm_captures.choose_capture("auto", SamplingSettings(top_k=20), {}) == Capture("logprobs")
    with pytest.raises(ValueError, match="top_p=0.9 cannot be replayed: .*its sampler is another"):
        vllm_captures.choose_capture("auto", SamplingSettings(top_p=0.9), {})


def test_an_engine_with_a_mask_of_its_own_is_asked_with_the_whole_vocabulary(monkeypatch):
    monkeypatch.setattr(vllm_captures, "on_cpu", lambda: False)
    monkeypatch.setattr(vllm_captures, "runs_v2", lambda kwargs: True)
    capture = vllm_captures.choose_capture("auto", SamplingSettings(top_p=0.9), {})
    assert capture == Capture("native") and capture.engine_kwargs(0, "float32") == {"return_sampling_mask": True}
    config = SimpleNamespace(get_vocab_size=lambda: 77)
    assert capture.any_request_kwargs(0, config) == {"top_k": 77} and capture.any_request_kwargs(5, config) == {}
    assert capture.request_kwargs(0, config) == {"logprobs": 0, "top_k": 77}
    with pytest.raises(ValueError, match="'worker' is not available: .* V2.* Set support_capture='native'"):
        vllm_captures.choose_capture("worker", SamplingSettings(top_p=0.9), {})


@pytest.mark.parametrize(
    ("mask", "scheduler", "v2", "name"),
    [
        (True, None, True, "native"),
        (False, CAPTURE_SCHEDULER, False, "worker"),
        (False, CAPTURE_SCHEDULER, True, "logprobs"),
        (False, None, False, "logprobs"),
    ],
)
def test_the_capture_of_a_built_engine_is_read_off_its_configuration(mask, scheduler, v2, name):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler), use_v2_model_runner=v2)
    assert built_capture(config, SimpleNamespace(return_sampling_mask=mask)) == Capture(name)


def test_the_runner_of_an_engine_is_known_before_it_is_built(tmp_path):
    from tests.engines.mixed_batch import save_model

    kwargs = {"model": save_model(tmp_path), "skip_tokenizer_init": True, "gpu_memory_utilization": 0.1}
    assert vllm_captures.runs_v2(kwargs) is False  # it needs a GPU
