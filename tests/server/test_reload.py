"""Versions of the weights: written whole or not at all, loaded alone, from inside the folder and nowhere else."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
import torch

from trl_support_replay.client.pool import GenerationError
from trl_support_replay.client.transport import Retry, ServerRefusalError, ServerUnreachableError
from trl_support_replay.client.weights import VersionedWeights
from trl_support_replay.server.gate import WeightsGate
from trl_support_replay.wire import protocol

from .fakes import FakeEngine, HTTPServer, serving
from .test_endpoint import assert_foretold, post, request


@pytest.fixture
def versions(weights_dir):
    for name in ("v1", "v2"):
        VersionedWeights(weights_dir, "x").write(name, [("w", torch.ones(2))])


@pytest.mark.parametrize(
    "name",
    ["../v1", "v1/../v1", "/etc", ".", "..", "", ".hidden", "v1/", "a b", "v1\x00", "v" * 97, "v1\n", "C:\\v1"],
)
def test_a_version_cannot_be_a_path(engine, weights_dir, versions, name):
    with serving(HTTPServer(engine)) as server:
        for path in (protocol.RELOAD, protocol.LABEL):
            answer = post(server.url, path, protocol.encode_version(name))
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "version_name"
    assert engine.loads == 0


@pytest.mark.parametrize("kind", ["pickle", "link_to_file", "link_to_folder", "folder_inside", "empty"])
def test_only_safetensors_inside_the_folder_are_loaded(engine, weights_dir, tmp_path, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "w.safetensors").touch()
    version = weights_dir / "v"
    if kind == "link_to_folder":
        version.symlink_to(outside)
    else:
        version.mkdir()
    if kind == "pickle":
        (version / "ok.safetensors").touch()
        (version / "pytorch_model.bin").touch()
    elif kind == "link_to_file":
        (version / "w.safetensors").symlink_to(outside / "w.safetensors")
    elif kind == "folder_inside":
        (version / "w.safetensors").mkdir()
    with serving(HTTPServer(engine)) as server:
        answer = post(server.url, protocol.RELOAD, protocol.encode_version("v"))
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_safetensors"
    assert engine.loads == 0


def test_without_a_folder_nothing_is_loaded(server, engine):
    answer = post(server.url, protocol.RELOAD, protocol.encode_version("v1"))
    assert answer.status_code == 400 and "--weights-dir" in answer.json()["error"]["message"]
    assert engine.loads == 0


def test_a_missing_version_may_still_appear(engine, weights_dir, pool_of):
    with serving(HTTPServer(engine)) as server:
        with pytest.raises(ServerUnreachableError, match="There is no version late"):
            pool_of(server.url, retry=Retry(give_up_after=0.3, first_delay=0.05)).set_weights("late", reload=True)

        def appear():
            time.sleep(0.3)
            VersionedWeights(weights_dir, "x").write("late", [("w", torch.ones(1))])

        thread = threading.Thread(target=appear)
        thread.start()
        pool_of(server.url).set_weights("late", reload=True)
        thread.join()
    assert engine.weights == "late"


def test_loading_the_version_that_is_there_does_nothing(engine, versions, pool_of):
    with serving(HTTPServer(engine)) as server:
        pool = pool_of(server.url)
        for version in ("v1", "v1", "v2", "v2", "v1"):
            pool.set_weights(version, reload=True)
    assert engine.loads == 3 and engine.weights == "v1"


def test_a_reload_waits_for_running_requests_and_new_ones_wait_for_it(engine, versions, pool_of):
    with serving(HTTPServer(engine)) as server:
        pool, other = pool_of(server.url), pool_of(server.url)
        engine.gate.clear()
        early, late = [request(prompt=[i]) for i in range(4)], [request(prompt=[i]) for i in range(4, 8)]
        results = {}

        def in_thread(name, work):
            thread = threading.Thread(target=lambda: results.update({name: work()}))
            thread.start()
            return thread

        threads = [in_thread("early", lambda: pool.generate(early))]
        while engine.running < 4:
            time.sleep(0.005)
        threads.append(in_thread("reload", lambda: other.set_weights("v1", reload=True)))
        time.sleep(0.2)
        threads.append(in_thread("late", lambda: pool.generate(late)))
        time.sleep(0.2)
        assert len(engine.calls) == 4 and engine.loads == 0, "nothing may start behind a waiting reload"
        engine.gate.set()
        for thread in threads:
            thread.join()
    assert engine.overlaps == 0
    for asked, samples in zip(early, results["early"], strict=True):
        assert_foretold(samples, asked, None)
    for asked, samples in zip(late, results["late"], strict=True):
        assert_foretold(samples, asked, "v1")


def test_a_reload_that_waits_too_long_lets_generation_go_on(engine, versions, pool_of, monkeypatch):
    monkeypatch.setenv("TRL_SUPPORT_REPLAY_RELOAD_TIMEOUT", "1")
    with serving(HTTPServer(engine)) as server:
        pool = pool_of(server.url)
        engine.gate.clear()
        thread = threading.Thread(target=lambda: pool.generate([request()]))
        thread.start()
        while not engine.running:
            time.sleep(0.005)
        answer = httpx.post(
            server.url + protocol.RELOAD, content=protocol.encode_version("v1"), timeout=10, trust_env=False
        )
        assert answer.status_code == 503 and "reload_timeout=1" in answer.json()["error"]["message"]
        engine.gate.set()
        thread.join()
        pool.set_weights("v1", reload=True)
        asked = request(weights_version="v1")
        (samples,) = pool.generate([asked])
        assert_foretold(samples, asked, "v1")


def test_after_a_failed_load_nothing_is_generated_until_one_succeeds(engine, versions, pool_of):
    with serving(HTTPServer(engine)) as server:
        pool = pool_of(server.url, retry=Retry(give_up_after=0.2, first_delay=0.05))
        engine.fail_load = True
        with pytest.raises(ServerUnreachableError, match="the disk is gone"):
            pool.set_weights("v1", reload=True)
        answer = post(server.url, protocol.GENERATE, protocol.encode_request(request()))
        assert answer.status_code == 409 and not engine.calls
        with pytest.raises(GenerationError, match="The last reload failed half-way"):
            pool.generate([request()])
        engine.fail_load = False
        asked = request(weights_version="v2")
        (samples,) = pool.generate([asked])  # asks for the reload itself
        assert_foretold(samples, asked, "v2")


def test_on_a_cpu_a_half_precision_engine_is_not_reloaded(versions, pool_of):
    engine = FakeEngine(dtype="torch.bfloat16")
    with serving(HTTPServer(engine)) as server:
        with pytest.raises(ServerRefusalError, match="--dtype float32"):
            pool_of(server.url).set_weights("v1", reload=True)
    assert engine.loads == 0


def test_many_clients_reloading_and_generating_never_overlap(engine, versions, pool_of):
    with serving(HTTPServer(engine)) as server:
        pools = [pool_of(server.url) for _ in range(3)]
        failures = []

        def hammer(pool, k):
            try:
                for i in range(15):
                    if (i + k) % 3 == 0:
                        pool.set_weights(f"v{1 + (i + k) % 2}", reload=True)
                    for asked, samples in [(a, pool.generate([a])[0]) for a in [request(prompt=[k, i])]]:
                        assert_foretold(samples, asked, samples[0].weights_version)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=hammer, args=(pool, k)) for k, pool in enumerate(pools)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and engine.overlaps == 0 and engine.loads >= 2


def test_a_cancelled_wait_for_the_weights_gives_its_place_back():
    async def run():
        gate = WeightsGate()

        async def hold(started, release):
            async with gate.generating():
                started.set()
                await release.wait()

        started, release = asyncio.Event(), asyncio.Event()
        holder = asyncio.create_task(hold(started, release))
        await started.wait()

        async def reload():
            async with gate.reloading(60):
                pass

        waiting = asyncio.create_task(reload())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        async with asyncio.timeout(5):
            async with gate.reloading(5):
                pass
            async with gate.generating():
                pass

    asyncio.run(run())
