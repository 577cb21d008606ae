"""An engine that answers at once with samples that can be foretold, behind the real endpoint on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.parts import require
from trl_support_replay.server.endpoint import SupportReplayMiddleware
from trl_support_replay.traces.support import SupportRows

VOCAB, LAYERS, EXPERTS, EXPERTS_PER_TOKEN = 1000, 3, 8, 2


def foretold(prompt_ids, index, max_tokens, top_k, weights):
    """`(token_ids, logprobs, rows)` of sample `index`, as the fake engine with these weights draws it."""
    seed = hashlib.sha256(repr((list(map(int, prompt_ids)), index, max_tokens, top_k, weights)).encode()).digest()
    rng = np.random.default_rng(list(seed))
    length = int(rng.integers(1, max_tokens + 1))
    tokens, logprobs, rows = [], [], []
    for _ in range(length):
        ids = rng.choice(VOCAB, size=int(rng.integers(1, top_k + 1)), replace=False)
        mass = rng.dirichlet(np.ones(len(ids)))
        chosen = int(rng.integers(len(ids)))
        tokens.append(int(ids[chosen]))
        logprobs.append((ids.tolist(), np.log(mass).tolist(), chosen))
        rows.append(np.sort(ids))  # as they travel
    sampled = np.array([values[chosen] for _, values, chosen in logprobs], dtype=np.float32)
    return tokens, sampled, SupportRows.from_ragged(rows), logprobs


def as_config(**values):
    """A dataclass with these values, as vLLM's configurations are."""
    made = dataclasses.make_dataclass("Config", [(name, object, dataclasses.field(default=None)) for name in values])
    return made(**values)


class FakeEngine:
    """What the endpoint uses of vLLM's asynchronous engine. The endpoint around it needs vLLM itself.

    Attributes:
        calls: prompts of the requests that reached it.
        aborted: number of requests that were cancelled while they ran.
        running: number of requests that run now.
        gate: requests finish only while this event is set.
        overlaps: how often weights were loaded while a request ran.
    """

    def __init__(self, vllm_config=(), **config):
        require("vllm")
        self.model_config = SimpleNamespace(
            **{
                "get_vocab_size": lambda: VOCAB,
                "max_model_len": 512,
                "max_logprobs": 64,
                "logprobs_mode": "processed_logprobs",
                "dtype": "torch.float32",
                "return_sampling_mask": False,
                "enable_return_routed_experts": True,
            }
            | config
        )
        self.vllm_config = as_config(model_config=as_config(**config), **dict(vllm_config))
        self.weights = None
        self.calls = []
        self.aborted = self.running = self.overlaps = self.loads = 0
        self.finish_reason = "length"
        self.fail_load = False
        self.gate = threading.Event()
        self.gate.set()

    async def generate(self, prompt, params, request_id):
        self.calls.append(prompt["prompt_token_ids"])
        self.running += 1
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
            yield SimpleNamespace(outputs=[self._completion(prompt, params, i) for i in reversed(range(params.n))])
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def _completion(self, prompt, params, index):
        from vllm.logprobs import FlatLogprobs, Logprob

        prompt_ids = prompt["prompt_token_ids"]
        top_k = params.top_k if params.top_k > 0 else 8
        tokens, sampled, _, entries = foretold(prompt_ids, index, params.max_tokens, top_k, self.weights)
        if params.flat_logprobs:
            logprobs = FlatLogprobs()
            for token, value, (ids, values, _) in zip(tokens, sampled, entries, strict=True):
                order = np.argsort(values)[::-1]
                cut = [i for i in range(VOCAB - 1, VOCAB - 4, -1) if i not in ids]  # what truncation removed
                all_ids = [token, *(ids[i] for i in order), *cut]
                all_values = [float(value), *(values[i] for i in order), *[-np.inf] * len(cut)]
                logprobs.append_fast(all_ids, all_values, iter(range(len(all_ids))), [None] * len(all_ids))
        else:
            logprobs = [{t: Logprob(float(v))} for t, v in zip(tokens, sampled, strict=True)]
        start = params.routed_experts_prompt_start
        length = len(prompt_ids) + len(tokens) - 1
        return SimpleNamespace(
            index=index,
            token_ids=tokens,
            logprobs=logprobs,
            sampling_mask=None,
            routed_experts=routes_of([*prompt_ids, *tokens])[start:length],
            finish_reason=self.finish_reason,
        )

    async def pause_generation(self, mode):
        assert mode == "wait"

    async def resume_generation(self):
        pass

    async def reset_prefix_cache(self):
        return True

    async def collective_rpc(self, method, args):
        assert method == "support_replay_reload"
        self.overlaps += self.running > 0
        await asyncio.sleep(0.02)
        if self.fail_load:
            raise RuntimeError("the disk is gone")
        (files,) = args
        self.loads += 1
        self.weights = files[0].split("/")[-2]


def routes_of(token_ids):
    """`[T, LAYERS, k]`: each token's experts depend on the token and the layer alone."""
    layers = np.arange(LAYERS)[None, :]
    first = (np.asarray(token_ids)[:, None] + layers) % EXPERTS
    return np.stack([first, (first + 1 + layers) % EXPERTS], axis=2).astype(np.uint8)


class HTTPServer:
    """The endpoint over `engine`, beside an ordinary route, on a port of this machine. Can be stopped and restarted."""

    def __init__(self, engine, api_key=None, port=0):
        self.engine = engine
        self.api_key = api_key
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        async def ordinary(request):
            return JSONResponse({"data": [{"id": "fake"}], "body": (await request.body()).decode()})

        app = Starlette(routes=[Route("/v1/models", ordinary, methods=["GET", "POST"])])
        app.add_middleware(SupportReplayMiddleware)
        app.state.engine_client = self.engine
        app.state.args = SimpleNamespace(
            api_key=[self.api_key] if self.api_key else None, served_model_name=None, model="fake"
        )
        self._serve(app)

    def _serve(self, app):
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.005)

    def stop(self):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


class AppServer(HTTPServer):
    """Any ASGI application on a port of this machine."""

    def __init__(self, app):
        self._app = app
        super().__init__(None)

    def start(self):
        self._serve(self._app)


@contextlib.contextmanager
def serving(server):
    try:
        yield server
    finally:
        server.stop()
