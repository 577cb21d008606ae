"""Versions of the weights: written whole or not at all, loaded alone, from inside the folder and nowhere else."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import httpx
import pytest
import torch
from safetensors.torch import load_file

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


def test_a_version_holds_every_tensor_bit_for_bit(tmp_path):
    tensors = {f"layer.{i}": torch.randn(i + 1, 5, dtype=torch.float32) for i in range(7)}
    tensors["tied"] = tensors["layer.3"]  # the same storage under a second name
    tensors["half"] = torch.randn(3).to(torch.bfloat16)
    tensors["transposed"] = torch.randn(4, 6).T
    writer = VersionedWeights(tmp_path / "new" / "folder", "run")
    version = writer.name(3)
    writer.write(version, tensors.items(), shard_bytes=100)
    files = sorted((writer.folder / version).iterdir())
    assert version == "run-000003" and len(files) > 3
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype


def test_a_tensor_that_is_gone_after_it_was_taken_is_still_written(tmp_path):
    def gathered():
        for i in range(3):
            buffer = torch.full((4,), float(i))
            yield f"w{i}", buffer
            buffer.fill_(float("nan"))  # as a gathered parameter is partitioned again

    writer = VersionedWeights(tmp_path, "run")
    writer.write("v", gathered())
    loaded = load_file(tmp_path / "v" / "00000.safetensors")
    assert [loaded[f"w{i}"][0].item() for i in range(3)] == [0.0, 1.0, 2.0]


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def broken():
        yield "w", torch.ones(100)
        raise RuntimeError("lost a rank")

    writer = VersionedWeights(tmp_path, "run")
    with pytest.raises(RuntimeError, match="lost a rank"):
        writer.write("v", broken(), shard_bytes=10)
    assert list(tmp_path.iterdir()) == []


def test_a_version_appears_only_when_it_is_whole(tmp_path):
    writer = VersionedWeights(tmp_path, "run")
    seen = []

    def watched():
        for i in range(3):
            yield f"w{i}", torch.ones(10)
            seen.append((tmp_path / "v").exists())

    writer.write("v", watched(), shard_bytes=10)
    assert seen == [False, False, False] and (tmp_path / "v").is_dir()


def test_only_older_versions_of_the_same_run_are_removed(tmp_path):
    ours, others = VersionedWeights(tmp_path, "ours"), VersionedWeights(tmp_path, "others")
    for writer in (ours, others):
        for number in (1, 2, 3, 10):
            writer.write(writer.name(number), [("w", torch.ones(1))])
    ours.remove_before(ours.name(10))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["others-000001", "others-000002", "others-000003", "others-000010", "ours-000010"]


ENDED, LIVING, UNCLAIMED = "a" * 12, "b" * 12, "c" * 12


def claimed(folder, run, number=1):
    writer = VersionedWeights(folder, run)
    if run != UNCLAIMED:
        writer.claim()
    writer.write(writer.name(number), [("w", torch.ones(1))])
    return writer


def test_what_ended_runs_left_is_removed_by_the_next_and_nothing_else(tmp_path):
    living, _ = claimed(tmp_path, LIVING), claimed(tmp_path, UNCLAIMED)
    claimed(tmp_path, ENDED)  # and forgotten, as when its process ends
    (tmp_path / f".{ENDED}-000002.partial").mkdir()  # it was killed while it wrote
    (tmp_path / f".{ENDED}-000000.removed").mkdir()
    for notes in (f"{ENDED}-000003", f"{ENDED}-notes", "checkpoint-1"):
        (tmp_path / notes).mkdir()
        (tmp_path / notes / "README").touch()
    (tmp_path / f"{ENDED}-000004").symlink_to(tmp_path / f"{UNCLAIMED}-000001")
    before = {path.name for path in tmp_path.iterdir()}
    new = VersionedWeights(tmp_path, "d" * 12)
    new.claim()
    after = {path.name for path in tmp_path.iterdir()}
    gone = {f"{ENDED}-000001", f".{ENDED}-000002.partial", f".{ENDED}-000000.removed", f".{ENDED}.lock"}
    assert before - after == gone and after - before == {f".{'d' * 12}.lock"}
    living.write(living.name(2), [("w", torch.ones(1))])


def test_a_run_on_another_machine_has_ended_only_when_it_is_quiet(tmp_path):
    """Some file systems keep locks to one machine."""
    claimed(tmp_path, ENDED)
    lock = tmp_path / f".{ENDED}.lock"
    lock.write_text("another-machine")
    VersionedWeights(tmp_path, LIVING).claim()
    assert (tmp_path / f"{ENDED}-000001").is_dir()
    day_before = time.time() - 86500
    os.utime(lock, (day_before, day_before))
    VersionedWeights(tmp_path, UNCLAIMED).claim()
    assert not (tmp_path / f"{ENDED}-000001").exists()


def test_a_version_that_is_written_tells_other_machines_that_the_run_is_alive(tmp_path):
    writer = claimed(tmp_path, LIVING)
    lock = tmp_path / f".{LIVING}.lock"
    os.utime(lock, (0, 0))
    writer.write(writer.name(2), [("w", torch.ones(1))])
    assert time.time() - lock.stat().st_mtime < 60


def test_without_file_locks_nothing_is_removed(tmp_path, monkeypatch):
    claimed(tmp_path, ENDED)
    before = set(tmp_path.iterdir())

    def no_locks(*_):
        raise OSError("Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    VersionedWeights(tmp_path, LIVING).claim()
    assert set(tmp_path.iterdir()) == before


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
