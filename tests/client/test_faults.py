"""A bad network between client and server: every sample arrives, once and whole, or the error says why not."""

from __future__ import annotations

import functools
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_support_replay.client.pool import GenerationError, ServerPool
from trl_support_replay.client.servers import connect_vllm
from trl_support_replay.client.transport import Retry, ServerRefusalError, ServerUnreachableError

from ..server.conftest import QUICK
from ..server.fakes import FakeEngine, HTTPServer, serving
from ..server.test_endpoint import assert_foretold, request
from .faulty_proxy import Fault, FaultyProxy


@pytest.fixture
def proxied(server):
    proxies = []

    def make(faults, **kwargs):
        proxies.append(FaultyProxy(server.port, faults, **kwargs))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.stop()


def generate_and_check(pool, count=6, weights=None):
    requests = [request(prompt=[i + 1, 2, 3], n=2, routes_start=0, weights_version=weights) for i in range(count)]
    groups = pool.generate(requests)
    assert len(groups) == count
    for asked, samples in zip(requests, groups, strict=True):
        assert len(samples) == 2
        assert_foretold(samples, asked, weights)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("drop_request"),
        Fault("drop_response"),
        Fault("truncate", 0.02),
        Fault("truncate", 0.5),
        Fault("truncate", 0.99),
        Fault("flip", 0.9),
        Fault("flip_request", 0.5),
        Fault("status", status=500),
        Fault("status", status=502),
        Fault("status", status=503),
        Fault("status", status=504),
        Fault("status", status=429),
        Fault("status", status=404),  # a gateway that has lost its upstream for a moment
        Fault("delay", seconds=0.3),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.position}-{fault.status}",
)
def test_one_fault_costs_nothing_but_time(proxied, pool_of, fault):
    proxy = proxied([fault])
    generate_and_check(pool_of(proxy.url))
    assert next(proxy.faults, None) is None, "the fault was never applied"


def test_a_stalled_answer_is_asked_for_again(proxied, pool_of):
    proxy = proxied([Fault("stall", seconds=60)])
    started = time.monotonic()
    generate_and_check(pool_of(proxy.url, request_timeout=0.5))
    assert time.monotonic() - started < 10


faults = st.one_of(
    st.builds(
        Fault,
        kind=st.sampled_from(["drop_request", "drop_response", "truncate", "flip", "flip_request"]),
        position=st.floats(0, 1, exclude_max=True),
    ),
    st.builds(Fault, kind=st.just("status"), status=st.sampled_from([500, 502, 503, 504, 408, 429])),
)


@pytest.fixture(scope="module")
def steady():
    """A server with a proxy and a pool that live through many examples."""
    with serving(HTTPServer(FakeEngine())) as server:
        proxy = FaultyProxy(server.port)
        pool = ServerPool([proxy.url], retry=QUICK, request_timeout=1.0)
        yield proxy, pool
        pool.close()
        proxy.stop()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(faults, min_size=1, max_size=8))
def test_no_sample_is_lost_doubled_or_altered(steady, sequence):
    proxy, pool = steady
    proxy.faults = iter(sequence)
    generate_and_check(pool, count=4)


def test_a_bit_flipped_anywhere_in_an_answer_is_noticed(steady):
    """Head included: the positions walk over the whole answer."""
    proxy, pool = steady
    for position in np.linspace(0, 1, 150, endpoint=False):
        proxy.faults = iter([Fault("flip", float(position))])
        generate_and_check(pool, count=1)


def test_giving_up_names_the_last_cause_and_what_was_done(proxied, pool_of):
    proxy = proxied(itertools.chain([None], itertools.repeat(Fault("status", status=503))))
    pool = pool_of(proxy.url, retry=Retry(give_up_after=0.5, first_delay=0.05, max_delay=0.1))
    with pytest.raises(GenerationError, match=r"failed \d+ times over .* Last cause: answer 503: oops") as error:
        generate_and_check(pool, count=3)
    assert error.value.completed == 1 and error.value.total == 3
    assert "1 of 3 requests of this batch were completed" in str(error.value)
    assert isinstance(error.value.__cause__, ServerUnreachableError)


def test_a_refusal_is_not_repeated(proxied, pool_of):
    proxy = proxied(itertools.repeat(Fault("status", status=413)))
    with pytest.raises(GenerationError, match="answered 413") as error:
        generate_and_check(pool_of(proxy.url), count=1)
    assert proxy.exchanges == 2  # the server's description, and the request
    assert isinstance(error.value.__cause__, ServerRefusalError) and error.value.__cause__.status == 413


def test_one_lost_request_stops_the_batch_and_the_engine(proxied, pool_of, engine):
    engine.gate.clear()
    proxy = proxied([None, None, None, None, Fault("status", status=413)])
    with pytest.raises(GenerationError, match="0 of 5"):
        generate_and_check(pool_of(proxy.url), count=5)
    deadline = time.monotonic() + 5
    while engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.gate.set()
    assert engine.running == 0, "requests of a failed batch go on in the engine"


def test_a_server_killed_and_restarted_mid_batch_loads_its_weights_again(engine, weights_dir, pool_of):
    (weights_dir / "v1").mkdir()
    (weights_dir / "v1" / "0.safetensors").touch()
    with serving(HTTPServer(engine)) as server:
        pool = pool_of(server.url, retry=Retry(give_up_after=20, first_delay=0.05, max_delay=0.2))
        pool.set_weights("v1", reload=True)
        engine.gate.clear()

        def restart():
            while engine.running < 6:
                time.sleep(0.01)
            server.stop()
            time.sleep(0.3)
            server.engine = FakeEngine()  # with the weights that it was started with
            server.start()

        killer = threading.Thread(target=restart)
        killer.start()
        generate_and_check(pool, count=6, weights="v1")
        killer.join()
        assert server.engine.weights == "v1" and server.engine.loads == 1 and server.engine.overlaps == 0


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_restarted_server_that_cannot_reload_stops_the_run(engine, pool_of, has_folder, request):
    if has_folder:  # with versions of other runs
        request.getfixturevalue("weights_dir")
    with serving(HTTPServer(engine)) as server:
        pool = pool_of(server.url, connect=functools.partial(connect_vllm, from_folder=False))
        pool.set_weights("nccl-1", reload=False)
        engine.weights = "nccl-1"  # as they came over NCCL
        generate_and_check(pool, count=1, weights="nccl-1")
        server.stop()
        server.engine = FakeEngine()
        server.start()
        with pytest.raises(GenerationError, match="holds the weights None, and nccl-1 is asked for"):
            generate_and_check(pool, count=1, weights="nccl-1")
        assert not server.engine.calls


def test_a_dead_server_is_reported_when_it_was_never_up(pool_of):
    with serving(HTTPServer(FakeEngine())) as server:
        url = server.url
    with pytest.raises(ServerUnreachableError, match=f"GET {url}.*ConnectError"):
        pool_of(url, retry=Retry(give_up_after=0.3, first_delay=0.05))


def test_connections_are_kept(proxied, pool_of):
    proxy = proxied([])
    pool = pool_of(proxy.url)
    for _ in range(5):
        generate_and_check(pool, count=3)
    assert proxy.exchanges == 16 and proxy.connections <= 3
