"""How many candidates servers are asked for, and what is counted when those do not show all of a tie."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.parts import require
from trl_support_replay.client.pool import new_request_id
from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.engine_outputs.vllm_outputs import num_candidates
from trl_support_replay.engines.generators import CaptureRequest
from trl_support_replay.engines.server_generators import ServerGenerator
from trl_support_replay.settings.contract import SamplingSettings
from trl_support_replay.wire.protocol import GenerateRequest

from .fakes import AppServer, FakeEngine, HTTPServer, serving

require("vllm")
from vllm.logprobs import FlatLogprobs  # noqa: E402


class TyingEngine(FakeEngine):
    """All of `count` tokens tie, and the list of candidates may end before the sampled one.

    Attributes:
        asked: number of candidates that each request asked for.
    """

    def __init__(self, count=0, **config):
        super().__init__(**config)
        self.count, self.asked = count, []

    def _completion(self, prompt, params, index):
        self.asked.append(params.logprobs)
        completion = super()._completion(prompt, params, index)
        if self.count:
            value = -math.log(self.count)
            ids = [self.count - 1, *range(params.logprobs)]  # the last of the tie was sampled
            completion.token_ids, completion.logprobs = ids[:1], FlatLogprobs()
            completion.logprobs.append_fast(ids, [value] * len(ids), iter(range(len(ids))), [None] * len(ids))
            completion.routed_experts = None
        return completion


def request(top_k=8, **kwargs):
    sampling = {"temperature": 1.0, "top_k": top_k, "max_tokens": 4}
    return GenerateRequest(new_request_id(), np.array([5, 6, 7], np.int32), sampling=sampling, **kwargs)


@pytest.mark.parametrize(
    ("dtype", "limit", "wanted"),
    [
        ("torch.float32", 64, num_candidates(8, "float32")),
        ("torch.bfloat16", 64, num_candidates(8, "bfloat16")),
        ("torch.bfloat16", -1, num_candidates(8, "bfloat16")),
        ("torch.bfloat16", 20, 20),
    ],
)
def test_the_endpoint_asks_for_what_its_engine_needs(pool_of, dtype, limit, wanted):
    engine = TyingEngine(dtype=dtype, max_logprobs=limit)
    with serving(HTTPServer(engine)) as server:
        pool_of(server.url).generate([request()])
    assert engine.asked == [wanted]


def test_repaired_supports_are_counted_all_the_way(pool_of):
    wanted = num_candidates(8, "float32")
    engine = TyingEngine(count=wanted + 1)
    with serving(HTTPServer(engine)) as server:
        ((sample,),) = pool_of(server.url).generate([request()])
        generator = ServerGenerator(
            "vllm-server", [server.url], CaptureRequest(SamplingSettings(top_k=8), 2, max_tokens=4, seed=0)
        )
        generator.generate([[5, 6, 7]], 0)
    assert sample.repaired == 1 and sorted(sample.support[0]) == list(range(wanted + 1))
    assert generator.repaired == 2


def test_a_capture_from_a_server_that_is_given_other_weights_stops(pool_of):
    with serving(HTTPServer(FakeEngine())) as server:
        asked = CaptureRequest(SamplingSettings(top_k=8), 1, max_tokens=4, seed=0)
        generator = ServerGenerator("vllm-server", [server.url], asked)
        generator.generate([[5, 6, 7]], 0)
        pool_of(server.url).set_weights("step-2", reload=False)
        with pytest.raises(SupportCaptureError, match="weights \\['None', 'step-2'\\]"):
            generator.generate([[5, 6, 7]], 1)


class StockVLLM:
    """The part of a stock vLLM server that is asked for log-probs, with a bound on how many it reports."""

    def __init__(self, limit, dtype):
        self.limit, self.dtype, self.asked, self.bodies = limit, dtype, [], []

    def app(self):
        return Starlette(
            routes=[
                Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "stock"}]})),
                Route("/server_info", self._info),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _info(self, _):
        return JSONResponse({"vllm_config": {"model_config": {"dtype": self.dtype}}})

    async def _complete(self, received):
        self.bodies.append(json.loads(await received.body()))
        asked = self.bodies[-1]["logprobs"]
        self.asked.append(asked)
        if asked > self.limit:
            text = f"Requested sample logprobs of {asked}, which is greater than max allowed: {self.limit}"
            return JSONResponse({"error": {"message": text, "code": 400}}, status_code=400)
        candidates = {f"token_id:{i}": 0.0 if i == 7 else -9999.0 for i in range(7, 7 + asked)}
        logprobs = {"tokens": ["token_id:7"], "token_logprobs": [0.0], "top_logprobs": [candidates]}
        choice = {"index": 0, "token_ids": [7], "logprobs": logprobs, "finish_reason": "length"}
        return JSONResponse({"choices": [choice]})


@pytest.mark.parametrize(
    ("limit", "dtype", "asked"),
    [
        (1000, "torch.bfloat16", [num_candidates(20, "bfloat16")] * 2),
        (1000, "torch.float32", [24, 24]),
        (30, "torch.bfloat16", [num_candidates(20, "bfloat16"), 24, 24]),
        (20, "torch.bfloat16", [num_candidates(20, "bfloat16"), 24, 20, 20]),
        (20, "torch.float32", [24, 20, 20]),
    ],
)
def test_a_stock_server_is_asked_for_as_many_as_it_reports(pool_of, limit, dtype, asked):
    stock = StockVLLM(limit, dtype)
    with serving(AppServer(stock.app())) as server:
        pool = pool_of(server.url)
        for _ in range(2):
            ((sample,),) = pool.generate([request(top_k=20)])
            assert sample.support.to_lists() == [[7]]
    assert stock.asked == asked


@pytest.mark.parametrize("support", [True, False])
def test_a_stock_server_is_left_nothing_to_take_from_the_models_defaults(pool_of, support):
    """vLLM fills in what a request leaves out from generation_config.json: another temperature, a narrower nucleus."""
    stock = StockVLLM(1000, "torch.float32")
    bare = GenerateRequest("bare", np.array([5], np.int32), sampling={"max_tokens": 1, "top_k": 20}, support=support)
    with serving(AppServer(stock.app())) as server:
        pool_of(server.url).generate([bare])
    sent = stock.bodies[-1]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (1.0, 1.0, 20, 0.0)
    assert sent["repetition_penalty"] == 1.0
