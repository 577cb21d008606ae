"""The endpoint beside an ordinary server: what it answers, what it refuses, what it leaves alone."""

from __future__ import annotations

import time

import httpx
import msgspec
import numpy as np
import pytest

from trl_support_replay.client.pool import GenerationError, new_request_id
from trl_support_replay.client.servers import check_server
from trl_support_replay.settings.contract import SamplingSettings, UnreplayableSettingError
from trl_support_replay.wire import protocol
from trl_support_replay.wire.protocol import GenerateRequest, decode_samples, encode_request

from .fakes import FakeEngine, HTTPServer, foretold, routes_of, serving

SAMPLING = {"temperature": 1.0, "top_k": 8, "top_p": 0.9, "max_tokens": 12}


def request(prompt=(5, 6, 7), **kwargs):
    sampling = SAMPLING | kwargs.pop("sampling", {})
    return GenerateRequest(new_request_id(), np.array(prompt, dtype=np.int32), sampling=sampling, **kwargs)


def post(url, path, body, **headers):
    return httpx.post(url + path, content=body, headers=headers, trust_env=False)


def assert_foretold(samples, asked, weights=None):
    for i, sample in enumerate(samples):
        tokens, logprobs, rows, _ = foretold(asked.prompt_ids, i, asked.sampling["max_tokens"], 8, weights)
        assert sample.token_ids.tolist() == tokens
        np.testing.assert_array_equal(sample.logprobs, logprobs)
        assert sample.support == rows
        assert sample.weights_version == weights


def test_samples_arrive_as_the_engine_made_them(server, pool_of):
    requests = [request(prompt=[1 + i, 2, 3], n=1 + i % 3, routes_start=i) for i in range(4)]
    for asked, samples in zip(requests, pool_of(server.url).generate(requests), strict=True):
        assert len(samples) == asked.n
        assert_foretold(samples, asked)
        for sample in samples:
            whole = routes_of([*asked.prompt_ids, *sample.token_ids])[:-1]
            np.testing.assert_array_equal(sample.routes, whole[asked.routes_start :])
            assert sample.routes.dtype == np.uint8 and sample.routes_start == asked.routes_start


def test_a_request_without_support_may_be_anything(server, pool_of):
    asked = request(support=False, sampling={"temperature": 0.0, "repetition_penalty": 1.2, "top_k": 8})
    ((sample,),) = pool_of(server.url).generate([asked])
    assert sample.support is None and sample.routes is None
    assert len(sample.token_ids) == len(sample.logprobs)


@pytest.mark.parametrize(
    ("sampling", "setting"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 1}, "top_k"),
        ({"top_k": 0}, "top_p"),
        ({"top_k": 65}, "top_k"),
        ({"top_k": 0, "top_p": 1.0}, "support"),
        ({"top_k": "8"}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 0.5}, "generation_kwargs['presence_penalty']"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1.0}}, "generation_kwargs['logit_bias']"),
        ({"logprobs": 5}, "generation_kwargs['logprobs']"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 510}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"seed": True}, "seed"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_the_contract_holds_on_the_server_too(server, engine, sampling, setting):
    answer = post(server.url, protocol.GENERATE, encode_request(request(sampling=sampling)))
    assert answer.status_code == 400 and not engine.calls
    error = answer.json()["error"]
    assert error["setting"] == setting
    assert str(sampling.get(setting, "")) in error["message"]


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"n": 0}, "n"),
        ({"n": 257}, "n"),
        ({"prompt": [1000]}, "prompt_ids"),
        ({"prompt": [1, -2]}, "prompt_ids"),
        ({"routes_start": 4}, "routes_start"),
        ({"routes_start": -1}, "routes_start"),
    ],
)
def test_bounds_name_the_value(server, engine, changes, setting):
    answer = post(server.url, protocol.GENERATE, encode_request(request(**changes)))
    assert answer.status_code == 400 and not engine.calls
    assert answer.json()["error"]["setting"] == setting


def test_raw_logprobs_cannot_be_recorded(pool_of):
    with serving(HTTPServer(FakeEngine(logprobs_mode="raw_logprobs"))) as server:
        with pytest.raises(GenerationError, match="--logprobs-mode processed_logprobs"):
            pool_of(server.url).generate([request()])


DRAFTS = {"speculative_config": {"method": "ngram"}}


def test_an_engine_that_breaks_replay_records_nothing_and_tells_so(pool_of):
    with serving(HTTPServer(FakeEngine(vllm_config=DRAFTS))) as server:
        pool = pool_of(server.url)
        for asked in (request(), request(support=False, routes_start=0)):
            with pytest.raises(GenerationError, match="the engine's speculative_config=.*cannot be replayed"):
                pool.generate([asked])
        assert len(pool.generate([request(support=False)])) == 1  # evaluation needs no replay
        with pytest.raises(UnreplayableSettingError, match=f"^{server.url}: the engine's speculative_config="):
            check_server(pool.servers[0], SamplingSettings(top_k=8))


