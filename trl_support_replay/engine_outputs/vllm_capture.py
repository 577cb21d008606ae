"""The ways in which a vLLM engine reports supports: what it is built with, asked for, and how its answers are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..traces.support import SupportRows
from .vllm_outputs import num_candidates, read_flat_logprobs, read_sampled_logprobs, read_sampling_mask

_WORKER = __name__.rpartition(".")[0] + ".vllm_worker"
CAPTURE_SCHEDULER = f"{_WORKER}.capture_scheduler"
WORKER_EXTENSION = f"{_WORKER}.CaptureWorkerExtension"


@dataclass(frozen=True)
class Capture:
    """One way to get supports from an engine.

    Attributes:
        name: `"worker"`: taken inside the engine where tokens are drawn, with any truncation. `"native"`: the engine's
            own sampling mask, with any truncation. `"logprobs"`: the finite entries of the best processed log-probs,
            which needs a top_k. `"sampled"`: nothing is truncated, so only log-probs of sampled tokens are read.
    """

    name: str

    def engine_kwargs(self, top_k: int, dtype: str) -> dict[str, Any]:
        """Arguments for `vllm.LLM`.

        Args:
            top_k: of the requests; 0 is off.
            dtype: data type of the engine.
        """
        if self.name == "worker":
            return {"scheduler_cls": CAPTURE_SCHEDULER, "worker_extension_cls": WORKER_EXTENSION}
        if self.name == "native":
            return {"return_sampling_mask": True}
        return {"max_logprobs": num_candidates(top_k, dtype)} if self.name == "logprobs" else {}

    def any_request_kwargs(self, top_k: int, model_config: Any) -> dict[str, Any]:
        """What replaces arguments of `SamplingParams` in every request, also where nothing is recorded.

        An engine with a sampling mask of its own wants a top_k. The whole vocabulary is one that cuts nothing.

        Args:
            top_k: of the request; 0 is off.
            model_config: the engine's `ModelConfig`.
        """
        return {"top_k": model_config.get_vocab_size()} if self.name == "native" and top_k <= 0 else {}

    def request_kwargs(self, top_k: int, model_config: Any) -> dict[str, Any]:
        """What replaces arguments of `SamplingParams` in a request whose supports are recorded; see above.

        Args:
            top_k: the request's, or the number of tokens that a constraint allows, which it leaves whole; 0 is off.
            model_config: the engine's `ModelConfig`.
        """
        kwargs: dict[str, Any] = {"logprobs": 0, **self.any_request_kwargs(top_k, model_config)}
        if top_k > 0:
            kwargs["top_k"] = top_k
        if self.name == "logprobs":
            vocab_size, limit = model_config.get_vocab_size(), model_config.max_logprobs
            kwargs["logprobs"] = num_candidates(top_k, model_config.dtype, vocab_size, limit)
            kwargs["flat_logprobs"] = True
        elif self.name == "worker":
            from .vllm_worker import REQUEST_MARK

            kwargs["extra_args"] = {REQUEST_MARK: True}
        return kwargs

    def read(
        self, completion: Any, top_k: int, request: str, trailing: bool = False
    ) -> tuple[np.ndarray, SupportRows, int]:
        """Log-probs and supports of a completion, as in `read_flat_logprobs`."""
        if self.name == "logprobs":
            return read_flat_logprobs(completion, top_k, request, trailing)
        if self.name == "sampled":
            return read_sampled_logprobs(completion, request)
        return read_sampling_mask(completion, request, trailing)


def built_capture(vllm_config: Any, model_config: Any) -> Capture:
    """How an engine that is built already reports supports of requests that truncate.

    Args:
        vllm_config: its `VllmConfig`.
        model_config: its `ModelConfig`.
    """
    scheduler = getattr(getattr(vllm_config, "scheduler_config", None), "scheduler_cls", None)
    if getattr(model_config, "return_sampling_mask", False):
        return Capture("native")
    if scheduler == CAPTURE_SCHEDULER and not vllm_config.use_v2_model_runner:
        return Capture("worker")
    return Capture("logprobs")


class _Ids(np.ndarray):
    """Token ids that stay an array where vLLM makes a list of them, which takes 32 bytes and 40 ns per id."""

    def tolist(self) -> Any:
        return self


def keep_arrays(output_processor: Any) -> None:
    """Let an engine's `OutputProcessor` give out the ids of sampling masks as int32 arrays, not as lists."""
    if "process_outputs" in vars(output_processor):
        return  # it does already
    own = output_processor.process_outputs

    def process_outputs(engine_core_outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            mask = output.new_sampling_mask
            if mask is not None:
                output.new_sampling_mask = mask._replace(token_ids=np.asarray(mask.token_ids).view(_Ids))
        return own(engine_core_outputs, *args, **kwargs)

    output_processor.process_outputs = process_outputs
