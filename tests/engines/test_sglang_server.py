"""SGLang's `/generate` protocol, spoken with a local server that speaks it. The engine itself does not run here."""

from __future__ import annotations

import pathlib

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM

from trl_support_replay.checks.replay_check import ReplayGapError
from trl_support_replay.cli.main import main as command
from trl_support_replay.client.pool import GenerationError, new_request_id
from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.engines.sglang_server import SGLangRollout, connect_sglang
from trl_support_replay.settings.contract import UnreplayableSettingError
from trl_support_replay.traces.columns import table_to_traces
from trl_support_replay.traces.support import SupportRows
from trl_support_replay.wire.protocol import GenerateRequest

from ..server.conftest import QUICK
from ..server.fakes import AppServer, foretold, serving


class SGLang:
    """The documented part of an SGLang server.

    Args:
        info: path of the server's description.
        facts: what it tells beside its version; by default, as a release with `--sampling-mask-max-tokens`.

    Attributes:
        requests: bodies of the generation requests.
        change: applied to each output before it is sent.
    """

    def __init__(self, info="/server_info", **facts):
        self.facts = facts or {"sampling_mask_max_tokens": 4096, "speculative_algorithm": None}
        self.requests, self.loaded = [], []
        self.version = "default"
        self.change = lambda output: None
        self.app = Starlette(
            routes=[
                Route(info, lambda request: JSONResponse({"model_path": "fake", "version": "0.5.20", **self.facts})),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/update_weights_from_disk", self.load, methods=["POST"]),
            ]
        )

    async def generate(self, request):
        body = orjson.loads(await request.body())
        self.requests.append(body)
        sampling = body["sampling_params"]
        known = {"temperature", "top_p", "top_k", "min_p", "max_new_tokens", "n", "stop_token_ids", "ignore_eos"}
        known.add("sampling_seed")
        assert sampling.keys() <= known and sampling["top_k"] != 0
        capacity = self.facts.get("sampling_mask_max_tokens", 1 << 30)
        if body["return_sampling_mask"] and not 1 <= sampling["top_k"] <= capacity:
            return refusal("return_sampling_mask requires a finite top_k within sampling_mask_max_tokens")
        outputs = []
        for i in range(sampling["n"]):
            tokens, logprobs, rows = self.answer(body, i)
            meta = {
                "id": body["rid"],
                "finish_reason": {"type": "length", "length": len(tokens)},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(tokens),
                "weight_version": self.version,
            }
            if body["return_logprob"]:
                meta["output_token_logprobs"] = [[float(x) - 1, t, None] for x, t in zip(logprobs, tokens, strict=True)]
            if body["return_sampling_mask"]:
                if max(rows.sizes) > capacity:
                    return refusal("the sampling support is larger than sampling_mask_max_tokens")
                meta["output_token_sampling_mask"] = rows.to_lists()
                meta["output_token_sampling_logprobs"] = logprobs.tolist()
                meta["output_token_sampling_mask_length"] = len(tokens)
            output = {"text": "", "output_ids": tokens, "meta_info": meta}
            self.change(output)
            outputs.append(output)
        return JSONResponse(outputs if sampling["n"] > 1 else outputs[0])

    def answer(self, body, index):
        sampling = body["sampling_params"]
        top_k = min(sampling["top_k"], 40) if sampling["top_k"] > 0 else 40
        return foretold(body["input_ids"], index, sampling["max_new_tokens"], top_k, self.version)[:3]

    async def load(self, request):
        body = orjson.loads(await request.body())
        self.loaded.append(body)
        self.version = body["weight_version"]
        return JSONResponse({"success": True, "message": "", "num_paused_requests": 0})


def refusal(message):
    return JSONResponse({"error": {"message": message}}, status_code=400)


@pytest.fixture
def sglang():
    fake = SGLang()
    with serving(AppServer(fake.app)) as server:
        fake.url = server.url
        yield fake


async def connect(transport):
    return await connect_sglang(transport, weights_dir="/shared")


@pytest.fixture
def pool(sglang, pool_of):
    return pool_of(sglang.url, connect=connect)


def request(prompt=(5, 6), n=1, support=True, version=None, **sampling):
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "max_tokens": 9} | sampling
    return GenerateRequest(
        new_request_id(), np.array(prompt, np.int32), n, sampling, support=support, weights_version=version
    )