@pytest.mark.parametrize("replay", [{"top_k": 8}, {}], ids=["replay", "stock"])
def test_a_trainer_refuses_a_server_that_breaks_replay_at_its_construction(build, tiny_model_path, weights_dir, replay):
    with serving(HTTPServer(FakeEngine(vllm_config=DRAFTS))) as server:
        sync = {"weight_sync": "filesystem", "weight_sync_dir": str(weights_dir), "vllm_server_base_url": server.url}
        with pytest.raises(UnreplayableSettingError, match=f"^{server.url}: the engine's speculative_config="):
            build(tiny_model_path, use_vllm=True, vllm_mode="server", **sync, **replay)


def test_a_top_k_above_the_servers_bound_is_refused_before_a_request(server, engine, pool_of):
    with pytest.raises(UnreplayableSettingError, match="^top_k=65 cannot be replayed: .*at most 64 candidates"):
        check_server(pool_of(server.url).servers[0], SamplingSettings(top_k=65))
    assert not engine.calls


def test_routes_need_a_model_that_has_them(pool_of):
    with serving(HTTPServer(FakeEngine(enable_return_routed_experts=False))) as server:
        with pytest.raises(GenerationError, match="--enable-return-routed-experts"):
            pool_of(server.url).generate([request(routes_start=0)])


def test_request_bodies_are_bounded(engine, monkeypatch):
    monkeypatch.setenv("TRL_SUPPORT_REPLAY_MAX_REQUEST_BYTES", "1500")
    with serving(HTTPServer(engine)) as server:
        assert post(server.url, protocol.GENERATE, encode_request(request())).status_code == 200
        answer = post(server.url, protocol.GENERATE, encode_request(request(prompt=range(900))))
        assert answer.status_code == 413 and "1500" in answer.json()["error"]["message"]

        def endless():
            for _ in range(10):
                yield b" " * 1000

        assert post(server.url, protocol.GENERATE, endless()).status_code == 413  # no Content-Length to go by
    assert len(engine.calls) == 1


@pytest.mark.parametrize("path", [protocol.GENERATE, protocol.RELOAD, protocol.LABEL, protocol.INFO])
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic secret", "secret"])
def test_every_path_wants_the_api_key(engine, path, header):
    method = "GET" if path == protocol.INFO else "POST"
    headers = {} if header is None else {"Authorization": header}
    with serving(HTTPServer(engine, api_key="secret")) as server:
        answer = httpx.request(method, server.url + path, headers=headers, content=b"{}", trust_env=False)
        assert answer.status_code == 401
        # Only the endpoint's own paths: the rest is guarded, or not, by vLLM.
        assert httpx.get(server.url + "/v1/models", trust_env=False).status_code == 200


def test_the_client_sends_its_key(engine, pool_of):
    with serving(HTTPServer(engine, api_key="secret")) as server:
        asked = request()
        (samples,) = pool_of(server.url, api_key="secret").generate([asked])
        assert_foretold(samples, asked)


def test_the_environment_variable_for_keys_counts_as_in_vllm(engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    with serving(HTTPServer(engine)) as server:
        assert httpx.get(server.url + protocol.INFO, trust_env=False).status_code == 401
        headers = {"Authorization": "Bearer from-environment"}
        assert httpx.get(server.url + protocol.INFO, headers=headers, trust_env=False).status_code == 200


def test_other_paths_reach_the_server_as_they_came(server):
    body = b"\x00anything" * 100
    assert httpx.post(server.url + "/v1/models", content=body, trust_env=False).json()["body"] == body.decode()
    assert httpx.get(server.url + "/support_replay_not", trust_env=False).status_code == 404
    assert httpx.get(server.url + protocol.GENERATE, trust_env=False).json()["error"]["code"] == "unknown_path"


def test_a_request_whose_client_hangs_up_is_aborted(server, engine):
    engine.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + protocol.GENERATE, content=encode_request(request()), timeout=0.3, trust_env=False)
    deadline = time.monotonic() + 5
    while engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.running == 0 and engine.aborted == 1


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_request_that_the_engine_ended_early_is_no_sample(server, engine, reason):
    engine.finish_reason = reason
    answer = post(server.url, protocol.GENERATE, encode_request(request()))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted"


def test_bodies_that_were_altered_are_told_apart_from_bad_requests(server):
    body = encode_request(request())
    digest = {protocol.DIGEST_HEADER: protocol.digest(body)}
    assert post(server.url, protocol.GENERATE, body, **digest).status_code == 200
    altered = body.replace(b"\xa1n\x01", b"\xa1n\x03")
    assert altered != body
    assert post(server.url, protocol.GENERATE, altered, **digest).json()["error"]["code"] == "corrupt_body"
    assert post(server.url, protocol.GENERATE, body[:-1]).json()["error"]["code"] == "bad_message"


def test_an_answer_is_signed_and_comes_as_it_is(server):
    asked = request(n=50)
    answer = post(server.url, protocol.GENERATE, encode_request(asked))
    assert "content-encoding" not in answer.headers and answer.headers["content-type"] == protocol.CONTENT_TYPE
    assert answer.headers[protocol.DIGEST_HEADER] == protocol.digest(answer.content)
    assert_foretold(decode_samples(answer.content, asked), asked)


def test_the_server_describes_itself(server):
    info = msgspec.json.decode(httpx.get(server.url + protocol.INFO, trust_env=False).content)
    assert tuple(info["version"]) == protocol.VERSION and info["capture"] == "logprobs" and info["dtype"] == "float32"
    assert info["max_top_k"] == 64 and info["weight_reload"] is False and info["weights_version"] is None
