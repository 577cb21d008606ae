"""Which routes `score` and `audit` take: the recorded ones where there are some, and they say so."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.cli.conftest import run_cli
from trl_support_replay.analysis.audit.token_scores import routes_for
from trl_support_replay.routing import RouteBatch, RouterReplay
from trl_support_replay.traces.columns import Trace, table_to_traces, traces_to_table
from trl_support_replay.traces.routes import RoutedExperts
from trl_support_replay.traces.shards import ShardFolder
from trl_support_replay.traces.support import SupportRows

SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": 0}


def log_softmax(model, trace, replay):
    """`[T, V]` by the model itself, at the sampler's temperature."""
    ids = torch.tensor(np.concatenate([trace.prompt_ids, trace.completion_ids]))[None].long()
    with torch.no_grad():
        if replay is None:
            logits = model(ids).logits
        else:
            with replay.scope(RouteBatch.from_samples([trace.routes], [0], ids.shape[1])):
                logits = model(ids).logits
    return (logits[0, len(trace.prompt_ids) - 1 : -1] / SAMPLING["temperature"]).log_softmax(-1)


def over_support(full, trace):
    """`[T]` log-probs over the supports; over the vocabulary where there is none."""
    values = []
    for row, token, support in zip(full, trace.completion_ids, trace.supports.to_lists(), strict=True):
        values.append((row[token] - (torch.logsumexp(row[support], 0) if support else 0)).item())
    return np.array(values)


@pytest.fixture(scope="module")
def routed(moe_path, tmp_path_factory):
    """Traces of experts that no router of the model would choose; the last of them ends unsampled."""
    model = AutoModelForCausalLM.from_pretrained(moe_path).eval()
    replay = RouterReplay(model)
    rng = np.random.default_rng(0)
    traces = []
    for i in range(5):
        num = int(rng.integers(6, 12))
        experts = np.stack([[rng.permutation(8)[:2] for _ in replay.layers] for _ in range(4 + num)])
        routes = RoutedExperts(experts, num_experts=8, layers=replay.layers, captured=np.arange(4 + num) < 3 + num)
        rows = [rng.choice(np.arange(3, 99), 9, replace=False).tolist() for _ in range(num)]
        ids = np.array([row[0] for row in rows], np.int32)
        if i == 4:
            rows[-1] = []
        trace = Trace(
            rng.integers(3, 99, 4).astype(np.int32),
            ids,
            np.ones(num, bool),
            np.zeros(num, np.float32),
            SupportRows.from_ragged(rows),
            routes,
        )
        logprobs = over_support(log_softmax(model, trace, replay), trace).astype(np.float32)
        if i == 4:
            logprobs[-1] = np.nan
        traces.append(Trace(trace.prompt_ids, ids, trace.loss_mask, logprobs, trace.supports, routes))
    folder = ShardFolder(tmp_path_factory.mktemp("routed") / "traces")
    folder.write(traces_to_table(traces, model="moe", sampling=SAMPLING, engine={}), 0)
    return folder.path


def scored(folder):
    (path,) = folder.glob("*.parquet")
    return pq.read_table(path)


def test_score_replays_recorded_routes_in_every_column(routed, moe_path, tmp_path, capsys):
    arguments = ("--traces", routed, "--model", moe_path, "--reference", moe_path, "--output", tmp_path / "scored")
    code, text = run_cli(capsys, "score", *arguments)
    assert code == 0 and "more than rounding" not in text, text
    assert "--model is scored through the recorded experts." in text
    table = scored(tmp_path / "scored")
    model = AutoModelForCausalLM.from_pretrained(moe_path).eval()
    replay = RouterReplay(model)
    live_gap = 0.0
    for i, trace in enumerate(table_to_traces(table)):
        recorded = trace.supports.sizes > 0
        full = log_softmax(model, trace, replay)
        sampled = full.gather(-1, torch.tensor(trace.completion_ids).long()[:, None])[:, 0].numpy()
        supported = over_support(full, trace)
        for column, expected in {
            "replayed_logprobs": supported,
            "reference_logprobs": supported,
            "full_logprobs": sampled,
            "log_mass": sampled - supported,
        }.items():
            np.testing.assert_allclose(table[column][i].as_py(), expected, atol=2e-5, err_msg=column)
        np.testing.assert_allclose(supported[recorded], trace.sampling_logprobs[recorded], atol=2e-5)
        live_gap = max(live_gap, np.abs(over_support(log_softmax(model, trace, None), trace) - supported).max())
    assert live_gap > 0.1, "the live routers choose the same experts, so this showed nothing"


def test_traces_without_routes_go_through_the_live_routers_and_it_is_said(routed, moe_path, tmp_path, capsys):
    (path,) = routed.glob("*.parquet")
    table = pq.read_table(path)
    names = [name for name in table.column_names if name.startswith("routed_experts")] + ["num_experts", "trace_digest"]
    (tmp_path / "live").mkdir()
    pq.write_table(table.drop_columns(names), tmp_path / "live" / path.name)
    arguments = ("--traces", tmp_path / "live", "--model", moe_path)
    code, text = run_cli(capsys, "score", *arguments, "--output", tmp_path / "scored")
    assert code == 0 and "--model chooses the experts by its own routers, since the traces hold no routes" in text
    model = AutoModelForCausalLM.from_pretrained(moe_path).eval()
    table = scored(tmp_path / "scored")
    for i, trace in enumerate(table_to_traces(table)):
        expected = over_support(log_softmax(model, trace, None), trace)
        np.testing.assert_allclose(table["replayed_logprobs"][i].as_py(), expected, atol=2e-5)
    code, text = run_cli(capsys, "audit", *arguments, "--output", tmp_path / "audit")
    assert code == 1 and "--model chooses the experts by its own routers" in text


def test_it_is_said_how_many_traces_lack_routes(routed, moe_path):
    (path,) = routed.glob("*.parquet")
    traces = table_to_traces(pq.read_table(path))
    traces[0] = replace(traces[0], routes=None)
    replays, sentence = routes_for(traces, AutoModelForCausalLM.from_pretrained(moe_path))
    assert not replays and f"since 1 of {len(traces)} traces hold no routes" in sentence


def test_a_model_without_experts_scores_traces_with_routes(routed, tiny_model_path, tmp_path, capsys):
    arguments = ("--traces", routed, "--model", tiny_model_path, "--output")
    code, text = run_cli(capsys, "score", *arguments, tmp_path / "scored")
    assert code == 0 and "--model has no experts, so no routes are replayed" in text
    assert run_cli(capsys, "audit", *arguments, tmp_path / "audit")[0] == 1


@pytest.mark.parametrize("command", ["score", "audit"])
def test_traces_of_images_are_refused(routed, tmp_path, capsys, command):
    """A model of images and text, of which only the part for text is loaded, still knows the ids of images."""
    (path,) = routed.glob("*.parquet")
    image = int(pq.read_table(path)["prompt_ids"][2].as_py()[1])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 99, "num_key_value_heads": 1, "head_dim": 8, "layer_types": ["full_attention"]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=image, tie_word_embeddings=False)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "vlm")
    arguments = ("--traces", routed, "--model", tmp_path / "vlm", "--output", tmp_path / "out")
    code, text = run_cli(capsys, command, *arguments)
    assert code == 2 and f"id {image}, the image_token_id of qwen3_5" in text and "carry no images" in text
