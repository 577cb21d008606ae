"""TRL's `vllm_mode="server"` with supports recorded: generation and weight sync over the packed endpoint."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from ..client.pool import ServerPool, new_request_id
from ..client.prefixes import PrefixIndex
from ..client.servers import check_server, connect_vllm
from ..client.transport import Retry
from ..engine_outputs.vllm_routes import read_routed_experts
from ..parallel.processes import agreeing, alone
from ..rollouts.recorder import SupportRecorder
from ..routing import RouterReplay
from ..settings.contract import SamplingSettings
from ..traces.routes import RoutedExperts
from ..traces.support import SupportRows
from ..wire.protocol import GenerateRequest, Sample
from .vllm_engine import CheckpointWeights
from .weight_sync import on_main, versions_of_run

logger = logging.getLogger(__name__)

# Trajectories whose routes are kept for a further turn; more than any generation batch has.
_REMEMBERED = 65536
_LOCAL_HOSTS = frozenset({"0.0.0.0", "127.0.0.1", "localhost", "::1"})


class WeightsMixError(RuntimeError):
    """Samples of one generation batch come from different versions of the weights."""


class SupportVLLMServerGeneration(CheckpointWeights):
    """TRL's client of a vLLM server that also records the support of every sampled token.

    Each process asks the servers for its own prompts and receives nothing else, so nothing passes between processes
    for a generation, and processes may generate different numbers of times (as they do when tools are called).

    Args:
        settings: the sampling settings, already checked by the contract.
        recorder: returns the recorder of the current generation batch, or `None` when nothing is to be recorded
            (evaluation).
        routers: returns the policy's `RouterReplay`, to record which experts each token was routed to; `None` when
            routes are not recorded.
        routes_missing: `"error"` or `"live"`, for requests with fewer routes than tokens.
        support_capture: `"auto"`, or what the server must offer: `"worker"`, `"native"` or `"logprobs"`.
        policy_step: returns the policy's optimizer step, to know which weights the servers hold.
        server_urls: base URLs of several servers; default: the one of TRL's own settings.
        weight_sync: `"nccl"` (TRL's) or `"filesystem"`.
        weight_sync_dir: the folder shared with the servers, for `"filesystem"`.
        request_timeout: seconds that one request may take.

    Attributes:
        pool: the servers. A custom rollout may ask them directly and return what it gets under `ROLLOUT_KEY`. Its
            requests have the trainer's temperature and `weights_version`; their top_k may be their own.
        weights_version: name of the weights that the servers were last given; `None` before.
        loaded_step: optimizer step of the weights last loaded into the servers; `None` before the first sync.
        engine_dtype: the servers' data type; `None` when they do not say.
    """

    def __init__(
        self,
        *args: Any,
        settings: SamplingSettings,
        recorder: Callable[[], SupportRecorder | None],
        routers: Callable[[], RouterReplay] | None = None,
        routes_missing: str = "error",
        support_capture: str = "auto",
        policy_step: Callable[[], int] = lambda: 0,
        server_urls: Sequence[str] | None = None,
        weight_sync: str = "nccl",
        weight_sync_dir: str | None = None,
        request_timeout: float = 1800.0,
        **kwargs: Any,
    ):
        self._settings = settings
        self._recorder = recorder
        self._routers = routers
        self._routes_missing = routes_missing
        # Routes of this step's trajectories, so that a further turn transfers only what is new.
        self._known_routes: PrefixIndex[RoutedExperts] = PrefixIndex(_REMEMBERED)
        self._support_capture = support_capture
        self._policy_step = policy_step
        self._server_urls = server_urls
        self._weight_sync = weight_sync
        self._weight_sync_dir = weight_sync_dir
        self._request_timeout = request_timeout
        self.loaded_step: int | None = None
        self._num_syncs = 0
        self.weights_version: str | None = None
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        urls = self._urls()
        if self._weight_sync == "nccl":
            if self.accelerator.device.type == "cpu":
                raise ValueError(
                    "weight_sync='nccl' on a CPU: NCCL connects GPUs. Set weight_sync='filesystem' and "
                    "weight_sync_dir, and start the servers with --weights-dir."
                )
            super()._init_vllm()
        with agreeing():  # a server may be out of reach of one process
            self._connect(urls)
        if self._weight_sync == "filesystem":
            self.vllm_client: Any = _ServerFacts(self._same("logprobs_mode"))
            self._weights = versions_of_run(self.accelerator, self._weight_sync_dir or "")
        self.accelerator.wait_for_everyone()
        logger.info(
            "Supports come from %s.", ", ".join(f"{server.url} ({server.capture})" for server in self.pool.servers)
        )

    def _connect(self, urls: list[str]) -> None:
        """Connect this process with the servers, and refuse those that do not offer what is needed."""
        self.pool = ServerPool(
            urls,
            # As on the server, the environment keeps the key out of arguments and logs.
            api_key=os.environ.get("VLLM_API_KEY"),
            retry=Retry(give_up_after=self.server_timeout),
            request_timeout=self._request_timeout,
            # What came over NCCL is in no folder, also where the server has one.
            connect=functools.partial(connect_vllm, from_folder=self._weight_sync == "filesystem"),
            temperature=self.temperature,
        )
        self.pool.first_server = self.accelerator.process_index
        self.engine_dtype: str | None = self._same("dtype")
        self._max_n = min(server.info["max_n"] for server in self.pool.servers)
        for server in self.pool.servers:
            check_server(server, self._settings)
            if self._support_capture not in ("auto", server.capture):
                raise ValueError(
                    f"support_capture={self._support_capture!r}, but {server.url} reports supports by its "
                    f"{server.capture!r} capture. Set support_capture='auto', or start the server accordingly."
                )
            if self._routers is not None and not server.info["routes"]:
                raise ValueError(
                    f"routed_experts_replay=True, but {server.url} records no routes. Start it with "
                    "`trl-support-replay vllm-serve ... --enable-return-routed-experts`."
                )
            if self._weight_sync == "filesystem" and not server.info["weight_reload"]:
                raise ValueError(
                    f"weight_sync='filesystem', but {server.url} reloads no weights. Start it with "
                    "`trl-support-replay vllm-serve --weights-dir DIR`, DIR being the folder of weight_sync_dir."
                )

    def _urls(self) -> list[str]:
        own = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        urls = list(self._server_urls or [own])
        # TRL reaches servers from its main process only, so a local address means that process's machine.
        if self.accelerator.process_index != self.accelerator.local_process_index:
            urls = [_seen_from_other_nodes(url, os.environ.get("MASTER_ADDR")) for url in urls]
        return urls

    def _same(self, fact: str) -> Any:
        found = {server.url: server.info[fact] for server in self.pool.servers}
        if len(set(found.values())) > 1:
            raise ValueError(f"The servers differ in {fact}: {found}. Start them alike.")
        return next(iter(found.values()))

    # ------------------------------------------------------------------------------------------------- generation

    @alone()
    def generate(
        self,
        prompts: list[list[int]],
        images: list[list | None] | None,
        num_generations: int,
        profiler: Any = None,
    ) -> tuple:
        """Generate one completion for each prompt; arguments and results as in TRL."""
        if images is not None and any(images):
            raise ValueError("Images do not travel over the packed endpoint. Set vllm_mode='colocate' for this model.")
        recorder = self._recorder()
        routers = self._routers() if self._routers is not None and recorder is not None else None
        requests = [
            self._request(prompt, count, recording=recorder is not None)
            for prompt, count in _runs(prompts, self._max_n if num_generations > 1 else 1)
        ]
        with profiler or nullcontext():
            groups = self.pool.generate(requests)
        samples = [sample for group in groups for sample in group]
        self._refuse_mix(samples)
        completion_ids = [sample.token_ids.tolist() for sample in samples]
        logprobs = [sample.logprobs.tolist() for sample in samples]
        if recorder is not None:
            logprobs = []
            for request, group in zip(requests, groups, strict=True):
                for sample in group:
                    routes = None if routers is None else self._routes(request, sample, routers)
                    # Without truncation a log-prob is over the vocabulary, and a support says no more than the token.
                    rows = (
                        SupportRows.from_ragged(sample.token_ids[:, None]) if sample.support is None else sample.support
                    )
                    ids = sample.token_ids.tolist()
                    logprobs.append(
                        recorder.add(ids, sample.logprobs, rows, sample.repaired, routes, request.prompt_ids)
                    )
        return (
            prompts,
            completion_ids,
            [[[value] for value in values] for values in logprobs],
            [[[token] for token in ids] for ids in completion_ids],
        )

    def _request(self, prompt: list[int], count: int, recording: bool) -> GenerateRequest:
        routes_start = None
        if recording and self._routers is not None:
            known = self._known_routes.longest(prompt)
            routes_start = 0 if known is None else known.captured_prefix
        return GenerateRequest(
            request_id=new_request_id(),
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            n=count,
            sampling=self._sampling(),
            support=recording and self._settings.truncates,
            routes_start=routes_start,
            weights_version=self.weights_version,
        )

    def _routes(self, request: GenerateRequest, sample: Sample, routers: RouterReplay) -> RoutedExperts:
        """Routes of the request's prompt and the sample: those known from earlier turns, then those it brought."""
        start = request.routes_start or 0
        routes = read_routed_experts(
            SimpleNamespace(prompt_token_ids=request.prompt_ids),
            SimpleNamespace(token_ids=sample.token_ids, routed_experts=sample.routes),
            layers=routers.layers,
            num_experts=routers.num_experts,
            top_k=routers.top_k,
            request=f"Request {request.request_id}",
            prompt_start=start,
            missing=self._routes_missing,
        )
        if start > 0:
            known = self._known_routes.longest(request.prompt_ids)
            assert known is not None
            routes = RoutedExperts.concatenate([known[:start], routes[start:]])
        self._known_routes.put(np.concatenate([request.prompt_ids, sample.token_ids]), routes)
        return routes

    def _sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self._settings.bound,
            "min_p": 0.0 if self.min_p is None else self.min_p,
            "max_tokens": self.max_completion_length,
        }
        if self.repetition_penalty != 1.0:
            sampling["repetition_penalty"] = self.repetition_penalty
        sampling |= self.generation_kwargs | {"top_k": self._settings.bound}
        if self.structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return sampling

    def _refuse_mix(self, samples: Sequence[Sample]) -> None:
        versions = {sample.weights_version for sample in samples}
        if len(versions) > 1 or (self.weights_version is not None and versions - {self.weights_version}):
            raise WeightsMixError(
                f"The samples of one batch come from the weights {sorted(map(str, versions))}; the policy's are "
                f"{self.weights_version}. A server was restarted or synchronised by another run."
            )

    # ------------------------------------------------------------------------------------------------ weight sync

    def sync_weights(self) -> None:
        self._num_syncs += 1
        if self._weight_sync == "filesystem":
            self._sync_over_filesystem()
        else:
            super().sync_weights()
            self._label_weights()
        self.pool.forget_prefixes()
        self._known_routes.clear()
        self.loaded_step = self._policy_step()

    def _sync_over_filesystem(self) -> None:
        version = self._weights.name(self._num_syncs)
        # Gathering a parameter takes all processes, so all walk through them to the end, whatever happens here.
        parameters = self._iter_named_params()

        def write_and_load() -> None:
            try:
                self._weights.write(version, parameters)
            finally:
                for _ in parameters:
                    pass
            self.pool.set_weights(version, reload=True)
            self._weights.remove_before(version)

        if not self.accelerator.is_main_process:
            for _ in parameters:
                pass
        on_main(self.accelerator, write_and_load)
        self.weights_version = version

    def _label_weights(self) -> None:
        version = f"nccl-{self._num_syncs:06d}"
        on_main(self.accelerator, lambda: self.pool.set_weights(version, reload=False))
        self.weights_version = version


class _ServerFacts:
    """The part of TRL's client that its trainer asks once, at construction."""

    def __init__(self, logprobs_mode: str):
        self._logprobs_mode = logprobs_mode

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": self._logprobs_mode}}


def _runs(prompts: Sequence[list[int]], longest: int) -> Iterator[tuple[list[int], int]]:
    """Neighbouring equal prompts as `(prompt, count)`, at most `longest` at a time."""
    start = 0
    for stop in range(1, len(prompts) + 1):
        if stop == len(prompts) or prompts[stop] != prompts[start] or stop - start == longest:
            yield prompts[start], stop - start
            start = stop


def _seen_from_other_nodes(url: str, main_address: str | None) -> str:
    parts = urlsplit(url)
    if parts.hostname not in _LOCAL_HOSTS or not main_address:
        return url
    userinfo, at, _ = parts.netloc.rpartition("@")
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit(parts._replace(netloc=f"{userinfo}{at}{main_address}{port}"))
