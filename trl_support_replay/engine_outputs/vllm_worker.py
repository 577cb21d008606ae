"""What runs inside vLLM's own processes: the support of each sampled token, taken where the token is drawn.

vLLM's sampler returns the log-probs of the distribution that it draws from, one row per request, with -inf for tokens
that were removed. The ids of the finite entries travel back through vLLM's channel for sampling masks: worker,
scheduler, output. The scheduler cuts them by request as it cuts the tokens, so chunked prefill, preemption, cached
prefixes and several completions per prompt are vLLM's own business.

vLLM imports this module by name in the processes of an engine that is built with `capture_scheduler` and
`CaptureWorkerExtension`. It knows torch, numpy and vLLM, and nothing of this package.

Raises on import:
    ImportError: when this vLLM has no such channel, or another sampler than the one that is read here.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

try:
    from vllm.v1.outputs import SamplingMaskLists
except ImportError:
    raise ImportError("this vLLM has no channel for sampling masks") from None

REQUEST_MARK = "support_replay_capture"
"""Key of `SamplingParams.extra_args`. Only requests that carry it have their supports taken."""

# vLLM forces a token by raising its logit to 1e9 and leaves the others where they are. Their log-probs are finite then,
# and their probabilities 0. No float32 softmax gives a log-prob near this to a token that can be drawn.
_NOT_DRAWN = -1e6


def capture_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """vLLM's own scheduler, for `scheduler_cls`, which passes on the supports that a worker attaches to its output."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, **kwargs)
    scheduler.return_sampling_mask = True
    return scheduler


class CaptureWorkerExtension:
    """What vLLM mixes into its worker (`worker_extension_cls`)."""

    def support_replay_capture(self) -> None:
        """Take the supports of marked requests from now on. Does nothing the second time.

        Raises:
            RuntimeError: naming what this engine has that the capture cannot work with.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        obstacle = _obstacle(runner)
        if obstacle is not None:
            raise RuntimeError(obstacle)
        if hasattr(runner, "sampler") and not isinstance(runner.sampler.sample, _Sample):
            # The last stage of a pipeline, which alone has a sampler.
            runner.sampler.sample = _Sample(runner)
            runner.sample_tokens = _Step(runner)


def _obstacle(runner: Any) -> str | None:
    """Why supports cannot be taken in this worker; `None` when they can."""
    if not isinstance(runner, GPUModelRunner):
        return f"the engine runs {type(runner).__module__}.{type(runner).__qualname__}, another model runner than V1"
    if runner.speculative_config is not None:
        return "the engine drafts tokens (speculative_config)"
    if getattr(runner.parallel_config, "enable_batch_sharded_sampling", None):
        return "the engine samples each part of a batch on another rank (enable_batch_sharded_sampling)"
    if hasattr(runner, "sampler") and type(runner.sampler) is not Sampler:
        return f"the engine has a sampler of its own, {type(runner.sampler).__qualname__}"
    return None


class _Sample:
    """In the place of a sampler's `sample`: keeps the supports of the step.

    Attributes:
        masks: supports of the step's requests, in the order of its batch, empty for those that are not marked. `None`
            when none is, or before the step has sampled.
    """

    def __init__(self, runner: Any):
        self._runner, self._own = runner, runner.sampler.sample
        self.masks: SamplingMaskLists | None = None

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, logprobs = self._own(logits, sampling_metadata, *args, **kwargs)
        requests = self._runner.requests
        extra = [getattr(requests[i].sampling_params, "extra_args", None) for i in self._runner.input_batch.req_ids]
        marked = np.array([bool(x and x.get(REQUEST_MARK)) for x in extra], dtype=bool)
        # Without log-probs, or with those of something else than this batch, requests are left without supports, which
        # the reader of their answers refuses.
        if marked.any() and logprobs is not None and len(logprobs) == len(marked):
            self.masks = finite_rows(logprobs, marked)
        return sampled, logprobs


class _Step:
    """In the place of a runner's `sample_tokens`: gives the step's output the supports that the sampler kept."""

    def __init__(self, runner: Any):
        self._sample, self._own = runner.sampler.sample, runner.sample_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._sample.masks = None  # warm-up samples as well
        output = self._own(*args, **kwargs)
        if self._sample.masks is not None:
            # With asynchronous scheduling the output is wrapped until its tokens have arrived.
            getattr(output, "_model_runner_output", output).sampling_masks = self._sample.masks
        return output


def finite_rows(logprobs: torch.Tensor, marked: np.ndarray) -> SamplingMaskLists:
    """The ids that each row can be drawn from.

    Args:
        logprobs: `[R, V]` float32.
        marked: bool `[R]`; the other rows come out empty.
    """
    keep = logprobs > _NOT_DRAWN
    if keep.device.type == "cpu":
        rows, ids = np.divmod(np.flatnonzero(keep.numpy()), keep.shape[1])
    else:
        rows, ids = (x.cpu().numpy() for x in keep.nonzero(as_tuple=True))
    if not marked.all():
        wanted = marked[rows]
        rows, ids = rows[wanted], ids[wanted]
    offsets = np.zeros(len(marked) + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=len(marked)), out=offsets[1:])
    return SamplingMaskLists(ids.astype(np.int32), offsets)


def _check_seam() -> None:
    def fields(owner: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(owner)}

    def parameters(function: Any, *first: str) -> bool:
        return tuple(inspect.signature(function).parameters)[: len(first)] == first

    expected = {
        "SamplingMaskLists": SamplingMaskLists._fields[:2] == ("token_ids", "offsets"),
        "SamplingMaskLists.slice_request": hasattr(SamplingMaskLists, "slice_request"),
        "ModelRunnerOutput.sampling_masks": "sampling_masks" in fields(ModelRunnerOutput),
        "EngineCoreOutput.new_sampling_mask": "new_sampling_mask" in EngineCoreOutput.__struct_fields__,
        "Scheduler.return_sampling_mask": "self.return_sampling_mask" in inspect.getsource(Scheduler),
        "Sampler.sample": parameters(Sampler.sample, "self", "logits", "sampling_metadata"),
        "GPUModelRunner.sample_tokens": parameters(GPUModelRunner.sample_tokens, "self", "grammar_output"),
    }
    for name, found in expected.items():
        if not found:
            raise ImportError(f"{name} of this vLLM is not what it is in 0.28 to 0.31")


_check_seam()
