"""Several servers: where prompts go, and that nothing is mixed up on the way."""

from __future__ import annotations

import base64
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from trl_support_replay.client.pool import new_request_id
from trl_support_replay.client.prefixes import PrefixIndex
from trl_support_replay.client.transport import Retry, ServerUnreachableError, Transport
from trl_support_replay.settings.contract import UnreplayableSettingError
from trl_support_replay.wire import protocol

from ..server.fakes import AppServer, FakeEngine, HTTPServer, serving
from ..server.test_endpoint import assert_foretold, request
from ..server.vllm_process import VLLMServe


@pytest.fixture
def two_servers():
    with serving(HTTPServer(FakeEngine())) as a, serving(HTTPServer(FakeEngine())) as b:
        yield a, b


def test_a_batch_is_spread_and_comes_back_in_order(two_servers, pool_of):
    pool = pool_of(*(server.url for server in two_servers))
    requests = [request(prompt=[i + 1]) for i in range(20)]
    for server in two_servers:
        server.engine.gate.clear()
    threading.Timer(0.3, lambda: [server.engine.gate.set() for server in two_servers]).start()
    for asked, samples in zip(requests, pool.generate(requests), strict=True):
        assert_foretold(samples, asked)
    assert [len(server.engine.calls) for server in two_servers] == [10, 10]


def test_processes_with_a_prompt_each_begin_at_different_servers(two_servers, pool_of):
    for process in range(8):
        pool = pool_of(*(server.url for server in two_servers))
        pool.first_server = process
        pool.generate([request(prompt=[process + 1])])
    assert [len(server.engine.calls) for server in two_servers] == [4, 4]


def test_a_conversation_stays_with_its_server(two_servers, pool_of):
    pool = pool_of(*(server.url for server in two_servers))
    conversations = [[i + 1, 50] for i in range(9)]
    for turn in range(4):
        requests = [request(prompt=conversation) for conversation in conversations]
        for i, (sample,) in enumerate(pool.generate(requests)):
            conversations[i] = [*conversations[i], *sample.token_ids.tolist(), 60 + turn]
    home = {}
    for index, server in enumerate(two_servers):
        assert server.engine.calls
        for call in server.engine.calls:
            assert home.setdefault(call[0], index) == index
    assert len(home) == 9


def test_new_weights_free_prompts_to_go_anywhere(two_servers, pool_of):
    pool = pool_of(*(server.url for server in two_servers))
    pool.generate([request(prompt=[1])])
    two_servers[0].engine.gate.clear()
    busy = threading.Thread(target=pool.generate, args=([request(prompt=[5])],))
    busy.start()
    while not two_servers[0].engine.running:
        time.sleep(0.005)
    pool.forget_prefixes()
    pool.generate([request(prompt=[1, 2])])
    assert two_servers[1].engine.calls == [[1, 2]]
    two_servers[0].engine.gate.set()
    busy.join()


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_the_longest_known_beginning_is_found(sequences, capacity):
    index = PrefixIndex(capacity)
    known: dict[tuple, int] = {}  # in order of use
    for value, sequence in enumerate(sequences):
        beginnings = [tuple(sequence[:length]) for length in range(len(sequence), 0, -1)]
        expected = next((b for b in beginnings if b in known), None)
        assert index.longest(np.array(sequence)) == (None if expected is None else known[expected])
        if expected is not None:
            known[expected] = known.pop(expected)
        index.put(np.array(sequence), value)
        known.pop(tuple(sequence), None)
        known[tuple(sequence)] = value
        if len(known) > capacity:
            del known[next(iter(known))]
        assert len(index) == len(known)
    index.clear()
    assert len(index) == 0 and index.longest(np.array(sequences[0])) is None


def test_an_empty_batch_is_an_empty_answer(server, pool_of, engine):
    assert pool_of(server.url).generate([]) == []
    assert not engine.calls


