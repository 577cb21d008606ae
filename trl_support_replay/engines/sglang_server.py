"""Supports from an SGLang server: its `/generate` with `return_sampling_mask`, for a trainer's `rollout_func`.

SGLang (from the release with its pull request 27408 on) returns for each generated token the ids that its sampler
could have drawn and the sampled token's log-prob among them:

    meta_info["output_token_sampling_mask"]      [T] lists of ids, ragged
    meta_info["output_token_sampling_logprobs"]  [T]

The mask is the sampler's own, so it is exact. The server wants a finite top-k with it, and ends a request whose support
is larger than its `--sampling-mask-max-tokens`. A release that tells this bound in `/server_info` is sent a top-k below
it when the trainer sets none, so top-p and min-p may be used alone; with another release, top-k has to be set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..client.pool import ServerPool, new_request_id
from ..client.servers import check_server
from ..client.transport import Retry, ServerRefusalError, Transport
from ..client.weights import VersionedWeights
from ..engine_outputs.errors import SupportCaptureError
from ..parallel.processes import alone
from ..settings.built_engine import described
from ..settings.contract import SamplingSettings, UnreplayableSettingError, judge, normalize_top_k
from ..settings.sampling_table.sglang import REQUEST
from ..traces.rollout_keys import ROLLOUT_KEY
from ..traces.support import SupportError, SupportRows
from ..wire.protocol import GenerateRequest, MessageError, Sample
from .weight_sync import on_main, versions_of_run

_GENERATE = "/generate"
_INFO = "/server_info"
_OLD_INFO = "/get_server_info"
_UPDATE = "/update_weights_from_disk"
# Names of ours that SGLang calls otherwise.
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
# Settings of a server with which it does not draw one token after another from the recorded supports.
_ALGORITHMS = {
    "speculative_algorithm": "it is not established that accepted draft tokens are drawn from the recorded support",
    "dllm_algorithm": "a diffusion model does not draw its tokens one after another",
}
_OWNED = ("temperature", "top_p", "top_k", "min_p")
_MAX_N = 256


class SGLangServer:
    """One SGLang server. See `trl_support_replay.client.servers.Server` for attributes and methods.

    Args:
        transport: connections to it.
        weights_dir: the folder of weights, as the server sees it; `None` when it loads none.
        facts: what its `/server_info` tells.
    """

    def __init__(self, transport: Transport, weights_dir: str | None, facts: Mapping[str, Any]):
        self.url = transport.url
        self.capture = "native"
        self.info: dict[str, Any] = {
            "model": facts.get("model_path"),
            "weights_version": facts.get("weight_version"),
            "dtype": None,
            "engine_version": facts.get("version"),
            "logprobs_mode": None,
            "unreplayable": _unreplayable(facts),
            "max_top_k": facts.get("sampling_mask_max_tokens"),
            "needs_top_k": facts.get("sampling_mask_max_tokens") is None,
            "max_n": _MAX_N,
            "weight_reload": weights_dir is not None,
            "routes": False,
        }
        self._transport = transport
        self._weights_dir = weights_dir

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """The samples of one request.

        Raises:
            UnreplayableSettingError: for sampling parameters under which the mask is not the whole story, or without a
                top_k that the server needs.
            SupportCaptureError: when the answer lacks the mask, or the mask does not fit the tokens.
        """
        sampling = {_NAMES.get(name, name): value for name, value in request.sampling.items() if value is not None}
        top_k = normalize_top_k(sampling.get("top_k"))
        if request.support:
            _check_sampling(sampling)
            check_server(self, SamplingSettings(top_k=top_k, top_p=sampling.get("top_p", 1.0)))
            top_k = top_k or self._bound()
        body = {
            "rid": request.request_id,
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": {**sampling, "top_k": top_k or -1, "n": request.n},
            # Without a mask the log-probs are those of the whole vocabulary.
            "return_logprob": not request.support,
            "return_sampling_mask": request.support,
        }
        return await self._transport.call(
            "POST", _GENERATE, msgspec.json.encode(body), lambda answer: _read_answer(answer, request), signed=False
        )

    def _bound(self) -> int:
        """The top_k that stands for none: an eighth below the server's bound, for candidates that tie with the last."""
        largest: int = self.info["max_top_k"]
        return max(largest - largest // 8, 1)

    async def set_weights(self, version: str, reload: bool) -> None:
        """Let the server load a version of the weights from the shared folder."""
        if not reload or self._weights_dir is None:
            raise RuntimeError(f"{self.url} was given no folder of weights, so it cannot load {version}.")
        body = {"model_path": str(Path(self._weights_dir) / version), "weight_version": version, "flush_cache": True}
        answer = await self._transport.call("POST", _UPDATE, msgspec.json.encode(body), _read_object, signed=False)
        if answer.get("success") is not True:
            raise RuntimeError(f"{self.url} did not load the weights {version}: {answer.get('message')}")


async def connect_sglang(transport: Transport, weights_dir: str | None = None) -> SGLangServer:
    """The SGLang server behind `transport`, once it is up."""
    try:
        facts = await transport.call("GET", _INFO, None, _read_object, signed=False)
    except ServerRefusalError as refusal:
        if refusal.status != 404:
            raise
        facts = await transport.call("GET", _OLD_INFO, None, _read_object, signed=False)
    return SGLangServer(transport, weights_dir, facts)


class SGLangRollout:
    """A `rollout_func` for `SupportReplayGRPOTrainer` that samples with SGLang servers.

        rollout = SGLangRollout(["http://localhost:30000"], "/shared/weights")
        trainer = SupportReplayGRPOTrainer(..., rollout_func=rollout)

    The trainer's `temperature`, `top_p`, `top_k`, `min_p` and `max_completion_length` apply; `use_vllm` stays off. Each
    process asks for its own prompts.

    Args:
        urls: base URLs of the servers.
        weights_dir: folder that trainer and servers share under the same path. Before the first batch of each
            optimizer step the policy's weights are written there and loaded by the servers. `None` leaves the weights
            of the servers alone, for example for a single batch of rollouts.
        sampling_params: further parameters of SGLang, for example `{"stop_token_ids": [2]}`.
        api_key: sent as a bearer token.
        retry, request_timeout: see `Transport`.

    Raises:
        UnreplayableSettingError: for sampling_params that the trainer's configuration sets, or that it does not repeat.
    """

    def __init__(
        self,
        urls: Sequence[str],
        weights_dir: str | None = None,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        retry: Retry = Retry(),  # noqa: B008 - frozen
        request_timeout: float = 1800.0,
    ):
        _check_further(sampling_params or {})
        self._sampling_params = dict(sampling_params or {})
        self._weights_dir = weights_dir

        async def connect(transport: Transport) -> SGLangServer:
            return await connect_sglang(transport, weights_dir)

        self._pool = ServerPool(urls, api_key=api_key, retry=retry, request_timeout=request_timeout, connect=connect)
        self._weights: VersionedWeights | None = None
        self._loaded_at: tuple[Any, int] | None = None  # training state and step of the weights in the servers
        self._num_syncs = 0
        self._version: str | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Completions of `prompts`, in the form that TRL expects from a `rollout_func`."""
        # `train()` begins anew with a state of its own, whose steps are others.
        state, step = self._loaded_at or (None, None)
        held = step == trainer.state.global_step and state is trainer.state
        if self._weights_dir is not None and not held:
            self._sync(trainer)
        return self._sample(prompts, trainer)

    @alone()
    def _sample(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self._pool.first_server = trainer.accelerator.process_index
        support = trainer.replays_support and trainer.model.training
        if trainer.model.training and not support:
            _refuse_narrowing(self._sampling_params)
        prompt_ids = [_tokenize(prompt, trainer) for prompt in prompts]
        requests = [
            GenerateRequest(
                request_id=new_request_id(),
                prompt_ids=np.asarray(ids, dtype=np.int32),
                sampling=self._sampling(trainer),
                support=support,
                weights_version=self._version,
            )
            for ids in prompt_ids
        ]
        samples = [sample for (sample,) in self._pool.generate(requests)]
        output: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.token_ids.tolist() for sample in samples],
            "logprobs": [sample.logprobs.tolist() for sample in samples],
        }
        if support:
            output[ROLLOUT_KEY] = [sample.support for sample in samples]
        return output

    def check_settings(self, settings: SamplingSettings) -> None:
        """What the trainer asks at its construction: whether the servers record supports under these settings.

        Raises:
            UnreplayableSettingError: naming the setting and the server.
        """
        for server in self._pool.servers:
            check_server(server, settings)

    def _sampling(self, trainer: Any) -> dict[str, Any]:
        if trainer.args.generation_kwargs:
            raise UnreplayableSettingError(
                "generation_kwargs",
                trainer.args.generation_kwargs,
                "they are for the trainer's own generation and do not reach SGLang",
                "Give them to SGLangRollout as sampling_params, under SGLang's names",
            )
        settings = trainer.sampling_settings
        return {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "min_p": settings.min_p,
            "max_tokens": trainer.args.max_completion_length,
            **self._sampling_params,
        }

    def _sync(self, trainer: Any) -> None:
        from accelerate.utils import is_peft_model
        from transformers.core_model_loading import revert_weight_conversion

        accelerator = trainer.accelerator
        if is_peft_model(accelerator.unwrap_model(trainer.model)):
            raise ValueError(
                f"weights_dir={str(self._weights_dir)!r} with a PEFT model: SGLangRollout does not merge adapters. Set "
                "weights_dir=None and sync the weights yourself."
            )
        if self._weights is None:
            self._weights = versions_of_run(accelerator, self._weights_dir or "")
        weights = self._weights
        version = weights.name(self._num_syncs)
        self._num_syncs += 1
        # Gathers, so all processes take part; under ZeRO-3 only the engine around the model can. A checkpoint has one
        # tensor per expert, unlike the model.
        state = accelerator.get_state_dict(trainer.model_wrapped)

        def write_and_load() -> None:
            tensors = revert_weight_conversion(accelerator.unwrap_model(trainer.model), state)
            weights.write(version, tensors.items())
            self._pool.set_weights(version, reload=True)
            weights.remove_before(version)

        on_main(accelerator, write_and_load)
        self._pool.forget_prefixes()
        self._version, self._loaded_at = version, (trainer.state, trainer.state.global_step)


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    for error in judge(sampling, REQUEST, "sampling_params[{!r}]"):
        raise error


def _refuse_narrowing(sampling: Mapping[str, Any]) -> None:
    """Refuse what cuts tokens, for a trainer whose own settings cut none, so that it records no supports."""
    for name, value in sampling.items():
        if REQUEST[name].narrows(value):
            raise UnreplayableSettingError(
                f"sampling_params[{name!r}]",
                value,
                "it removes tokens, and the trainer scores over the whole vocabulary, since none of its own settings "
                "cuts any",
                "Leave it out, or set the trainer's top_k, top_p or min_p as well",
            )


def _unreplayable(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Settings of the server that change what its requests draw from."""
    refused = []
    for setting, reason in _ALGORITHMS.items():
        if facts.get(setting) is not None:
            refused.append(UnreplayableSettingError(setting, facts[setting], reason, "Start the server without"))
    preferred = facts.get("preferred_sampling_params") or {}
    try:
        _check_sampling(msgspec.json.decode(preferred) if isinstance(preferred, str) else preferred)
    except (UnreplayableSettingError, msgspec.DecodeError, UnicodeDecodeError, AttributeError) as error:
        reason = f"the server adds it to every request, and {getattr(error, 'reason', error)}"
        remedy = "Start the server without"
        refused.append(UnreplayableSettingError("preferred_sampling_params", preferred, reason, remedy))
    return described(refused)


def _check_further(sampling_params: Mapping[str, Any]) -> None:
    for name in _OWNED:
        if name in sampling_params:
            raise UnreplayableSettingError(
                f"sampling_params[{name!r}]",
                sampling_params[name],
                f"{name} comes from the trainer's configuration, and the trainer scores with that",
                f"Set {name} there and leave it out here",
            )
    _check_sampling(sampling_params)


def _tokenize(prompt: Any, trainer: Any) -> list[int]:
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(trainer.args.chat_template_kwargs or {}),
        )["input_ids"]
    )