def test_top_p_without_top_k_is_recorded_exactly(pool, sglang):
    requests = [request(prompt=[i, 3], n=1 + i) for i in range(3)]
    for asked, samples in zip(requests, pool.generate(requests), strict=True):
        assert len(samples) == asked.n
        for i, sample in enumerate(samples):
            tokens, logprobs, rows, _ = foretold(asked.prompt_ids, i, 9, 40, "default")
            assert sample.token_ids.tolist() == tokens and sample.support == rows
            np.testing.assert_array_equal(sample.logprobs, logprobs)
    # The server wants a bound: one below its own, which leaves room for candidates that tie with the last.
    assert {body["sampling_params"]["top_k"] for body in sglang.requests} == {3584}
    assert all(body["return_sampling_mask"] and not body["return_logprob"] for body in sglang.requests)


@pytest.mark.parametrize("facts", [{}, {"sampling_mask_max_tokens": 8}])
def test_a_bound_that_does_not_fit_is_refused_before_a_request(build, tiny_model_path, pool_of, facts):
    """At construction of the trainer, and for each request: the server would answer with an error in the first step."""
    fake = SGLang(version="0.5.16", **facts)
    asked = {"top_k": 9} if facts else {"top_p": 0.8}
    says = "at most 8 candidates" if facts else "only for a finite top_k"
    with serving(AppServer(fake.app)) as server:
        with pytest.raises(UnreplayableSettingError, match=f"^top_k=.*{says}"):
            build(tiny_model_path, rollout_func=SGLangRollout([server.url], retry=QUICK), **asked)
        with pytest.raises(GenerationError, match=says):
            pool_of(server.url, connect=connect).generate([request(**asked)])
        assert not fake.requests
        assert build(tiny_model_path, rollout_func=SGLangRollout([server.url], retry=QUICK), top_k=8)


def test_the_old_name_of_the_description_is_asked_for_as_well(pool_of):
    fake = SGLang(info="/get_server_info", sampling_mask_max_tokens=4096)
    with serving(AppServer(fake.app)) as server:
        assert pool_of(server.url, connect=connect).servers[0].info["max_top_k"] == 4096


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm='EAGLE' cannot be replayed"),
        ({"dllm_algorithm": "LowConfidence"}, "dllm_algorithm='LowConfidence' cannot be replayed"),
        ({"preferred_sampling_params": '{"repetition_penalty": 1.1}'}, "it shifts logits"),
        ({"preferred_sampling_params": {"new_knob": 1}}, "it is unknown here"),
    ],
)
def test_settings_of_the_server_that_change_the_distribution_are_refused(build, tiny_model_path, facts, says):
    with serving(AppServer(SGLang(sampling_mask_max_tokens=4096, **facts).app)) as server:
        with pytest.raises(UnreplayableSettingError, match=f"^{server.url}: .*{says}"):
            build(tiny_model_path, rollout_func=SGLangRollout([server.url], retry=QUICK), top_k=8)


def test_evaluation_never_asks_for_masks(pool, sglang):
    ((sample,),) = pool.generate([request(support=False, temperature=0.0)])
    assert sample.support is None and len(sample.logprobs) == len(sample.token_ids)
    (body,) = sglang.requests
    assert body["return_logprob"] and not body["return_sampling_mask"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("frequency_penalty", 0.1), ("repetition_penalty", 1.1), ("logit_bias", {"1": 2.0}), ("regex", "a+"), ("knob", 1)],
)
def test_what_the_trainer_does_not_repeat_is_refused(pool, sglang, name, value):
    with pytest.raises(GenerationError) as error:
        pool.generate([request(**{name: value})])
    assert isinstance(error.value.__cause__, UnreplayableSettingError) and name in str(error.value)
    with pytest.raises(UnreplayableSettingError, match=name):
        SGLangRollout([sglang.url], sampling_params={name: value})
    assert not sglang.requests


