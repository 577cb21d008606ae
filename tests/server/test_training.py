"""The trainer in server mode: on one process against a real server, and on two with faults in between."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from trl_support_replay.checks.replay_check import ReplayGapError
from trl_support_replay.engines.vllm_captures import vllm_version
from trl_support_replay.engines.vllm_server import _seen_from_other_nodes
from trl_support_replay.hub.model_card import run_facts
from trl_support_replay.rollouts.recorder import SupportRecorder
from trl_support_replay.trainers.passes import ScoringPass
from trl_support_replay.wire.protocol import GenerateRequest

from ..client.faulty_proxy import Fault, FaultyProxy
from ..trainers.test_routes import CUTS
from .fakes import FakeEngine, HTTPServer, serving
from .vllm_process import VLLMServe

SERVER = {"use_vllm": True, "vllm_mode": "server", "weight_sync": "filesystem", "vllm_server_timeout": 60.0}


@pytest.fixture(autouse=True)
def key(monkeypatch, request):
    if "moe_server" in request.fixturenames:
        monkeypatch.setenv("VLLM_API_KEY", request.getfixturevalue("moe_server").api_key)


def server_settings(server):
    return SERVER | {"vllm_server_base_url": server.url, "weight_sync_dir": str(server.weights_dir)}


def steps(trainer):
    return [entry for entry in trainer.state.log_history if "support/logprob_gap_max" in entry]


def test_nccl_on_a_cpu_is_refused_at_once(build, tiny_moe_path):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:9", "top_k": 8}
    with pytest.raises(ValueError, match="weight_sync='nccl' on a CPU.* Set weight_sync='filesystem'"):
        build(str(tiny_moe_path), **settings)


def test_training_follows_the_servers_weights(build, moe_server, tiny_moe_path):
    settings = server_settings(moe_server)
    trainer = build(tiny_moe_path, max_steps=3, top_k=20, top_p=0.9, temperature=0.8, **settings)
    before = set(moe_server.weights_dir.iterdir())
    trainer.train()
    log = steps(trainer)
    assert len(log) == 3 and all(entry["support/logprob_gap_max"] < 1e-4 for entry in log)
    assert all(entry["sampling/importance_sampling_ratio_raw/mean"] == pytest.approx(1, abs=1e-3) for entry in log)
    assert any(entry["support/size_mean"] > 2 for entry in log) and any(entry["grad_norm"] > 0 for entry in log)
    written = set(moe_server.weights_dir.iterdir()) - before
    (version,) = (path.name for path in written if not path.name.startswith("."))
    assert version.endswith("-000003"), "one version a step, and only the last is kept"
    facts = run_facts(trainer)  # for the model card
    assert (
        facts["engine"] == f"vllm {vllm_version()}" and facts["supports from"] == "the engine's sampler, in its worker"
    )


def test_without_truncation_it_is_stock_training_over_the_same_server(build, moe_server, tiny_moe_path):
    trainer = build(tiny_moe_path, max_steps=2, **server_settings(moe_server))
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "sampling/importance_sampling_ratio/mean" in entry]
    assert len(log) == 2 and not steps(trainer)
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-4 for entry in log)


def test_evaluation_asks_for_nothing_beside_its_tokens(build, moe_server, tiny_moe_path):
    from ..trainers.conftest import sums

    trainer = build(
        tiny_moe_path,
        max_steps=2,
        top_k=20,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=sums(4),
        per_device_eval_batch_size=4,
        **server_settings(moe_server),
    )
    asked = []
    generate = trainer.vllm_generation.pool.generate
    trainer.vllm_generation.pool.generate = lambda requests: asked.extend(requests) or generate(requests)
    trainer.train()
    assert len(steps(trainer)) == 2 and sum("eval_reward" in entry for entry in trainer.state.log_history) == 2
    assert {(request.support, request.n) for request in asked} == {(True, 4), (False, 4)}


def test_a_skipped_sync_is_noticed(build, moe_server, tiny_moe_path):
    trainer = build(tiny_moe_path, max_steps=3, top_k=20, learning_rate=1e-2, **server_settings(moe_server))
    generation = trainer.vllm_generation
    sync, done = generation.sync_weights, []

    def sync_once():
        if not done:
            sync()
        done.append(None)

    generation.sync_weights = sync_once
    with pytest.raises(ReplayGapError, match="holds the weights of step 0 while the policy is at step 1"):
        trainer.train()


def test_samples_of_other_weights_stop_the_run(build, moe_server, tiny_moe_path, pool_of):
    """Another run that synchronises the same server."""
    other = pool_of(moe_server.url, api_key=moe_server.api_key)
    trainer = build(tiny_moe_path, max_steps=2, top_k=20, **server_settings(moe_server))
    sync = trainer.vllm_generation.sync_weights

    def sync_and_interfere():
        sync()
        other.set_weights("of-another-run", reload=False)

    trainer.vllm_generation.sync_weights = sync_and_interfere
    trainer.train()  # the request says which weights it wants, so the server loads them again
    assert all(entry["support/logprob_gap_max"] < 1e-4 for entry in steps(trainer))


@pytest.mark.parametrize("truncation", [{"top_k": 20, "top_p": 0.9}, {}], ids=["truncated", "whole vocabulary"])
def test_routes_come_from_the_server_too(build, moe_server, tiny_moe_path, truncation):
    settings = server_settings(moe_server)
    trainer = build(tiny_moe_path, max_steps=3, routed_experts_replay=True, **truncation, **settings)
    trainer.train()
    log = steps(trainer)
    assert len(log) == 3 and all(entry["support/logprob_gap_max"] < 1e-4 for entry in log)
    assert all(entry["routes/agreement"] > 0.99 for entry in log)


def test_turns_that_are_cut_have_the_routes_of_the_next_request(build, moe_server, tiny_moe_path):
    settings = server_settings(moe_server) | {"top_k": 20, "rollout_func": CUTS["observations behind the cut"]}
    trainer = build(tiny_moe_path, max_steps=2, routed_experts_replay=True, **settings)
    trainer.train()
    log = steps(trainer)
    assert len(log) == 2 and all(entry["support/logprob_gap_max"] < 1e-4 for entry in log)
    assert all(entry["routes/uncaptured"] <= 4 for entry in log)  # the last token of each completion


def test_a_further_turn_brings_only_new_routes(build, moe_server, tiny_moe_path):
    trainer = build(tiny_moe_path, top_k=20, routed_experts_replay=True, **server_settings(moe_server))
    generation = trainer.vllm_generation
    generation.sync_weights()
    asked = []
    generate = generation.pool.generate
    generation.pool.generate = lambda requests: asked.extend(requests) or generate(requests)
    recorder = SupportRecorder()
    trainer._pass = ScoringPass("generation", recorder=recorder)
    prompts = [[10, 20, 30, 40], [11, 21, 31]]
    _, first, first_logprobs, _ = generation.generate(prompts, None, num_generations=1)
    turns = [prompt + completion + [50, 60] for prompt, completion in zip(prompts, first, strict=True)]
    _, second, second_logprobs, _ = generation.generate(turns, None, num_generations=1)
    fresh = [request.routes_start for request in asked]
    assert fresh == [0, 0, *(len(p) + len(c) - 1 for p, c in zip(prompts, first, strict=True))]
    for b, prompt in enumerate(prompts):
        values = [*(x for (x,) in first_logprobs[b]), 0.0, 0.0, *(x for (x,) in second_logprobs[b])]
        ids = turns[b] + second[b]
        routes = recorder.routes_of(recorder.row_indices(values), np.array(ids), len(prompt), "completion")
        assert len(routes) == len(ids) and routes.captured_prefix == len(ids) - 1 and routes.layers == (0, 2)
        whole = GenerateRequest(
            "whole", np.array(ids, np.int32), sampling={"max_tokens": 1}, support=False, routes_start=0
        )
        ((sample,),) = generate([whole])
        np.testing.assert_array_equal(routes.experts[:-1], sample.routes[: len(ids) - 1, [0, 2]])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"routed_experts_replay": True}, "--enable-return-routed-experts"),
        ({"support_capture": "native"}, "support_capture='native', but http"),
        ({"top_k": 0, "top_p": 0.9}, "top_k=0 cannot be replayed: http.* records supports only for a finite top_k"),
        ({}, "vllm-serve --weights-dir"),
    ],
)
def test_servers_that_do_not_fit_are_refused_at_construction(build, tiny_model_path, tmp_path, settings, says):
    with serving(HTTPServer(FakeEngine(enable_return_routed_experts=False))) as server:
        settings = {**SERVER, "vllm_server_base_url": server.url, "weight_sync_dir": str(tmp_path), **settings}
        with pytest.raises(ValueError, match=says):
            build(tiny_model_path, **{"top_k": 20, **settings})


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://localhost:8000", "http://head:8000"),
        ("https://me:secret@0.0.0.0/team", "https://me:secret@head/team"),
        ("http://elsewhere:8000", "http://elsewhere:8000"),
    ],
)
def test_other_nodes_look_for_a_local_server_on_the_main_one(url, seen):
    assert _seen_from_other_nodes(url, "head") == seen


TWO_CPU_RANKS = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: true
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: "no"
"""


