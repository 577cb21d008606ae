"""The real vLLM on a CPU: what it says it routed is what the model routes, and replaying it closes the gap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parts import require
from tests.routing.moe_models import TOP_K, VOCABULARY, build_model, glm4_moe_config, qwen3_moe_config
from trl_support_replay.routing import RouteBatch, RouterReplay
from trl_support_replay.traces.routes import RoutedExperts

TOLERANCE = 1e-4
ROUTER_TIE = 1e-5


def prompts(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, size=n).tolist() for n in lengths]


def run_engine(folder: Path, model, replay, batches, **engine):
    """`[{name: array}]`, one dictionary per completion."""
    require("vllm")
    model.save_pretrained(folder / "model")
    job = {
        "model": str(folder / "model"),
        "results": str(folder / "results.npz"),
        "routers": {"layers": replay.layers, "num_experts": replay.num_experts, "top_k": replay.top_k},
        "engine": {"max_logprobs": 32, **engine},
        "batches": batches,
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("vllm_capture.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "job.json")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    completions: dict[int, dict] = {}
    with np.load(folder / "results.npz") as arrays:
        for key in arrays:
            number, _, name = key.partition("/")
            completions.setdefault(int(number), {})[name] = arrays[key]
    return [completions[i] for i in range(len(completions))]


def ids_of(found):
    return torch.from_numpy(np.concatenate([found["prompt"], found["tokens"]]))[None]


def own_routes(model, replay, ids):
    """`[S, L, k]` the model's own experts, and `[S, L]` whether the last one is (nearly) tied with the next."""
    scores = []
    hooks = [r.module.register_forward_hook(lambda m, a, out: scores.append(out[0])) for r in replay.routers]
    with replay.record() as recording, torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    ordered = torch.stack(scores, dim=1).float().softmax(-1).sort(dim=-1, descending=True).values
    return recording.experts(1)[0].numpy(), (ordered[..., TOP_K - 1] - ordered[..., TOP_K] < ROUTER_TIE).numpy()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """Captures of a Qwen3-MoE with a dense layer in the middle, prefill in chunks and cached prefixes."""
    model = build_model(qwen3_moe_config())
    replay = RouterReplay(model)
    long, short, other = prompts(100, 7, 33)
    first = {"prompts": [long, short, other], "sampling": {"n": 2, "top_k": 20, "logprobs": 24, "max_tokens": 12}}
    # The same prefix again, in a later batch: its keys and values, and its routes, come out of the cache.
    again = {**first, "prompts": [long, long[:96] + short]}
    later = {**again, "prompt_start": 90}
    found = run_engine(
        tmp_path_factory.mktemp("qwen3"),
        model,
        replay,
        [first, again, later],
        block_size=32,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    return model, replay, found


def test_captured_routes_are_the_models_own(qwen3):
    model, replay, found = qwen3
    assert len(found) == 2 * (3 + 2 + 2) and replay.layers == (0, 2, 3)
    compared = 0
    for completion in found:
        ids = ids_of(completion)
        own, tied = own_routes(model, replay, ids)
        captured = completion["captured"]
        same = (np.sort(own, axis=-1) == np.sort(completion["experts"], axis=-1)).all(-1)
        assert (same | tied)[captured].all()
        compared += int((~tied[captured]).sum())
    assert compared > 2500


def test_rows_are_all_there_and_dense_layers_are_zero(qwen3):
    _, _, found = qwen3
    for number, completion in enumerate(found):
        total = len(completion["prompt"]) + len(completion["tokens"])
        start = 90 if number >= 10 else 0
        assert completion["rows"].shape == (total - 1 - start, 4, TOP_K)
        assert not completion["rows"][:, 1].any()
        assert np.flatnonzero(completion["captured"]).tolist() == list(range(start, total - 1))


def test_prefixes_came_out_of_the_cache(qwen3):
    """Otherwise the tests above would say nothing of cached prefixes."""
    _, _, found = qwen3
    assert [int(completion["cached"]) for completion in found[2:4]] == [0, 0]
    assert all(completion["cached"] == 96 for completion in found[6:])


def test_replaying_the_captured_routes_gives_the_engines_logprobs(qwen3):
    model, replay, found = qwen3
    for completion in found[:6]:
        assert gap(model, replay, completion, replayed=True).max() < TOLERANCE


@pytest.mark.parametrize("control", ["tokens shifted by one", "samples swapped"])
def test_a_misplaced_capture_opens_the_gap(qwen3, control):
    model, replay, found = qwen3
    completion, sibling = dict(found[0]), found[1]
    if control == "samples swapped":
        # Both have the same prompt and length: only the routes of the completions differ.
        completion["experts"] = sibling["experts"]
    else:
        completion["experts"] = np.roll(completion["experts"], 1, axis=0)
        completion["captured"] = np.roll(completion["captured"], 1)
    assert gap(model, replay, completion, replayed=True).max() > 100 * TOLERANCE


def support_logprobs(logits, completion):
    """`[T]` log-probs of the sampled tokens, normalised over the recorded supports."""
    offsets = completion["support_offsets"]
    rows = [completion["support_ids"][a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    tokens = zip(logits, completion["tokens"], rows, strict=True)
    return torch.stack([z[token] - z[torch.from_numpy(row).long()].logsumexp(0) for z, token, row in tokens])


def gap(model, replay, completion, replayed):
    """`[T]` absolute difference to the engine's log-probs, supports replayed, routes replayed or live."""
    ids = ids_of(completion)
    routes = RoutedExperts(
        completion["experts"],
        num_experts=replay.num_experts,
        layers=replay.layers,
        captured=completion["captured"] & replayed,
    )
    with torch.no_grad(), replay.scope(RouteBatch.from_samples([routes], [0], ids.shape[1])):
        logits = model(input_ids=ids).logits[0].double()
    start = len(completion["prompt"])
    logprobs = support_logprobs(logits[start - 1 : ids.shape[1] - 1], completion)
    return (logprobs - torch.from_numpy(completion["logprobs"])).abs()


@pytest.mark.slow
def test_replay_closes_the_gap_of_an_engine_with_a_noisy_router(tmp_path):
    """The engine chooses other experts (noise in the bias that only the choice sees). Supports alone leave a gap."""
    model = build_model(glm4_moe_config())
    replay = RouterReplay(model)
    perturbed = build_model(glm4_moe_config())
    torch.manual_seed(1)
    for name, buffer in perturbed.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer), alpha=0.1)
    batch = {
        "prompts": prompts(20, 7, 33),
        "sampling": {"n": 2, "top_k": 20, "top_p": 0.9, "logprobs": 24, "max_tokens": 32},
    }
    found = run_engine(tmp_path, perturbed, replay, [batch])
    live = torch.cat([gap(model, replay, completion, replayed=False) for completion in found])
    replayed = torch.cat([gap(model, replay, completion, replayed=True) for completion in found])
    assert len(live) == 6 * 32
    assert live.mean() > 0.05 and live.max() > 0.5
    assert replayed.max() < TOLERANCE