def test_what_removes_tokens_needs_supports(build, tiny_model_path, sglang):
    """With nothing truncated no supports are asked for, and the trainer scores over the whole vocabulary."""
    rollout = SGLangRollout([sglang.url], sampling_params={"min_new_tokens": 3}, retry=QUICK)
    trainer = build(tiny_model_path, rollout_func=rollout)
    with pytest.raises(UnreplayableSettingError, match="min_new_tokens.*since none of its own settings cuts any"):
        trainer.train()
    assert not sglang.requests


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.7), ("top_p", 0.5), ("top_k", 5), ("min_p", None)])
def test_what_the_trainer_decides_is_not_taken_from_sampling_params(sglang, name, value):
    with pytest.raises(UnreplayableSettingError, match=rf"sampling_params\['{name}'\]={value}.* Set {name} there"):
        SGLangRollout([sglang.url], sampling_params={name: value})


def drop(*names):
    def change(output):
        for name in names:
            del output["meta_info"][name]

    return change


def edit(name, value):
    return lambda output: output["meta_info"].update({name: value(output["meta_info"].get(name))})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("output_token_sampling_mask"), "return_sampling_mask"),
        (drop("output_token_sampling_logprobs"), "return_sampling_mask"),
        (edit("output_token_sampling_mask", lambda mask: mask[:-1]), "masks for"),
        (edit("output_token_sampling_mask", lambda mask: [[], *mask[1:]]), "mask of token 0 is empty"),
        (edit("output_token_sampling_mask", lambda mask: [[999], *mask[1:]]), "the sampled id"),
        (edit("output_token_sampling_mask", lambda mask: [[*mask[0], mask[0][0]], *mask[1:]]), "more than once"),
        (edit("output_token_sampling_logprobs", lambda values: values[:-1]), "log-probs, not all finite"),
        (edit("output_token_sampling_logprobs", lambda values: [None, *values[1:]]), "log-probs, not all finite"),
        (edit("output_token_sampling_mask_truncated", lambda _: True), "--sampling-mask-max-tokens"),
    ],
)
def test_answers_without_whole_supports_are_refused(pool, sglang, change, says):
    sglang.change = change
    with pytest.raises(GenerationError, match=says) as error:
        pool.generate([request(prompt=[8, 8])])
    assert isinstance(error.value.__cause__, SupportCaptureError)
    assert len(sglang.requests) == 1, "asking again would not help"


def test_an_aborted_request_is_asked_for_again(pool, sglang):
    def abort_once(output):
        if len(sglang.requests) == 1:
            output["meta_info"]["finish_reason"] = {"type": "abort", "message": "preempted"}

    sglang.change = abort_once
    assert len(pool.generate([request()])) == 1
    assert len(sglang.requests) == 2


def test_samples_of_other_weights_are_refused(pool, sglang):
    pool.set_weights("run-000001", reload=True)
    assert sglang.loaded == [{"model_path": "/shared/run-000001", "weight_version": "run-000001", "flush_cache": True}]
    pool.generate([request(version="run-000001")])
    sglang.version = "default"
    with pytest.raises(GenerationError, match="weights default, and run-000001 is the policy's"):
        pool.generate([request(version="run-000001")])


class SGLangWithModel(SGLang):
    """Samples with a real model, whose weights it loads when told to."""

    def __init__(self, path):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    async def load(self, request):
        folder = pathlib.Path(orjson.loads(await request.body())["model_path"])
        tensors = {name: tensor for file in folder.iterdir() for name, tensor in load_file(file).items()}
        self.model.load_state_dict(tensors)
        return await super().load(request)

    @torch.no_grad()
    def sample(self, prompt_ids, sampling):
        ids, tokens, logprobs, rows = list(prompt_ids), [], [], []
        for _ in range(sampling["max_new_tokens"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1] / sampling["temperature"]
            probabilities, order = logits.softmax(-1).sort(descending=True)
            kept = probabilities.cumsum(0) - probabilities < sampling["top_p"]
            kept &= probabilities >= sampling["min_p"] * probabilities[0]
            if sampling["top_k"] > 0:
                kept &= torch.arange(len(kept)) < sampling["top_k"]
            support = order[kept]
            inside = logits[support].log_softmax(-1)
            chosen = int(torch.multinomial(inside.exp(), 1))
            tokens.append(int(support[chosen]))
            logprobs.append(float(inside[chosen]))
            rows.append(support.tolist())
            ids.append(tokens[-1])
            if tokens[-1] == self.model.config.eos_token_id:
                break
        return tokens, np.array(logprobs), SupportRows.from_ragged(rows)

    def answer(self, body, index):
        return self.sample(body["input_ids"], body["sampling_params"])


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9}])
def test_it_trains_as_a_rollout_func(build, tiny_model_path, tmp_path, truncation):
    fake = SGLangWithModel(tiny_model_path)
    with serving(AppServer(fake.app)) as server:
        rollout = SGLangRollout([server.url], str(tmp_path / "weights"), retry=QUICK)
        trainer = build(tiny_model_path, rollout_func=rollout, max_steps=3, **truncation)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "support/logprob_gap_max" in entry]
    assert len(log) == 3 and all(entry["support/logprob_gap_max"] < 1e-4 for entry in log)
    assert all(entry["sampling/importance_sampling_ratio_raw/mean"] == pytest.approx(1, abs=1e-3) for entry in log)
    assert any(entry["support/size_mean"] > 1 for entry in log)
    assert [body["weight_version"][-7:] for body in fake.loaded] == ["-000000", "-000001", "-000002"]
    assert {body["sampling_params"]["top_k"] for body in fake.requests} == {truncation.get("top_k", 3584)}
    assert [path.name for path in (tmp_path / "weights").glob("[!.]*")] == [fake.version]