def launch(folder, script, config, log):
    """`accelerate launch` of a script on two CPU processes."""
    (folder / "accelerate.yaml").write_text(TWO_CPU_RANKS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(folder / "accelerate.yaml"), "--main_process_port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return subprocess.Popen(
        [*command, str(script), json.dumps(config)], env=environment, stdout=log, stderr=subprocess.STDOUT
    )


def train_two_ranks(tmp_path, url, weights_dir, model, num_steps, disturb=lambda: None):
    config = {
        "model": str(model),
        "steps": num_steps,
        "out": str(tmp_path),
        "settings": {
            **SERVER,
            "vllm_server_base_url": url,
            "weight_sync_dir": str(weights_dir),
            "vllm_server_timeout": 400.0,
        },
    }
    with open(tmp_path / "log", "w") as log:
        process = launch(tmp_path, Path(__file__).parent / "train_worker.py", config, log)
        disturber = threading.Thread(target=disturb, daemon=True)
        disturber.start()
        code = process.wait(timeout=1500)
    assert code == 0, (tmp_path / "log").read_text()[-6000:]
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]


def check_two_ranks(ranks, num_steps):
    for rank in ranks:
        assert len(rank["steps"]) == num_steps
        assert max(rank["gaps"]) <= 1e-4, rank["gaps"]
        versions = rank["versions"]
        assert [version.rsplit("-")[-1] for version in versions] == [f"{i + 1:06d}" for i in range(num_steps)]
    assert ranks[0]["versions"] == ranks[1]["versions"]
    # Each rank has samples of its own; two short ones may come out alike by chance.
    first, second = (set(rank["tokens"]) for rank in ranks)
    assert len(first & second) < len(first) / 4
    for entry in ranks[0]["steps"]:
        assert entry["support/logprob_gap_max"] <= 1e-4
        for name in ("mean", "min", "max"):
            assert entry[f"sampling/importance_sampling_ratio_raw/{name}"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_train_against_one_server(smollm2_path, tmp_path):
    with VLLMServe(smollm2_path, weights_dir=tmp_path, flags=["--max-model-len", "512"]) as server:
        (tmp_path / "out").mkdir()
        ranks = train_two_ranks(tmp_path / "out", server.url, tmp_path, smollm2_path, num_steps=10)
    check_two_ranks(ranks, num_steps=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_train_on_through_faults_and_a_killed_server(smollm2_path, tmp_path):
    rng = random.Random(0)
    kinds = ["drop_request", "drop_response", "truncate", "flip", "flip_request", "status", "delay"]

    def faults():
        for i in itertools.count():
            yield Fault(rng.choice(kinds), rng.random(), seconds=1.0) if i % 3 == 2 else None

    with VLLMServe(smollm2_path, weights_dir=tmp_path, flags=["--max-model-len", "512"]) as server:
        proxy = FaultyProxy(server.port, faults())
        (tmp_path / "out").mkdir()
        restarts = []

        def restart():
            while proxy.exchanges < 12:
                time.sleep(0.1)
            time.sleep(0.5)
            server.kill()
            time.sleep(1)
            server.start(wait=False)
            restarts.append(proxy.exchanges)

        ranks = train_two_ranks(tmp_path / "out", proxy.url, tmp_path, smollm2_path, num_steps=6, disturb=restart)
        proxy.stop()
    assert restarts, "the run was over before the server could be killed"
    check_two_ranks(ranks, num_steps=6)
