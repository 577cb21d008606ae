"""Generation with supports and routes, on the engine of a running vLLM server."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..engine_outputs.errors import SupportCaptureError
from ..engine_outputs.vllm_capture import Capture, built_capture, keep_arrays
from ..settings.built_engine import described, engine_refusals
from ..settings.contract import SamplingSettings, UnreplayableSettingError, check_contract
from ..settings.sampling_table.vllm import REQUEST
from ..wire.protocol import PLAIN_FIELDS, SAMPLING_FIELDS, GenerateRequest, Sample
from .errors import Refusal
from .gate import WeightsGate
from .settings import ServerSettings

_INT64 = np.iinfo(np.int64)
_PLAIN = Capture("sampled")


class RequestRunner:
    """Checks requests against the contract and the server's bounds, and runs them.

    Args:
        engine: vLLM's asynchronous engine client.
        settings: the server's bounds.
        gate: what keeps a reload of the weights away from running requests.
    """

    def __init__(self, engine: Any, settings: ServerSettings, gate: WeightsGate):
        self._engine = engine
        self._settings = settings
        self._gate = gate
        self._config = engine.model_config
        self._capture = built_capture(engine.vllm_config, self._config)
        self._capturing = False
        self._vocab_size = self._config.get_vocab_size()
        self._unreplayable = engine_refusals(engine.vllm_config)
        self._logprobs_mode = str(getattr(self._config.logprobs_mode, "value", self._config.logprobs_mode))

    def describe(self) -> dict[str, Any]:
        """What a client may want to know before it sends requests."""
        import vllm

        return {
            "engine_version": vllm.__version__,
            "capture": self._capture.name,
            "needs_top_k": self._capture.name == "logprobs",
            "dtype": str(self._config.dtype).removeprefix("torch."),
            "vocab_size": self._vocab_size,
            "max_model_len": self._config.max_model_len,
            "max_top_k": self._max_top_k(),
            "logprobs_mode": self._logprobs_mode,
            "unreplayable": described(self._unreplayable),
            "routes": self._has_routes(),
            "max_n": self._settings.max_n,
            "max_tokens": self._settings.max_tokens,
        }

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """The samples of one request, all from one version of the weights.

        Raises:
            Refusal: 400 for a request that breaks the contract or a bound, naming the setting; 409 when the engine
                does not hold the weights that the request asks for; 422 when its answer does not hold what was asked
                for; 503 when the request was aborted.
        """
        settings = self._check(request)
        params = self._sampling_params(request, settings)
        if request.support and not self._capturing:
            await self._open_capture()
        async with self._gate.generating():
            version = self._gate.version
            if self._gate.broken:
                raise Refusal(
                    409, "weights_version", "The last reload failed half-way, so the engine holds no whole weights."
                )
            if request.weights_version is not None and request.weights_version != version:
                raise Refusal(
                    409,
                    "weights_version",
                    f"The engine holds the weights {version}, and {request.weights_version} is asked for.",
                )
            output = await self._run(request, params)
        completions = sorted(output.outputs, key=lambda completion: completion.index)
        if len(completions) != request.n:
            raise Refusal(422, "capture", f"The engine returned {len(completions)} samples of {request.n}.")
        try:
            return [self._sample(request, completion, settings.bound, version) for completion in completions]
        except SupportCaptureError as error:
            raise Refusal(422, "capture", str(error)) from error

    async def _open_capture(self) -> None:
        """Let the engine report supports, before the first request that wants them."""
        if self._capture.name == "worker":
            try:
                await self._engine.collective_rpc("support_replay_capture")
            except Exception as error:  # from another process, it has another type
                raise Refusal(422, "capture", f"Supports cannot be taken in the engine's worker: {error}") from error
        if self._capture.name != "logprobs":
            keep_arrays(self._engine.output_processor)
        self._capturing = True

    async def _run(self, request: GenerateRequest, params: Any) -> Any:
        prompt = {"prompt_token_ids": request.prompt_ids.tolist()}
        output = None
        try:
            async for latest in self._engine.generate(prompt, params, f"support-replay-{request.request_id}"):
                output = latest
        except _request_errors() as error:
            raise Refusal(400, "invalid_request", str(error)) from error
        reasons = {c.finish_reason for c in output.outputs} if output is not None else {None}
        if not reasons <= {"stop", "length"}:
            raise Refusal(503, "aborted", f"The engine ended the request early (finish reasons {reasons}).")
        return output

    def _sample(self, request: GenerateRequest, completion: Any, bound: int, version: str | None) -> Sample:
        name = f"Request {request.request_id}, sample {completion.index}"
        trailing = bool(request.sampling.get("stop"))
        capture = self._capture_of(request.sampling) if request.support else _PLAIN
        logprobs, rows, repaired = capture.read(completion, bound, name, trailing)
        token_ids = np.asarray(completion.token_ids, dtype=np.int32)
        return Sample(
            token_ids=token_ids,
            logprobs=logprobs.astype(np.float32),
            support=rows if request.support else None,
            routes=self._routes(request, completion, name, trailing),
            routes_start=request.routes_start or 0,
            finish_reason=completion.finish_reason,
            repaired=repaired,
            weights_version=version,
        )

    def _routes(self, request: GenerateRequest, completion: Any, name: str, trailing: bool) -> np.ndarray | None:
        if request.routes_start is None:
            return None
        routes = completion.routed_experts
        if routes is None:
            raise SupportCaptureError(f"{name}: the engine returned no routed experts.")
        # The engine may have gone on past a stop string. Too few rows are for the trainer to judge.
        most = len(request.prompt_ids) + len(completion.token_ids) - 1 - request.routes_start
        if len(routes) > most and not trailing:
            raise SupportCaptureError(f"{name}: the engine returned {len(routes)} rows of routed experts for {most}.")
        return routes[:most]

    # ------------------------------------------------------------------------------------------------------ checks

    def _check(self, request: GenerateRequest) -> SamplingSettings:
        bounds = self._settings
        _check_bound("n", request.n, 1, bounds.max_n)
        sampling = dict(request.sampling)
        if request.support or request.routes_start is not None:
            for error in self._unreplayable:
                raise Refusal(400, "unreplayable", str(error), setting=error.setting)
        settings = self._check_contract(sampling) if request.support else SamplingSettings()
        known = SAMPLING_FIELDS if request.support else PLAIN_FIELDS
        for name, value in sampling.items():
            if name not in known:
                raise Refusal(
                    400,
                    "unknown_setting",
                    f"sampling[{name!r}]={value!r} is not known here. Known: {', '.join(sorted(known))}.",
                    setting=name,
                )
            _check_type(name, value, known[name], self._vocab_size)
        if sampling.get("max_tokens") is None:
            raise Refusal(
                400,
                "missing_setting",
                "sampling['max_tokens']=None: a request says how many tokens may be sampled.",
                setting="max_tokens",
            )
        _check_bound("max_tokens", sampling["max_tokens"], 1, bounds.max_tokens)
        length = len(request.prompt_ids) + sampling["max_tokens"]
        if length > self._config.max_model_len:
            raise Refusal(
                400,
                "too_long",
                f"{len(request.prompt_ids)} prompt tokens and max_tokens={sampling['max_tokens']} are {length} tokens; "
                f"the model's context is max_model_len={self._config.max_model_len}.",
                setting="max_tokens",
            )
        low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
        if low < 0 or high >= self._vocab_size:
            raise Refusal(
                400,
                "prompt_ids",
                f"Prompt token id {low if low < 0 else high} is outside the vocabulary of {self._vocab_size}.",
                setting="prompt_ids",
            )
        if request.routes_start is not None:
            self._check_routes(request)
        return settings

    def _check_contract(self, sampling: dict[str, Any]) -> SamplingSettings:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            if name in sampling:
                _check_type(name, sampling[name], SAMPLING_FIELDS[name], self._vocab_size)
        own = {name: sampling.get(name) for name in ("top_p", "top_k", "min_p")}
        args = SimpleNamespace(
            **own,
            temperature=sampling.get("temperature", 1.0),
            repetition_penalty=sampling.get("repetition_penalty", 1.0),
            # The check that follows this one names those that vLLM does not have.
            generation_kwargs={k: v for k, v in sampling.items() if k not in own and k in REQUEST},
            use_vllm=True,
            support_capture=self._capture_of(sampling).name,
        )
        try:
            settings = check_contract(args)
        except UnreplayableSettingError as error:
            raise Refusal(400, "unreplayable", str(error), setting=error.setting) from error
        if not settings.truncates:
            raise Refusal(
                400,
                "not_truncated",
                "Nothing cuts tokens from this request (top_k, top_p and min_p are off, and there is no constraint), "
                "so its support is the whole vocabulary. Ask for it without support.",
                setting="support",
            )
        limit = self._max_top_k()
        if settings.bound > limit:
            raise Refusal(
                400,
                "bound",
                f"top_k={settings.bound} is more than the {limit} that this server records. Start it with a larger "
                "--max-logprobs and TRL_SUPPORT_REPLAY_MAX_TOP_K.",
                setting="top_k",
            )
        return settings

    def _check_routes(self, request: GenerateRequest) -> None:
        if not self._has_routes():
            raise Refusal(
                400,
                "no_routes",
                f"routes_start={request.routes_start}: the server does not record routed experts. Start it with "
                "--enable-return-routed-experts and a mixture-of-experts model.",
                setting="routes_start",
            )
        _check_bound("routes_start", request.routes_start, 0, len(request.prompt_ids))

    def _has_routes(self) -> bool:
        return bool(getattr(self._config, "enable_return_routed_experts", False))

    def _capture_of(self, sampling: Mapping[str, Any]) -> Capture:
        # The engine's own mask names other tokens beside one that a thinking budget fixes.
        fixes = sampling.get("thinking_token_budget") is not None
        return Capture("logprobs") if fixes and self._capture.name == "native" else self._capture

    def _max_top_k(self) -> int:
        limit = self._config.max_logprobs
        bounded = self._capture.name == "logprobs" and limit >= 0
        return min(self._settings.max_top_k, limit) if bounded else self._settings.max_top_k

    def _sampling_params(self, request: GenerateRequest, settings: SamplingSettings) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        kwargs: dict[str, Any] = dict(request.sampling)
        if request.support or kwargs.get("top_k") is None:
            kwargs["top_k"] = settings.bound
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        kwargs |= {"logprobs": 0, **self._capture.any_request_kwargs(kwargs["top_k"], self._config)}
        if request.support:
            kwargs |= self._capture_of(request.sampling).request_kwargs(settings.bound, self._config)
        if request.routes_start:
            kwargs["routed_experts_prompt_start"] = request.routes_start
        # Stop strings are the only reason to turn tokens into text.
        kwargs["detokenize"] = bool(kwargs.get("stop"))
        try:
            if "structured_outputs" in kwargs:
                kwargs["structured_outputs"] = StructuredOutputsParams(**kwargs["structured_outputs"])
            return SamplingParams(n=request.n, output_kind=RequestOutputKind.FINAL_ONLY, **kwargs)
        except _request_errors() as error:
            raise Refusal(400, "invalid_setting", str(error)) from error


def _check_bound(name: str, value: Any, low: int, high: int) -> None:
    if not low <= value <= high:
        raise Refusal(400, "bound", f"{name}={value} is outside {low} to {high}, the bounds here.", setting=name)


def _check_type(name: str, value: Any, kind: str, vocab_size: int) -> None:
    """`kind` is one of "float", "int", "bool", "ids", "strings" and "object"; `None` stands for the default."""
    ok = (
        value is None
        or {
            "float": lambda: isinstance(value, (int, float)) and not isinstance(value, bool),
            "int": lambda: isinstance(value, int) and not isinstance(value, bool) and _INT64.min <= value <= _INT64.max,
            "bool": lambda: isinstance(value, bool),
            "object": lambda: isinstance(value, dict),
            "ids": lambda: isinstance(value, list) and all(type(x) is int and 0 <= x < vocab_size for x in value),
            "strings": lambda: isinstance(value, str) or isinstance(value, list) and all(type(x) is str for x in value),
        }[kind]()
    )
    if not ok:
        raise Refusal(400, "invalid_setting", f"sampling[{name!r}]={value!r} is not of kind {kind}.", setting=name)


def _request_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that is at fault; newer versions have classes of their own for it."""
    from vllm import exceptions

    own = [
        getattr(exceptions, name) for name in ("VLLMClientError", "VLLMValidationError") if hasattr(exceptions, name)
    ]
    return (ValueError, TypeError, *own)