def test_it_trains_a_second_time(build, tiny_model_path, tmp_path):
    """The steps begin anew, and the versions of the weights do not: those of the first training may still be there."""
    fake = SGLangWithModel(tiny_model_path)
    with serving(AppServer(fake.app)) as server:
        rollout = SGLangRollout([server.url], str(tmp_path / "weights"), retry=QUICK)
        trainer = build(tiny_model_path, rollout_func=rollout, max_steps=1, learning_rate=1e-2, top_p=0.8)
        trainer.train()
        trainer.train()
    assert [body["weight_version"][-7:] for body in fake.loaded] == ["-000000", "-000001"]
    assert trainer.state.log_history[0]["support/logprob_gap_max"] < 1e-4


def test_weights_that_are_not_synchronised_are_noticed(build, tiny_model_path):
    fake = SGLangWithModel(tiny_model_path)
    with serving(AppServer(fake.app)) as server:
        rollout = SGLangRollout([server.url], retry=QUICK)
        trainer = build(tiny_model_path, rollout_func=rollout, max_steps=3, learning_rate=1e-2, top_p=0.8)
        with pytest.raises(ReplayGapError):
            trainer.train()
    assert not fake.loaded


def test_generation_kwargs_do_not_reach_sglang_and_are_refused(build, tiny_model_path, sglang):
    trainer = build(
        tiny_model_path,
        rollout_func=SGLangRollout([sglang.url], retry=QUICK),
        top_p=0.8,
        generation_kwargs={"typical_p": 0.9},
    )
    with pytest.raises(UnreplayableSettingError, match="sampling_params"):
        trainer.train()
    assert not sglang.requests


def test_capture_writes_traces_from_the_server(tiny_model_path, tmp_path, capsys):
    """`trl-support-replay capture --engine sglang`."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "abc {i}"}}\n' for i in range(5)))
    fake = SGLangWithModel(tiny_model_path)
    with serving(AppServer(fake.app)) as server:
        arguments = ["capture", str(prompts), "--model", tiny_model_path, "--output", str(tmp_path / "traces")]
        arguments += ["--engine", "sglang", "--server_url", server.url, "--top_p", "0.8", "--num_generations", "2"]
        arguments += ["--max_tokens", "6", "--batch_size", "2"]
        assert command(arguments) == 0
        # It goes on with the same weights only.
        shard = sorted((tmp_path / "traces").glob("*.parquet"))[1]
        shard.unlink()
        fake.facts["weight_version"] = "other"
        assert command(arguments) == 2 and not shard.exists()
        assert "and this one has weights=[{'model': 'fake', 'weights_version': 'other'}]" in capsys.readouterr().err
        del fake.facts["weight_version"]
        assert command(arguments) == 0
    tables = [pq.read_table(path) for path in sorted((tmp_path / "traces").rglob("*.parquet"))]
    traces = [trace for table in tables for trace in table_to_traces(table)]
    assert len(tables) == 3 and len(traces) == 10
    for trace in traces:
        assert len(trace.supports) == len(trace.completion_ids) == len(trace.sampling_logprobs) > 0
        trace.supports.validate(vocab_size=99, sampled_ids=trace.completion_ids)
