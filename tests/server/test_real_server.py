"""A real vLLM server, started by `vllm-serve`, against the same model in transformers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trl_support_replay.client.pool import GenerationError, new_request_id
from trl_support_replay.client.transport import Retry
from trl_support_replay.client.weights import VersionedWeights
from trl_support_replay.wire import protocol
from trl_support_replay.wire.protocol import GenerateRequest

TOLERANCE = 1e-4
PROMPTS = [[10 + i, 20, 30 + 2 * i, 40] for i in range(6)]


@pytest.fixture(scope="session")
def moe_model(tiny_moe_path):
    return AutoModelForCausalLM.from_pretrained(tiny_moe_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def first_weights(moe_server, moe_model):
    VersionedWeights(moe_server.weights_dir, "first").write("first-000001", moe_model.named_parameters())
    return "first-000001"


@pytest.fixture
def pool(moe_server, pool_of, first_weights):
    """The server, with the model's own weights whatever other tests have loaded."""
    pool = pool_of(moe_server.url, api_key=moe_server.api_key)
    pool.set_weights(first_weights, reload=True)
    return pool


def request(prompt, n=1, **kwargs):
    sampling = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_tokens": 24} | kwargs.pop("sampling", {})
    return GenerateRequest(new_request_id(), np.array(prompt, np.int32), n, sampling, **kwargs)


def replayed(model, prompt, sample, temperature=0.8):
    """`[T]` log-probs of a sample over its supports, in transformers."""
    ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    rows = [logits[t, torch.tensor(sample.support[t].astype(np.int64))] for t in range(len(sample.token_ids))]
    return np.array([(logits[t, int(sample.token_ids[t])] - rows[t].logsumexp(0)).item() for t in range(len(rows))])


def assert_replays(model, prompt, sample, temperature=0.8):
    np.testing.assert_allclose(replayed(model, prompt, sample, temperature), sample.logprobs, atol=TOLERANCE)


def expected_support(model, prompt, sample, top_k, top_p, temperature):
    """The rows that top-k and top-p leave, in transformers."""
    ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    kept = []
    for row in logits:
        values, order = row.topk(top_k)
        probabilities = values.softmax(0)
        kept.append(set(order[probabilities.cumsum(0) - probabilities < top_p].tolist()))
    return kept


def test_recorded_logprobs_and_supports_are_the_models(pool, moe_model):
    assert pool.servers[0].info["unreplayable"] == []  # read from the engine's own configuration
    requests = [request(prompt, n=2) for prompt in PROMPTS]
    tokens = exact = 0
    for asked, samples in zip(requests, pool.generate(requests), strict=True):
        prompt = asked.prompt_ids.tolist()
        for sample in samples:
            assert_replays(moe_model, prompt, sample)
            expected = expected_support(moe_model, prompt, sample, 20, 0.9, 0.8)
            exact += sum(set(row.tolist()) == want for row, want in zip(sample.support, expected, strict=True))
            tokens += len(sample.token_ids)
    # A cumulative mass within rounding of top_p may fall on either side.
    assert tokens > 100 and exact >= 0.98 * tokens


def test_a_request_may_have_its_own_top_k(pool, moe_model):
    requests = [request(PROMPTS[0], sampling={"top_k": k, "top_p": 1.0}) for k in (2, 7, 60)]
    for asked, (sample,) in zip(requests, pool.generate(requests), strict=True):
        assert set(sample.support.sizes) == {asked.sampling["top_k"]}
        assert_replays(moe_model, PROMPTS[0], sample)


@pytest.mark.parametrize("truncation", [{"top_p": 0.95}, {"top_p": 1.0, "min_p": 0.05}])
def test_without_a_top_k_supports_have_any_size(pool, moe_server, moe_model, truncation):
    assert pool.servers[0].capture == "worker" and not pool.servers[0].info["needs_top_k"]
    requests = [request(prompt, n=2, sampling={"top_k": 0, **truncation}) for prompt in PROMPTS]
    plain = request(PROMPTS[0], support=False, sampling={"top_k": 0, **truncation})
    *answers, (unrecorded,) = pool.generate([*requests, plain])
    sizes = []
    for asked, samples in zip(requests, answers, strict=True):
        for sample in samples:
            assert_replays(moe_model, asked.prompt_ids.tolist(), sample)
            assert sample.repaired == 0
            sizes += sample.support.sizes.tolist()
    assert max(sizes) > 24 and unrecorded.support is None