def test_a_request_may_have_its_own_top_k_but_not_its_own_temperature(server, pool_of, engine):
    pool = pool_of(server.url, temperature=1.0)
    pool.generate([request(sampling={"top_k": 5}), request(support=False, sampling={"temperature": 0.2})])
    calls = len(engine.calls)
    with pytest.raises(UnreplayableSettingError, match="temperature=0.7 .* temperature=1.0"):
        pool.generate([request(), request(sampling={"temperature": 0.7})])
    assert len(engine.calls) == calls, "nothing of the batch may start"


def test_request_ids_are_unique():
    assert len({new_request_id() for _ in range(1000)}) == 1000


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "", "unix:///socket"])
def test_urls_that_are_none_are_refused(url):
    with pytest.raises(ValueError, match="http://host:port"):
        Transport(url)


def front_of(gateway):
    return AppServer(Starlette(routes=[Route("/{path:path}", gateway, methods=["GET", "POST"])]))


def test_a_base_path_is_kept(server, pool_of, engine):
    """A gateway may put a server under a path."""
    seen = []

    async def gateway(request):
        seen.append(request.url.path)
        return Response(status_code=404)

    with serving(front_of(gateway)) as front:
        with pytest.raises(RuntimeError, match="/team-a has no /support_replay"):
            pool_of(front.url + "/team-a/")
    assert seen[0] == "/team-a/support_replay/v2/info"


def test_credentials_in_a_url_are_for_the_server_alone(pool_of, caplog):
    """A gateway may ask for basic authentication."""
    seen = []

    async def gateway(request):
        seen.append(request.headers["authorization"])
        return Response(status_code=503)

    with serving(front_of(gateway)) as front:
        url = front.url.replace("http://", "http://me:s%2Fcret@")
        with pytest.raises(ServerUnreachableError, match=f"GET {front.url}/support_replay") as error:
            pool_of(url, api_key="key", retry=Retry(give_up_after=0.2, first_delay=0.05))
    assert set(seen) == {"Basic " + base64.b64encode(b"me:s/cret").decode()}
    assert front.url in caplog.text and "cret" not in caplog.text + str(error.value)
    with pytest.raises(ValueError, match="^Server URL 'host:8000' does not"):
        Transport("me:secret@host:8000")


@pytest.mark.parametrize("answer", [b"ready", b"[]", b'{"status": "ok"}', b'{"version": 1}'])
def test_another_program_at_the_address_is_not_taken_for_a_server(pool_of, tmp_path, answer):
    """One that answers whatever it is asked, as VLLMServe too may find at its port."""

    async def anything(request):
        return Response(answer)

    with serving(AppServer(Starlette(routes=[Route("/{path:path}", anything, methods=["GET", "POST"])]))) as server:
        with pytest.raises(ServerUnreachableError, match="/support_replay/v2/info is no packed endpoint"):
            pool_of(server.url, retry=Retry(give_up_after=0.1, first_delay=0.01))
        beside = VLLMServe("model")
        beside.url = server.url
        assert not beside._answers()


def test_a_server_without_the_endpoint_is_refused_with_what_to_start_instead(pool_of):
    with serving(AppServer(Starlette(routes=[Route("/v1/models", lambda _: Response(b"{}"))]))) as server:
        with pytest.raises(RuntimeError, match=f"^{server.url} has no {protocol.INFO}.*Start it with `trl-support-rep"):
            pool_of(server.url)


@pytest.mark.parametrize("version", [[1, 0], [3, 4]])
def test_a_server_of_another_major_version_is_refused(pool_of, version):
    answer = Response(json.dumps({"version": version}))
    with serving(AppServer(Starlette(routes=[Route(protocol.INFO, lambda _: answer)]))) as server:
        with pytest.raises(RuntimeError, match=f"version={version[0]}.{version[1]}; this end speaks 2.0. Install"):
            pool_of(server.url)
