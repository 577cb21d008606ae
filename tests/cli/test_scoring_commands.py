"""`score`, `audit` and `inspect` on traces, models and options that do not fit: each is named in one line."""

import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import run_cli
from trl_support_replay.traces.digest import DIGEST
from trl_support_replay.traces.shards import ShardFolder


@pytest.fixture(scope="module")
def other_model(tiny_model_path, tmp_path_factory):
    """Of the same vocabulary, with other weights."""
    path = tmp_path_factory.mktemp("models") / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small_model(tiny_model_path, tmp_path_factory):
    """With 40 of the 99 ids."""
    path = tmp_path_factory.mktemp("models") / "small"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    model.resize_token_embeddings(40)
    model.save_pretrained(path)
    return path


def shard_of(captured, folder, edit):
    """The first shard in a folder of its own, with the table changed on purpose, and so without its digests."""
    folder.mkdir()
    path = ShardFolder(captured).shards()[0]
    pq.write_table(edit(pq.read_table(path)).drop_columns([DIGEST]), folder / path.name)
    return folder


def replaced(table, name, values, kind=None):
    column = pa.array(values, kind)
    if name not in table.column_names:
        return table.append_column(name, column)
    return table.set_column(table.column_names.index(name), name, column)


def score(captured, model, output):
    return ("score", "--traces", captured, "--model", model, "--output", output)


def test_score_goes_on_only_with_what_it_began_with(captured, tiny_model_path, other_model, tmp_path, capsys):
    first = score(captured, tiny_model_path, tmp_path / "scored")
    code, text = run_cli(capsys, *first)
    assert code == 0, text
    held = {path.name: path.read_bytes() for path in (tmp_path / "scored").iterdir()}
    for change, message in (
        (
            ("--model", other_model),
            f"holds a score with model='{tiny_model_path}', model_files=",
        ),
        (("--dtype", "bfloat16"), "dtype='float32', and this one has dtype='bfloat16'"),
        (("--reference", other_model), f"this one has reference='{other_model}', reference_files="),
        (("--traces", ShardFolder(captured).shards()[0]), "and this one has traces="),
    ):
        code, text = run_cli(capsys, *first, *change)
        assert code == 2 and message in text and "Take another --output" in text
    assert held == {path.name: path.read_bytes() for path in (tmp_path / "scored").iterdir()}
    assert run_cli(capsys, *first, "--batch_size", 3)[0] == 0
    (tmp_path / "scored" / "score.json").unlink()
    code, text = run_cli(capsys, *first)
    assert code == 2 and "no score.json" in text


def test_score_does_not_mix_the_weights_that_a_folder_has_held(
    captured, tiny_model_path, other_model, tmp_path, capsys
):
    shutil.copytree(tiny_model_path, tmp_path / "model")
    assert run_cli(capsys, *score(captured, tmp_path / "model", tmp_path / "scored"))[0] == 0
    shutil.copy(other_model / "model.safetensors", tmp_path / "model")
    code, text = run_cli(capsys, *score(captured, tmp_path / "model", tmp_path / "scored"))
    assert code == 2 and "holds a score with model_files=" in text


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_record_that_cannot_be_read_is_named(captured, tiny_model_path, tmp_path, capsys, text):
    folder = shard_of(captured, tmp_path / "scored", lambda table: table)
    (folder / "score.json").write_text(text)
    code, printed = run_cli(capsys, *score(captured, tiny_model_path, folder))
    assert code == 2 and "score.json cannot be read" in printed and "Take another --output" in printed


def test_tokens_outside_the_loss_are_not_compared(captured, tiny_model_path, tmp_path, capsys):
    def masked(table):
        masks = table["loss_mask"].to_pylist()
        masks[0] = [False] * len(masks[0])
        return replaced(table, "loss_mask", masks, table.schema.field("loss_mask").type)

    traces = shard_of(captured, tmp_path / "traces", masked)
    code, text = run_cli(capsys, *score(traces, tiny_model_path, tmp_path / "scored"))
    assert code == 0 and "nan" not in text and "more than rounding" not in text


