"""Transformers and vLLM as generators of traces outside of training, for the command `capture`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..settings.built_engine import check_engine
from ..settings.contract import SamplingSettings
from ..traces.columns import Trace
from ..traces.support import SupportRows
from .transformers_generate import ScoresRecorder, recording


@dataclass(frozen=True)
class CaptureRequest:
    """What is asked of an engine for every prompt.

    Attributes:
        settings: sampling settings that truncate.
        num_generations: completions per prompt.
        max_tokens: longest completion.
        seed: of the first batch; each batch gets a seed of its own, so that a resumed capture equals a whole one.
        further: further settings of the engine, which the contract has checked.
    """

    settings: SamplingSettings
    num_generations: int
    max_tokens: int
    seed: int
    further: Mapping[str, Any] = field(default_factory=dict)


class Generator(Protocol):
    """Samples completions and records their supports.

    Attributes:
        name, version: of the engine.
        repaired: how many supports so far are not as the engine gave them, or may lack members.
    """

    name: str
    version: str
    repaired: int

    def generate(self, prompts: Sequence[Sequence[int]], batch: int) -> list[Trace]:
        """`num_generations` traces for each prompt, in order; the same for the same `batch` number."""
        ...


class TransformersGenerator:
    """`generate` of transformers; any truncation, no bound on the support."""

    name = "transformers"
    repaired = 0

    def __init__(self, model: str, request: CaptureRequest, dtype: str = "float32"):
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.version = transformers.__version__
        self._request = request
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.to(self._device).eval()
        eos = self._model.generation_config.eos_token_id
        stop_ids = [eos] if isinstance(eos, int) else list(eos or [])
        settings = request.settings
        own = {
            "do_sample": True,
            "max_new_tokens": request.max_tokens,
            "eos_token_id": stop_ids or None,
            "pad_token_id": stop_ids[0] if stop_ids else 0,
            "repetition_penalty": 1.0,
        }
        sampling = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        self._config = GenerationConfig(**own | dict(request.further) | sampling)

    def generate(self, prompts: Sequence[Sequence[int]], batch: int) -> list[Trace]:
        import torch

        n = self._request.num_generations
        rows = [list(p) for p in prompts for _ in range(n)]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(r)) + r for r in rows], device=self._device)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=self._device)
        recorder = ScoresRecorder()
        torch.manual_seed(self._request.seed + batch)
        with torch.no_grad(), recording(self._model, recorder):
            output = self._model.generate(ids, attention_mask=mask, generation_config=self._config)
        completions = recorder.trim(output[:, width:].tolist())
        return [
            _trace(prompt, completion, logprobs, supports)
            for prompt, completion, (logprobs, supports) in zip(
                rows, completions, recorder.collect(completions), strict=True
            )
        ]


class VLLMGenerator:
    """vLLM, with supports from its worker or mask; from log-probs of older ones, which need a finite top_k."""

    name = "vllm"
    repaired = 0

    def __init__(self, model: str, request: CaptureRequest, dtype: str = "float32", **engine: Any):
        import os

        from ..libraries.environment import check_supported

        check_supported("vllm")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # nothing runs beside it, so no second process
        from vllm import LLM

        from .vllm_captures import choose_capture, open_capture, vllm_version

        self.version = str(vllm_version())
        self._request = request
        kwargs: dict[str, Any] = {"model": model, "dtype": dtype, "logprobs_mode": "processed_logprobs", **engine}
        self._capture = choose_capture("auto", request.settings, kwargs)
        self._llm = LLM(**{**self._capture.engine_kwargs(request.settings.bound, kwargs["dtype"]), **kwargs})
        check_engine(self._llm.llm_engine.vllm_config)
        open_capture(self._llm, self._capture)

    def generate(self, prompts: Sequence[Sequence[int]], batch: int) -> list[Trace]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        settings, request = self._request.settings, self._request
        further = dict(request.further)
        if "structured_outputs" in further:
            further["structured_outputs"] = StructuredOutputsParams(**further["structured_outputs"])
        stops = bool(further.get("stop"))
        sampling = {
            "detokenize": stops,
            **further,
            "n": request.num_generations,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.bound,
            "min_p": settings.min_p,
            "max_tokens": request.max_tokens,
            **self._capture.request_kwargs(settings.bound, self._llm.llm_engine.model_config),
        }
        first = (request.seed + batch) * 100_003
        params = [SamplingParams(**sampling | {"seed": first + i}) for i in range(len(prompts))]
        inputs: Any = [{"prompt_token_ids": list(p)} for p in prompts]
        traces = []
        for output in self._llm.generate(inputs, params, use_tqdm=False):
            for completion in output.outputs:
                where = f"vLLM request {output.request_id}"
                logprobs, supports, repaired = self._capture.read(completion, settings.bound, where, stops)
                self.repaired += repaired
                traces.append(_trace(output.prompt_token_ids or [], completion.token_ids, logprobs, supports))
        return traces


def _trace(prompt: Sequence[int], completion: Sequence[int], logprobs: np.ndarray, supports: SupportRows) -> Trace:
    return Trace(
        np.asarray(prompt, np.int32),
        np.asarray(completion, np.int32),
        np.ones(len(completion), bool),
        np.asarray(logprobs, np.float32),
        supports,
    )