def _read_object(answer: bytes) -> dict[str, Any]:
    try:
        return dict(msgspec.json.decode(answer))
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise MessageError(f"Not a JSON object: {error}.") from None


def _read_answer(answer: bytes, request: GenerateRequest) -> list[Sample]:
    try:
        outputs = msgspec.json.decode(answer)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        if len(outputs) != request.n:
            raise MessageError(f"{len(outputs)} outputs for {request.n} samples.")
        return [_read_output(output, request, i) for i, output in enumerate(outputs)]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise MessageError(f"Not an answer of {_GENERATE}: {type(error).__name__}: {error}.") from error


def _read_output(output: Mapping[str, Any], request: GenerateRequest, index: int) -> Sample:
    where = f"SGLang request {request.request_id}, sample {index}"
    meta = output["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise MessageError(f"The server ended the request early: {meta['finish_reason']}.")
    version = meta.get("weight_version")
    if request.weights_version is not None and version != request.weights_version:
        raise RuntimeError(
            f"{where} comes from the weights {version}, and {request.weights_version} is the policy's. The server was "
            "restarted or synchronised by another run."
        )
    token_ids = np.asarray(output["output_ids"], dtype=np.int32)
    rows = None
    if request.support:
        rows, logprobs = _read_mask(meta, token_ids, where)
    else:
        logprobs = np.asarray([entry[0] for entry in meta["output_token_logprobs"]], dtype=np.float32)
    if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
        raise SupportCaptureError(f"{where}: {len(logprobs)} log-probs, not all finite, for {len(token_ids)} tokens.")
    return Sample(token_ids, logprobs, rows, None, 0, reason, 0, version)


def _read_mask(meta: Mapping[str, Any], token_ids: np.ndarray, where: str) -> tuple[SupportRows, np.ndarray]:
    mask, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if mask is None or logprobs is None:
        raise SupportCaptureError(
            f"{where}: meta_info has no output_token_sampling_mask and output_token_sampling_logprobs. The server must "
            "know return_sampling_mask, and a router in front must pass it on."
        )
    if meta.get("output_token_sampling_mask_truncated"):
        raise SupportCaptureError(f"{where}: a support was cut short. Raise the server's --sampling-mask-max-tokens.")
    if len(mask) != len(token_ids):
        raise SupportCaptureError(f"{where}: {len(mask)} masks for {len(token_ids)} tokens.")
    try:
        rows = SupportRows.from_ragged(mask)
        rows.validate(sampled_ids=token_ids)
    except SupportError as error:
        raise SupportCaptureError(f"{where}: {error}") from error
    if (rows.sizes == 0).any():
        raise SupportCaptureError(f"{where}: the mask of token {int(np.argmin(rows.sizes))} is empty.")
    return rows, np.asarray(logprobs, dtype=np.float32)