def test_a_folder_has_no_revision(captured, tiny_model_path, tmp_path, capsys):
    arguments = ("audit", *score(captured, tiny_model_path, tmp_path / "out")[1:], "--sampler_revision", "x")
    code, text = run_cli(capsys, *arguments)
    assert code == 2 and "is a folder, and a revision (x) belongs to a name on the Hub" in text


def test_damaged_weights_are_named(captured, tiny_model_path, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model_path, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, text = run_cli(capsys, *score(captured, damaged, tmp_path / "out"))
    assert code == 2 and f"--model {damaged} cannot be loaded; give a folder with a causal language model" in text


def test_score_finds_that_a_shard_has_changed(captured, tiny_model_path, tmp_path, capsys):
    traces = shard_of(captured, tmp_path / "traces", lambda table: table)
    assert run_cli(capsys, *score(traces, tiny_model_path, tmp_path / "scored"))[0] == 0
    (path,) = traces.iterdir()
    pq.write_table(pq.read_table(ShardFolder(captured).shards()[1]), path)
    code, text = run_cli(capsys, *score(traces, tiny_model_path, tmp_path / "scored"))
    assert code == 2 and f"holds the scores of other traces than {path} does now" in text


def test_score_does_not_write_among_the_traces(captured, tiny_model_path, tmp_path, capsys):
    code, text = run_cli(capsys, *score(captured, tiny_model_path, captured / ".." / captured.name))
    assert code == 2 and "is where --traces" in text
    code, text = run_cli(capsys, *score(ShardFolder(captured).shards()[0], tiny_model_path, captured))
    assert code == 2 and "is where --traces" in text
    assert not (captured / "score.json").exists()
    scored = shard_of(captured, tmp_path / "t", lambda t: replaced(t, "log_mass", [[0.0]] * len(t)))
    code, text = run_cli(capsys, *score(scored, tiny_model_path, tmp_path / "again"))
    assert code == 2 and "names of scores already: log_mass" in text


@pytest.mark.parametrize("command", ["score", "audit"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--batch_size", 0), "--batch_size: 0 is not a whole number of 1 or more"),
        (("--dtype", "float99"), "--dtype: invalid choice: 'float99' (choose from"),
        (("--model", "no/such/folder"), "--model no/such/folder cannot be loaded; give a folder"),
        (("--device", "gpu:0"), "device='gpu:0' is not available here ("),
        (("--device", "xpu"), "device='xpu' is not available here ("),
        (("--output", __file__), f"--output {__file__} is not a folder that can be written (File exists)"),
    ],
)
def test_options_that_scoring_cannot_follow_are_named(
    captured,
    tiny_model_path,
    tmp_path,
    capsys,
    command,
    change,
    message,
):
    arguments = (command, *score(captured, tiny_model_path, tmp_path / "out")[1:])
    code, text = run_cli(capsys, *arguments, *change)
    assert code == 2 and message in text and text.count("error: ") == 1
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("command", "option"),
    [("score", "--model"), ("score", "--reference"), ("audit", "--model"), ("audit", "--sampler")],
)
def test_a_model_of_another_vocabulary_is_named(
    captured,
    tiny_model_path,
    small_model,
    tmp_path,
    capsys,
    command,
    option,
):
    arguments = (command, *score(captured, tiny_model_path, tmp_path / "out")[1:], option, small_model)
    code, text = run_cli(capsys, *arguments)
    assert code == 2
    found = re.search(rf"{option} {small_model} has a vocabulary of 40 ids, and the traces hold the id (\d+)", text)
    assert found and 40 <= int(found[1]) < 99
    assert not list(tmp_path.glob("out/*.parquet"))


