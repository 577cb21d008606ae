"""A vLLM server without the packed endpoint: what its own paths can be made to tell about supports.

`/inference/v1/generate` returns the engine's sampling mask, when the server runs with `--return-sampling-mask`. Else
`/v1/completions` returns log-probs of the best candidates, at hundreds of bytes per token; those that truncation
removed are there with the smallest value that its JSON has.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson

from ..engine_outputs.errors import SupportCaptureError
from ..engine_outputs.vllm_outputs import TIE_SLACK, num_candidates, read_flat_logprobs
from ..settings.built_engine import config_refusals, described
from ..settings.contract import judge, normalize_top_k
from ..settings.sampling_table.vllm import REQUEST
from ..traces.support import SupportError, SupportRows
from ..wire import protocol
from ..wire.protocol import GenerateRequest, Sample
from .transport import ServerRefusalError, Transport

logger = logging.getLogger(__name__)

_COMPLETIONS = "/v1/completions"
_TOKENS = "/inference/v1/generate"
# vLLM writes -inf as this value.
_REMOVED = -9999.0
# Samples of one request. vLLM takes many more, but an answer has hundreds of bytes per token.
_MAX_N = 64
_FINAL_ONLY = 2  # `RequestOutputKind`; else a request for several samples returns only the last one


class StockServer:
    """A `vllm serve` without the packed endpoint.

    Its weights have no version, so a restart goes unnoticed until the log-probs are compared.

    Args:
        transport: connections to it.
        model: the name that it serves.
        native: whether it returns sampling masks.
        config: its engine's configuration, as far as it tells (it does in development mode).

    Attributes: see `Server`.
    """

    def __init__(self, transport: Transport, model: str, native: bool, config: Mapping[str, Any]):
        self.url = transport.url
        self.capture = "native" if native else "logprobs"
        model_config = config.get("model_config") or {}
        dtype = model_config.get("dtype")
        self.info: dict[str, Any] = {
            "model": model,
            "dtype": dtype if dtype is None else str(dtype).removeprefix("torch."),
            "logprobs_mode": model_config.get("logprobs_mode"),
            "unreplayable": described(config_refusals(config)),
            "max_n": _MAX_N,
            "needs_top_k": True,
            "weight_reload": False,
            "versions": False,
            "routes": False,
        }
        self._transport = transport
        self._model = model
        self._max_candidates = sys.maxsize  # as far as it is known

    async def set_weights(self, version: str, reload: bool) -> None:
        if reload:
            raise RuntimeError(f"{self.url} has no packed endpoint, so it cannot reload weights from a folder.")

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        if request.routes_start is not None:
            raise ValueError(
                f"routes_start={request.routes_start}: {self.url} has no packed endpoint to return routes."
            )
        if request.support:
            for error in judge(request.sampling, REQUEST, "sampling[{!r}]"):
                raise error
        # What a request leaves out, the server takes from the model's generation_config.json.
        sampling = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **{name: value for name, value in request.sampling.items() if value is not None},
        }
        # The mask names other tokens beside one that a budget fixes; the log-probs tell them apart.
        masked = self.capture == "native" and sampling.get("thinking_token_budget") is None
        if masked and request.support:
            body = {
                "request_id": request.request_id,
                "model": self._model,
                "token_ids": request.prompt_ids.tolist(),
                "sampling_params": {**sampling, "n": request.n, "logprobs": 1, "output_kind": _FINAL_ONLY},
            }
            return await self._call(_TOKENS, body, request, _read_masked_choice)
        body = {
            "model": self._model,
            "prompt": request.prompt_ids.tolist(),
            "n": request.n,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **sampling,
        }
        if not request.support:
            return await self._call(_COMPLETIONS, {**body, "logprobs": 0}, request, _read_logprobs_choice)
        top_k = normalize_top_k(sampling.get("top_k"))
        asked = max(top_k, num_candidates(top_k, self.info["dtype"], self._max_candidates))
        try:
            return await self._call(_COMPLETIONS, {**body, "logprobs": asked}, request, _read_logprobs_choice)
        except ServerRefusalError as refusal:
            if "logprobs" not in str(refusal) or asked == top_k:
                raise
        # The server reports no more than its --max-logprobs, and does not say how many that is: 20 by default, which
        # may be top_k exactly. Then ties show only in the probability that the candidates lack.
        self._max_candidates = top_k + TIE_SLACK if asked > top_k + TIE_SLACK else top_k
        return await self.generate(request)

    async def _call(self, path: str, body: Mapping[str, Any], request: GenerateRequest, read: Any) -> list[Sample]:
        def parse(answer: bytes) -> list[Sample]:
            try:
                choices = sorted(orjson.loads(answer)["choices"], key=lambda choice: choice["index"])
                if len(choices) != request.n:
                    raise protocol.MessageError(f"{len(choices)} choices for {request.n} samples.")
                return [read(choice, request) for choice in choices]
            except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
                raise protocol.MessageError(f"Not an answer of {path}: {type(error).__name__}: {error}.") from error

        return await self._transport.call("POST", path, orjson.dumps(body), parse, signed=False)


async def connect_stock(transport: Transport) -> StockServer:
    """The stock vLLM server behind `transport`.

    Raises:
        ServerRefusalError: when it is not one.
    """

    def first_model(answer: bytes) -> str:
        try:
            return str(orjson.loads(answer)["data"][0]["id"])
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise protocol.MessageError(f"/v1/models did not list a model: {error}.") from error

    def engine_config(answer: bytes) -> dict[str, Any]:
        try:
            return dict(orjson.loads(answer)["vllm_config"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise protocol.MessageError(f"/server_info did not describe an engine: {error}.") from error

    model = await transport.call("GET", "/v1/models", None, first_model, signed=False)
    config: dict[str, Any] = {}
    with contextlib.suppress(ServerRefusalError):
        config = await transport.call("GET", "/server_info?config_format=json", None, engine_config, signed=False)
    native = False
    probe = GenerateRequest("probe", np.zeros(1, np.int32), sampling={"top_k": 2, "max_tokens": 1, "temperature": 1.0})
    with contextlib.suppress(ServerRefusalError, SupportCaptureError):
        await StockServer(transport, model, True, config).generate(probe)
        native = True
    logger.warning(
        "%s has no packed endpoint; supports come from its %s. `trl-support-replay vllm-serve` needs a tenth of the "
        "bytes, and tells which weights a sample came from.",
        transport.url,
        f"sampling mask ({_TOKENS})" if native else f"log-probs ({_COMPLETIONS})",
    )
    if not config:
        logger.warning(
            "%s does not tell its engine's settings, so those that break replay (drafts, watermarks, logits "
            "processors) go unnoticed. `trl-support-replay vllm-serve` and VLLM_SERVER_DEV_MODE=1 let it tell them.",
            transport.url,
        )
    return StockServer(transport, model, native, config)


def _read_masked_choice(choice: Mapping[str, Any], request: GenerateRequest) -> Sample:
    mask = choice.get("sampling_mask")
    if mask is None:
        raise SupportCaptureError(f"Request {request.request_id}: the server returned no sampling mask.")
    token_ids = np.asarray(choice["token_ids"], dtype=np.int32)
    logprobs = np.asarray([entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=np.float32)
    try:
        rows = SupportRows.from_ragged(mask[: len(token_ids)])
        rows.validate(sampled_ids=token_ids)
        if len(rows) != len(token_ids) or (rows.sizes == 0).any() or len(logprobs) < len(token_ids):
            raise SupportError(f"{len(mask)} masks and {len(logprobs)} log-probs for {len(token_ids)} tokens")
    except SupportError as error:
        raise SupportCaptureError(f"Request {request.request_id}: {error}") from error
    return _sample(choice, token_ids, logprobs[: len(token_ids)], rows, 0)


def _read_logprobs_choice(choice: Mapping[str, Any], request: GenerateRequest) -> Sample:
    name = f"Request {request.request_id}, sample {choice['index']}"
    token_ids = np.asarray(choice["token_ids"], dtype=np.int32)
    given = choice["logprobs"]
    if given is None:
        raise SupportCaptureError(f"{name}: the server returned no log-probs.")
    if not request.support:
        return _sample(choice, token_ids, np.asarray(given["token_logprobs"], dtype=np.float32), None, 0)
    # The layout of vLLM's flat log-probs: for each token, itself and then the candidates.
    ids: list[int] = []
    values: list[float] = []
    ends = []
    for token, logprob, candidates in zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True):
        ids.append(_token_id(token))
        values.append(logprob)
        for candidate, value in candidates.items():
            ids.append(_token_id(candidate))
            values.append(value if value > _REMOVED else -np.inf)
        ends.append(len(ids))
    flat = _FlatLogprobs(ids, values, [0, *ends[:-1]], ends)
    completion = SimpleNamespace(token_ids=choice["token_ids"], logprobs=flat)
    top_k = normalize_top_k(request.sampling.get("top_k"))
    logprobs, rows, repaired = read_flat_logprobs(completion, top_k, name, trailing=bool(request.sampling.get("stop")))
    return _sample(choice, token_ids, logprobs.astype(np.float32), rows, repaired)


@dataclass(frozen=True)
class _FlatLogprobs:
    token_ids: list[int]
    logprobs: list[float]
    start_indices: list[int]
    end_indices: list[int]

    def __len__(self) -> int:
        return len(self.end_indices)


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _sample(
    choice: Mapping[str, Any], token_ids: np.ndarray, logprobs: np.ndarray, rows: SupportRows | None, repaired: int
) -> Sample:
    if choice["finish_reason"] not in ("stop", "length"):
        raise protocol.MessageError(f"The server ended a request early: {choice['finish_reason']}.")
    return Sample(token_ids, logprobs, rows, None, 0, choice["finish_reason"], repaired, None)
