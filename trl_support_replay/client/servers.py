"""One class per kind of vLLM server: what each can be asked for, with the same two methods."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from ..settings.contract import SamplingSettings, UnreplayableSettingError
from ..wire import protocol
from ..wire.protocol import GenerateRequest, Sample
from .transport import ServerRefusalError, Transport

# A server that loses its weights again and again is not merely being restarted.
_MAX_RELOADS = 3
# What the endpoint says of itself beside its version, and what another program at the same address does not.
_FACTS = ("model", "capture", "dtype", "logprobs_mode", "max_n", "weight_reload", "routes")
_NOT_OURS = f"What answers at {protocol.INFO} is no packed endpoint."


class Server(Protocol):
    """A server that generates.

    Attributes:
        url: its base URL.
        capture: `"worker"`, `"native"` or `"logprobs"`: how it reports supports.
        info: what it says of itself: at least `dtype` and `logprobs_mode` (`None` when it does not say), `max_n`,
            `unreplayable` (settings of its engine that break replay, each with value, reason and remedy),
            `weight_reload` (can it load weights from a folder?) and `routes` (does it record routed experts?). Further
            `max_top_k` (candidates that it records for each token) and `needs_top_k` (does it record supports only with
            a top_k?), where there are such bounds.
    """

    url: str
    capture: str
    info: dict[str, Any]

    async def generate(self, request: GenerateRequest) -> list[Sample]: ...

    async def set_weights(self, version: str, reload: bool) -> None: ...


class ReplayServer:
    """A server with the packed endpoint.

    Args:
        transport: connections to it.
        info: what the endpoint says of itself.
        from_folder: whether the versions that requests ask for are in the shared folder.

    Attributes: see `Server`.
    """

    def __init__(self, transport: Transport, info: dict[str, Any], from_folder: bool = True):
        self.url = transport.url
        self.info = info
        self._reloads = from_folder and info["weight_reload"]
        self.capture: str = info["capture"]
        self._transport = transport

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """The samples of one request.

        A server that was restarted holds its first weights again. When those that are asked for are in the shared
        folder, it is told to load them, and the request is sent again.
        """
        body = protocol.encode_request(request)
        for _ in range(_MAX_RELOADS):
            try:
                return await self._generate(request, body)
            except ServerRefusalError as refusal:
                # Without a version, any whole weights would do; the server holds none, and which to load is not known.
                if refusal.code != "weights_version" or not self._reloads or request.weights_version is None:
                    raise
                await self.set_weights(request.weights_version, reload=True)
        return await self._generate(request, body)

    async def _generate(self, request: GenerateRequest, body: bytes) -> list[Sample]:
        return await self._transport.call(
            "POST", protocol.GENERATE, body, lambda answer: protocol.decode_samples(answer, request)
        )

    async def set_weights(self, version: str, reload: bool) -> None:
        """Let the server load a version from the shared folder, or (`reload=False`) name the weights that it has."""
        path = protocol.RELOAD if reload else protocol.LABEL
        held = await self._transport.call("POST", path, protocol.encode_version(version), protocol.decode_version)
        if held != version:
            raise RuntimeError(f"{self.url} answers that it holds the weights {held} instead of {version}.")


def check_server(server: Server, settings: SamplingSettings) -> None:
    """Refuse a server that samples in a way that cannot be replayed, or cannot record supports under `settings`.

    Raises:
        UnreplayableSettingError: naming the setting, its value and the server.
    """
    for found in server.info["unreplayable"]:
        setting = f"{server.url}: {found['setting']}"
        raise UnreplayableSettingError(setting, found["value"], found["reason"], found["remedy"])
    limit = server.info.get("max_top_k")
    if limit is not None and settings.bound > limit:
        reason = f"{server.url} records at most {limit} candidates for each token"
        remedy = "Lower it, or start the server with a larger --max-logprobs (SGLang: --sampling-mask-max-tokens)"
        raise UnreplayableSettingError("top_k", settings.bound, reason, remedy)
    if server.info.get("needs_top_k") and settings.truncates and settings.bound == 0:
        reason = f"{server.url} records supports only for a finite top_k, and does not tell how large one may be"
        remedy = "Set top_k (for example top_k=1000, which cuts little that top_p or min_p would keep)"
        raise UnreplayableSettingError("top_k", 0, reason, remedy)


def read_info(body: bytes) -> dict[str, Any]:
    """What the endpoint says of itself.

    Raises:
        MessageError: for a body that is not a description of a server.
        RuntimeError: for another version of the protocol.
    """
    try:
        info = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise protocol.MessageError(f"{_NOT_OURS} Its description is not JSON: {error}.") from None
    if not isinstance(info, dict) or not isinstance(info.get("version"), list):
        raise protocol.MessageError(f"{_NOT_OURS} It describes itself as {body[:200]!r}.")
    try:
        protocol.check_version(tuple(info["version"]))
    except protocol.MessageError as error:
        raise RuntimeError(str(error)) from error
    missing = [name for name in _FACTS if name not in info]
    if missing:
        raise protocol.MessageError(f"{_NOT_OURS} Its description lacks {', '.join(missing)}.")
    return info


async def connect_vllm(transport: Transport, from_folder: bool = True) -> Server:
    """The server behind `transport`, once it is up.

    Args:
        transport: connections to it.
        from_folder: see `ReplayServer`.

    Raises:
        ServerUnreachableError: when it does not come up.
        ServerRefusalError: when it does not let us in.
        RuntimeError: when it has no packed endpoint, or one of another version.
    """
    try:
        info = await transport.call("GET", protocol.INFO, None, read_info, signed=False)
    except ServerRefusalError as refusal:
        if refusal.status != 404:
            raise
        raise RuntimeError(
            f"{transport.url} has no {protocol.INFO}, so it cannot record supports. Start it with `trl-support-replay "
            "vllm-serve`, or with `vllm serve ... --middleware "
            "trl_support_replay.server.endpoint.SupportReplayMiddleware`; an earlier release of trl-support-replay has "
            "to be updated."
        ) from refusal
    return ReplayServer(transport, info, from_folder)