def test_score_names_the_steps_of_traces_that_training_saved(captured, other_model, tmp_path, capsys):
    traces = shard_of(captured, tmp_path / "t", lambda t: replaced(t, "step", np.arange(len(t)) // 2))
    code, text = run_cli(capsys, *score(traces, other_model, tmp_path / "scored"))
    assert code == 0 and "later steps were sampled with later weights" in text and "more than rounding" not in text
    (path,) = (tmp_path / "scored").glob("*.parquet")
    table = pq.read_table(path)
    gaps = [
        np.abs(np.subtract(*(np.concatenate(part[c].to_pylist()) for c in ("replayed_logprobs", "sampling_logprobs"))))
        for part in (table[:2], table[2:])
    ]
    assert f"mean by training step: 0: {gaps[0].mean():.2e}, 1: {gaps[1].mean():.2e}" in text


def no_sampling(table):
    return replaced(table, "sampling", [None] * len(table), table.schema.field("sampling").type)


def text_sampling(table):
    return replaced(table, "sampling", ["hot"] * len(table))


def zero_temperature(table):
    rows = [row | {"temperature": 0.0} for row in table["sampling"].to_pylist()]
    return replaced(table, "sampling", rows, table.schema.field("sampling").type)


@pytest.mark.parametrize("command", ["inspect", "score", "audit"])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (no_sampling, "row 0: sampling.temperature is None"),
        (text_sampling, "`sampling` is of type string"),
        (zero_temperature, "row 0: sampling.temperature is 0.0"),
    ],
)
def test_traces_without_a_temperature_are_named(
    captured,
    tiny_model_path,
    tmp_path,
    capsys,
    command,
    edit,
    message,
):
    traces = shard_of(captured, tmp_path / "t", edit)
    rest = () if command == "inspect" else ("--model", tiny_model_path, "--output", tmp_path / "out")
    code, text = run_cli(capsys, command, "--traces", traces, *rest)
    assert code == (1 if command == "inspect" else 2) and message in text


@pytest.mark.parametrize("value", [None, "3"])
def test_a_step_that_is_no_number_is_named(captured, tiny_model_path, tmp_path, capsys, value):
    traces = shard_of(captured, tmp_path / "t", lambda table: replaced(table, "step", [value] * len(table)))
    code, text = run_cli(capsys, "audit", *score(traces, tiny_model_path, tmp_path / "out")[1:])
    assert code == 2 and f"row 0: step={value!r} is not the number of a training step" in text


@pytest.mark.parametrize("command", ["score", "audit"])
def test_traces_without_a_sampling_column_are_named(captured, tiny_model_path, tmp_path, capsys, command):
    traces = shard_of(captured, tmp_path / "t", lambda table: table.drop_columns(["sampling"]))
    code, text = run_cli(capsys, command, "--traces", traces, "--model", tiny_model_path, "--output", tmp_path / "out")
    assert code == 2 and "has no `sampling` column" in text


@pytest.mark.parametrize("command", ["inspect", "score", "audit"])
def test_an_impossible_logprob_is_named(captured, tiny_model_path, tmp_path, capsys, command):
    def impossible(table):
        rows = table["sampling_logprobs"].to_pylist()
        rows[2][1] = -np.inf
        return replaced(table, "sampling_logprobs", rows, table.schema.field("sampling_logprobs").type)

    traces = shard_of(captured, tmp_path / "t", impossible)
    rest = () if command == "inspect" else ("--model", tiny_model_path, "--output", tmp_path / "out")
    code, text = run_cli(capsys, command, "--traces", traces, *rest)
    assert code == (1 if command == "inspect" else 2) and "row 2: token 1 has log-prob -inf" in text


def test_the_record_of_a_score_says_what_decides_it(captured, tiny_model_path, tmp_path, capsys):
    assert run_cli(capsys, *score(captured, tiny_model_path, tmp_path / "scored"))[0] == 0
    held = json.loads((tmp_path / "scored" / "score.json").read_text())
    assert len(held.pop("model_files")) == 16
    assert held.pop("routes") == "recorded"
    assert held == {"traces": str(captured), "model": tiny_model_path, "reference": None, "dtype": "float32"}
