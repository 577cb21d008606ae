"""How many candidates servers are asked for, and what is counted when those do not show all of a tie."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.parts import require
from trl_support_replay.client.pool import new_request_id
from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.engine_outputs.vllm_outputs import num_candidates
from trl_support_replay.engines.generators import CaptureRequest
from trl_support_replay.engines.server_generators import ServerGenerator
from trl_support_replay.settings.contract import SamplingSettings
from trl_support_replay.wire.protocol import GenerateRequest

from .fakes import FakeEngine, HTTPServer, serving

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
