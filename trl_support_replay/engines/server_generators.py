"""Servers as generators of traces outside of training, for the command `capture`."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from ..client.pool import ServerPool, new_request_id
from ..client.servers import Server, check_server, connect_vllm
from ..client.transport import Transport
from ..engine_outputs.errors import SupportCaptureError
from ..traces.columns import Trace
from ..wire.protocol import GenerateRequest
from .generators import CaptureRequest
from .sglang_server import connect_sglang

_CONNECT: dict[str, Callable[[Transport], Awaitable[Server]]] = {"vllm-server": connect_vllm, "sglang": connect_sglang}


class ServerGenerator:
    """Servers that are already up, with the model that they serve.

    Args:
        engine: `"vllm-server"` (`vllm-serve`, or a stock vLLM server) or `"sglang"`.
        urls: base URLs. An API key is taken from `VLLM_API_KEY`.
        request: what is asked for every prompt.

    Attributes:
        weights: what the servers say of the weights that they hold, each different answer once.
    """

    def __init__(self, engine: str, urls: Sequence[str], request: CaptureRequest):
        self.name = engine
        self.repaired = 0
        self._request = request
        self._weights: set[str | None] = set()  # versions that samples came from
        self._pool = ServerPool(urls, api_key=os.environ.get("VLLM_API_KEY"), connect=_CONNECT[engine])
        for server in self._pool.servers:
            check_server(server, request.settings)
        told = [
            {name: s.info[name] for name in ("model", "model_files", "weights_version") if s.info.get(name) is not None}
            for s in self._pool.servers
        ]
        self.weights = [json.loads(text) for text in sorted({json.dumps(one, default=str) for one in told})]
        versions = {str(server.info.get("engine_version") or "unknown") for server in self._pool.servers}
        self.version = ", ".join(sorted(versions))

    def generate(self, prompts: Sequence[Sequence[int]], batch: int) -> list[Trace]:
        """`num_generations` traces for each prompt, in order; the same for the same `batch` number."""
        settings, request = self._request.settings, self._request
        asked = [
            GenerateRequest(
                request_id=new_request_id(),
                prompt_ids=np.asarray(prompt, dtype=np.int32),
                n=request.num_generations,
                sampling={
                    **request.further,
                    "temperature": settings.temperature,
                    "top_p": settings.top_p,
                    "top_k": settings.bound,
                    "min_p": settings.min_p,
                    "max_tokens": request.max_tokens,
                    "seed": (request.seed + batch) * 100_003 + i,
                },
            )
            for i, prompt in enumerate(prompts)
        ]
        traces = []
        groups = self._pool.generate(asked)
        self._weights |= {sample.weights_version for samples in groups for sample in samples}
        if len(self._weights) > 1:
            raise SupportCaptureError(
                f"The samples of this capture come from the weights {sorted(map(str, self._weights))}: the servers "
                "were given others meanwhile, or hold different ones. Capture from servers that nothing trains with, "
                "into a new --output."
            )
        for one, samples in zip(asked, groups, strict=True):
            for sample in samples:
                assert sample.support is not None
                self.repaired += sample.repaired
                mask = np.ones(len(sample.token_ids), bool)
                traces.append(Trace(one.prompt_ids, sample.token_ids, mask, sample.logprobs, sample.support))
        return traces
