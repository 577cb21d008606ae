"""TRL's colocated vLLM engine, with the support of every sampled token recorded.

`EngineFixes` only makes the engine of TRL run with the policy's data type and, on a CPU, with a weight sync that takes
effect. `SupportVLLMGeneration` adds the capture. Both leave TRL's own code in charge: they change the arguments that it
passes to vLLM and read the outputs that it throws away.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.grpo_trainer as trl_grpo
from accelerate.utils import is_peft_model
from transformers.core_model_loading import revert_weight_conversion
from trl.generation.vllm_generation import VLLMGeneration

from ..engine_outputs.errors import SupportCaptureError
from ..engine_outputs.vllm_capture import Capture
from ..engine_outputs.vllm_routes import read_routed_experts
from ..libraries.environment import check_seam
from ..libraries.rebind import rebound
from ..libraries.vllm_cpu import repack_on_cpu
from ..parallel.processes import alone
from ..rollouts.recorder import SupportRecorder
from ..settings.built_engine import check_engine
from ..settings.contract import SamplingSettings
from ..traces.routes import RoutedExperts
from .vllm_captures import choose_capture, on_cpu, open_capture

if TYPE_CHECKING:
    from ..routing import RouterReplay

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

    def extra_engine_kwargs(self, own: dict[str, Any]) -> dict[str, Any]:
        """What is added to the arguments `own` that TRL gives to `vllm.LLM`."""
        dtype = str(self.model.dtype).removeprefix("torch.") if self._dtype == "auto" else self._dtype
        kwargs: dict[str, Any] = {"dtype": dtype}
        if on_cpu():
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
        engine = trl_vllm.LLM

        def build(**kwargs: Any) -> Any:
            return engine(**{**kwargs, **self.extra_engine_kwargs(kwargs)})

        with rebound(trl_vllm, LLM=build):
            super()._init_vllm()

    def sync_weights(self) -> None:
        if self.mode == "colocate" and on_cpu():
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
        support_capture: `"auto"`, `"worker"`, `"native"` or `"logprobs"`.
        routers: returns the policy's `RouterReplay`, to record which experts each token was routed to; `None` when
            routes are not recorded.
        routes_missing: `"error"` or `"live"`, for requests with fewer routes than tokens.
        recorder: returns the recorder of the current generation batch, or `None` when nothing is to be recorded
            (evaluation).

    Raises:
        UnreplayableSettingError: when the engine, once it is built, samples in a way that cannot be replayed.
        ValueError: for a capture that the engine does not have.
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
        self._support_capture = support_capture
        self._capture = Capture("sampled")
        super().__init__(*args, **kwargs)

    @property
    def capture(self) -> str:
        """Name of the way in which supports are reported; see `Capture`."""
        return self._capture.name

    def extra_engine_kwargs(self, own: dict[str, Any]) -> dict[str, Any]:
        kwargs = super().extra_engine_kwargs(own)
        if self._routers is not None:
            kwargs["enable_return_routed_experts"] = True
        self._capture = choose_capture(self._support_capture, self._settings, {**own, **kwargs})
        return {**self._capture.engine_kwargs(self._settings.bound, kwargs["dtype"]), **kwargs}

    def _init_vllm(self) -> None:
        super()._init_vllm()
        if self.mode == "colocate":
            check_engine(self.llm.llm_engine.vllm_config)
            open_capture(self.llm, self._capture)

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
        recorder, own = self._recorder(), self.generation_kwargs
        # Stop strings are the only reason to turn tokens into text here.
        stops = bool(own.get("stop"))
        bound, config = self._settings.bound, self.llm.llm_engine.model_config

        @alone()
        def extract(outputs: list[Any]) -> tuple[list, list]:
            assert recorder is not None
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
                    values, rows, repaired = self._capture.read(completion, bound, request, trailing=stops)
                    routes = self._read_routes(output, completion, request, trailing=stops)
                    prompt_ids = () if routes is None else output.prompt_token_ids
                    traced = recorder.add(completion.token_ids, values, rows, repaired, routes, prompt_ids)
                    logprobs.append([[x] for x in traced])
                    token_ids.append([[token] for token in completion.token_ids])
            return logprobs, token_ids

        try:
            if recorder is None:
                self.generation_kwargs = {**own, **self._capture.any_request_kwargs(bound, config)}
                return super().generate(prompts, *args, **kwargs)
            recorded = self._capture.request_kwargs(bound, config)
            self.generation_kwargs = {**({} if stops else {"detokenize": False}), **own, **recorded}
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