@pytest.mark.parametrize(
    "constraint",
    [
        {"structured_outputs": {"regex": "[a-z]{4,20}"}, "top_k": 20},
        {"structured_outputs": {"choice": ["red", "green", "grey"]}, "top_k": 0},
        {"allowed_token_ids": [40, 50, 60, 70], "top_k": 0},
        {"bad_words": ["a", "e"], "top_k": 20},
        {"min_tokens": 8, "stop_token_ids": [40, 50, 60], "top_k": 20},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
def test_what_a_constraint_leaves_is_the_support(pool, moe_model, constraint, record_property):
    requests = [request(prompt, sampling={"top_p": 1.0} | constraint) for prompt in PROMPTS]
    gaps = []
    for asked, (sample,) in zip(requests, pool.generate(requests), strict=True):
        gaps.append(np.abs(replayed(moe_model, asked.prompt_ids.tolist(), sample) - sample.logprobs).max())
        for name in set(constraint) & {"allowed_token_ids"}:
            assert (sample.support.sizes == 4).all() and set(sample.token_ids) <= set(constraint[name])
    record_property(f"gap, vLLM server, {next(iter(constraint))}", f"{max(gaps):.1e}")
    assert max(gaps) <= TOLERANCE


def test_stop_strings_and_stop_tokens_end_a_sample_where_they_stand(pool, moe_model):
    ((long,),) = pool.generate([request(PROMPTS[1], sampling={"seed": 5, "ignore_eos": True})])
    stop = int(long.token_ids[6])
    first = long.token_ids.tolist().index(stop)
    ((cut,),) = pool.generate([request(PROMPTS[1], sampling={"seed": 5, "ignore_eos": True, "stop_token_ids": [stop]})])
    assert cut.token_ids.tolist() == long.token_ids[: first + 1].tolist() and cut.finish_reason == "stop"
    assert len(cut.support) == len(cut.logprobs) == first + 1
    letter = chr(32 + stop - 4)
    ((text,),) = pool.generate([request(PROMPTS[1], sampling={"seed": 5, "ignore_eos": True, "stop": letter})])
    assert text.finish_reason == "stop" and len(text.support) == len(text.token_ids) <= first + 1
    assert_replays(moe_model, PROMPTS[1], text)


def test_routes_are_the_models(pool, moe_model):
    ((sample,),) = pool.generate([request(PROMPTS[2], routes_start=0)])
    ids = [*PROMPTS[2], *sample.token_ids.tolist()]
    with torch.no_grad():
        router_logits = moe_model(torch.tensor([ids]), output_router_logits=True).router_logits
    expected = [logits.topk(2, dim=-1).indices[:-1].sort(-1).values.numpy() for logits in router_logits]
    assert sample.routes.shape == (len(ids) - 1, 3, 2) and sample.routes.dtype == np.uint8
    recorded = np.sort(sample.routes, axis=-1)
    np.testing.assert_array_equal(recorded[:, 0], expected[0])
    np.testing.assert_array_equal(recorded[:, 2], expected[1])
    assert (recorded[:, 1] == 0).all()  # the dense layer


def test_twenty_turns_transfer_each_route_once(pool):
    """A growing conversation: side data per turn depends on the turn, not on what came before."""
    conversation, known, rows, side_data = list(PROMPTS[3]), 0, [], []
    for turn in range(20):
        asked = request(conversation, routes_start=known, sampling={"max_tokens": 16, "ignore_eos": True})
        ((sample,),) = pool.generate([asked])
        body = protocol.encode_samples(asked.request_id, [sample])
        side_data.append(len(body))
        rows.append(sample.routes)
        conversation = [*conversation, *sample.token_ids.tolist()]
        known = len(conversation) - 1  # the last token has not entered the model yet
        assert sum(map(len, rows)) == known
        conversation += [50 + turn, 60, 70]
    assert max(side_data[1:]) < 1.25 * min(side_data[1:]), side_data
    ((whole,),) = pool.generate([request(conversation, routes_start=0, sampling={"max_tokens": 1})])
    np.testing.assert_array_equal(np.concatenate(rows), whole.routes[:known])


def test_reloaded_weights_are_the_ones_that_generate(pool, pool_of, moe_server, moe_model, tiny_moe_path):
    changed = AutoModelForCausalLM.from_pretrained(tiny_moe_path, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    writer = VersionedWeights(moe_server.weights_dir, "real")
    versions = {"real-000001": changed, "real-000002": moe_model}
    for version, model in versions.items():
        writer.write(version, model.named_parameters())
        pool.set_weights(version, reload=True)
        other = moe_model if model is changed else changed
        requests = [request(prompt, weights_version=version) for prompt in PROMPTS]
        gaps = []
        for asked, (sample,) in zip(requests, pool.generate(requests), strict=True):
            prompt = asked.prompt_ids.tolist()
            assert sample.weights_version == version
            assert_replays(model, prompt, sample)
            gaps.append(np.abs(replayed(other, prompt, sample) - sample.logprobs).max())
        assert max(gaps) > 100 * TOLERANCE, "the two versions must differ for this to mean anything"
    with pytest.raises(GenerationError, match="There is no version real-000009"):
        impatient = pool_of(
            moe_server.url, api_key=moe_server.api_key, retry=Retry(give_up_after=0.2, first_delay=0.05)
        )
        impatient.generate([request(PROMPTS[0], weights_version="real-000009")])


def ordinary(moe_server, max_tokens):
    """Token ids of an ordinary greedy completion."""
    body = {
        "model": "tiny",
        "prompt": [PROMPTS[0]],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"Authorization": f"Bearer {moe_server.api_key}"}
    url = moe_server.url + "/v1/completions"
    (choice,) = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).json()["choices"]
    assert choice["logprobs"] is None
    return choice["token_ids"]


def test_ordinary_requests_are_served_as_ever(moe_server):
    assert len(ordinary(moe_server, max_tokens=5)) == 5
    assert httpx.get(moe_server.url + "/v1/models", trust_env=False).status_code == 401  # by vLLM's own guard


def test_ordinary_requests_finish_on_the_weights_they_began_with(pool, moe_server, moe_model):
    writer = VersionedWeights(moe_server.weights_dir, "swap")
    halved = [
        (name, tensor * 0.5 if "lm_head" not in name else -tensor) for name, tensor in moe_model.named_parameters()
    ]
    writer.write("swap-000001", halved)
    alone = ordinary(moe_server, max_tokens=300)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(ordinary, moe_server, 300)
        time.sleep(0.3)
        pool.set_weights("swap-000001", reload=True)
        assert running.done(), "a reload lets running requests finish first"
        assert running.result() == alone
    assert ordinary(moe_server, max_tokens=300) != alone


def test_a_client_that_hangs_up_frees_the_engine(pool, moe_server):
    def running():
        lines = httpx.get(moe_server.url + "/metrics", trust_env=False).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    body = protocol.encode_request(request(PROMPTS[0], n=8, sampling={"max_tokens": 900, "ignore_eos": True}))
    headers = {"Authorization": f"Bearer {moe_server.api_key}"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(moe_server.url + protocol.GENERATE, content=body, headers=headers, timeout=1.0, trust_env=False)
    deadline = time.monotonic() + 4  # finishing all 900 tokens would take longer
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running() == 0


@pytest.mark.parametrize("path", [protocol.GENERATE, protocol.RELOAD, protocol.LABEL])
def test_the_servers_key_guards_the_endpoint(moe_server, path):
    assert httpx.post(moe_server.url + path, content=b"{}", trust_env=False).status_code == 401
