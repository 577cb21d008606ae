"""`capture`, `score` and `inspect` on a real model."""

import json
import shutil
import subprocess

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.cli.conftest import CLI, capture, cli, cli_alone, run_cli
from trl_support_replay.cli.main import main
from trl_support_replay.traces.columns import table_to_traces
from trl_support_replay.traces.shards import ShardFolder


def all_traces(folder):
    return [trace for path in ShardFolder(folder).shards() for trace in table_to_traces(pq.read_table(path))]


def test_capture_writes_traces_of_every_prompt(captured):
    traces = all_traces(captured)
    assert len(traces) == 12 and [t.extra["answer"] for t in traces] == [a for a in (0, 1, 1, 2, 2, 3) for _ in "ab"]
    for trace in traces:
        trace.check(vocab_size=99)
    assert max(t.supports.sizes.max() for t in traces) > 1


def test_score_with_the_same_weights_gives_the_recorded_logprobs(captured, tiny_model_path, tmp_path):
    arguments = ("score", "--traces", captured, "--model", tiny_model_path, "--output", tmp_path / "scored")
    arguments += ("--reference", tiny_model_path)
    code, text = cli(*arguments)
    assert code == 0 and "largest" in text, text
    for path in sorted((tmp_path / "scored").glob("*.parquet")):
        table = pq.read_table(path)
        for trace, replayed, full, mass, reference in zip(
            table_to_traces(table),
            *(table[c].to_pylist() for c in ("replayed_logprobs", "full_logprobs", "log_mass", "reference_logprobs")),
            strict=True,
        ):
            np.testing.assert_allclose(replayed, trace.sampling_logprobs, atol=1e-4)
            np.testing.assert_allclose(reference, replayed, atol=1e-5)
            np.testing.assert_allclose(np.add(replayed, mass), full, atol=1e-5)
            assert (np.array(mass) <= 1e-6).all() and min(mass) < -1e-3
    # Going on where it was: nothing is left to do, and the figures are the same.
    figures = next(line for line in text.splitlines() if "replayed minus recorded" in line)
    assert figures in cli(*arguments)[1]


def test_capture_records_what_a_constraint_leaves(tiny_model_path, prompts, tmp_path, capsys):
    constraint = ("--top_p", 1.0, "--limit", 2, "--generation_kwargs", '{"suppress_tokens": [40, 50, 60]}')
    code, text = run_cli(capsys, *capture(tiny_model_path, prompts, tmp_path / "traces"), *constraint)
    assert code == 0, text
    for trace in all_traces(tmp_path / "traces"):
        assert (trace.supports.sizes == 96).all() and not {40, 50, 60} & set(trace.supports.token_ids.tolist())
    scored = ("score", "--traces", tmp_path / "traces", "--model", tiny_model_path, "--output", tmp_path / "scored")
    assert run_cli(capsys, *scored)[0] == 0
    for path in (tmp_path / "scored").glob("*.parquet"):
        table = pq.read_table(path)
        for trace, replayed in zip(table_to_traces(table), table["replayed_logprobs"].to_pylist(), strict=True):
            np.testing.assert_allclose(replayed, trace.sampling_logprobs, atol=1e-4)


def test_score_with_another_model_reports_the_difference(captured, tiny_model_path, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    model.lm_head.weight.data.mul_(0.9)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path / "other")
    code, text = cli("score", "--traces", captured, "--model", tmp_path / "other", "--output", tmp_path / "scored")
    assert code == 0 and "That is more than rounding" in text
    first = pq.read_table(sorted((tmp_path / "scored").glob("*.parquet"))[0])
    assert np.isfinite(np.concatenate(first["replayed_logprobs"].to_pylist())).all()


def test_inspect_counts_and_finds_nothing_wrong(captured, capsys):
    assert main(["inspect", "--traces", str(captured)]) == 0
    text = capsys.readouterr().out
    assert "3 files, 12 traces" in text and "support size: mean" in text and "top_p" in text


def test_inspect_names_row_and_token(captured, tmp_path, capsys):
    for path in ShardFolder(captured).shards():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    broken = sorted(tmp_path.glob("*.parquet"))[1]
    table = pq.read_table(broken)
    rows = table["support_ids"].to_pylist()
    rows[1][4] = [98] if rows[1][4] != [98] else [97]
    index = table.column_names.index("support_ids")
    table = table.set_column(index, "support_ids", pa.array(rows, table.schema.field(index).type))
    pq.write_table(table, broken)
    code, text = run_cli(capsys, "inspect", "--traces", tmp_path)
    assert code == 1 and f"{broken.name}: Row 1 is not what was saved (1 of 4 rows differ)" in text
    pq.write_table(table.drop_columns(["trace_digest"]), broken)
    code, text = run_cli(capsys, "inspect", "--traces", tmp_path)
    assert code == 1 and f"{broken.name}, row 1" in text and "4" in text


@pytest.mark.parametrize("name", ["sampling", "model"])
def test_inspect_names_columns_that_occur_twice(captured, tmp_path, capsys, name):
    table = pq.read_table(sorted(captured.glob("*.parquet"))[0])
    twice = pa.table([*table.columns, table[name]], names=[*table.column_names, name])
    pq.write_table(twice, tmp_path / "twice.parquet")
    code, text = run_cli(capsys, "inspect", "--traces", tmp_path)
    assert code == 1 and f"twice.parquet: The columns ['{name}'] occur more than once" in text


def test_inspect_of_nothing_and_of_torn_files(tmp_path, capsys):
    assert main(["inspect", "--traces", str(tmp_path)]) == 2
    (tmp_path / "traces-00000000-000-00000.parquet").write_bytes(b"PAR1 torn")
    assert main(["inspect", "--traces", str(tmp_path)]) == 2
    assert "is not whole Parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--top_p", 1.0), "Nothing cuts tokens"),
        (("--top_k", 1), "top_k=1 cannot be replayed"),
        (
            ("--engine", "vllm", "--top_k", 5, "--engine_kwargs", '{"spec_method": "ngram"}'),
            "vllm_engine_kwargs['spec_method']='ngram' cannot be replayed",
        ),
        (
            ("--generation_kwargs", '{"sequence_bias": [[[5], 1.0]]}'),
            "generation_kwargs['sequence_bias']=[[[5], 1.0]] can",
        ),
        (("--dataset", "missing.jsonl"), "cannot be read"),
        (("--seed", 5), "holds a capture with seed=0, and this one has seed=5"),
        (
            ("--seed", 5, "--top_k", 7),
            "holds a capture with top_k=0, seed=0, and this one has top_k=7, seed=5. Take another",
        ),
    ],
)
def test_capture_refuses_in_one_line(captured, tiny_model_path, prompts, capsys, change, message):
    assert main([*map(str, capture(tiny_model_path, prompts, captured)), *map(str, change)]) == 2
    assert message in capsys.readouterr().err


def test_capture_reads_the_models_own_generation_defaults(tiny_model_path, prompts, tmp_path, capsys):
    """`generate` takes from them what is not stated: several stop ids, and settings that move logits."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    stops = list(range(30, 60))
    config = GenerationConfig(eos_token_id=stops, pad_token_id=0)
    config.save_pretrained(model)
    code, text = run_cli(capsys, *capture(model, prompts, tmp_path / "traces"))
    assert code == 0, text
    lengths = set()
    for trace in all_traces(tmp_path / "traces"):
        ids = trace.completion_ids.tolist()
        assert not set(ids[:-1]) & set(stops)
        lengths.add(len(ids))
    assert len(lengths) > 1
    config.sequence_bias = {(7,): 3.0}
    config.save_pretrained(model)
    code, text = run_cli(capsys, *capture(model, prompts, tmp_path / "biased"))
    assert code == 2 and "the model's generation_config.sequence_bias=" in text


def test_capture_reads_the_generation_defaults_of_older_models_too(tiny_model_path, prompts, tmp_path, capsys):
    """Without a `generation_config.json`, `from_pretrained` takes them from `config.json`."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"encoder_repetition_penalty": 1.5}))
    assert AutoModelForCausalLM.from_pretrained(model).generation_config.encoder_repetition_penalty == 1.5
    code, text = run_cli(capsys, *capture(model, prompts, tmp_path / "traces"))
    assert code == 2 and "the model's generation_config.encoder_repetition_penalty=1.5 cannot be replayed" in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "model.safetensors",
            b"\0" * 100,
            "cannot be loaded; give a folder with weights or a Hub name. SafetensorError:",
        ),
        ("tokenizer.json", b"{}", "has no tokenizer that can be loaded; give a folder or a Hub name. KeyError:"),
        (
            "tokenizer_config.json",
            b"[]",
            "has no tokenizer that can be loaded; give a folder or a Hub name. TypeError:",
        ),
        ("generation_config.json", b"[1]", "generation_config.json holds no settings"),
        ("chat_template.jinja", b"{{ 'a' + 3 }}", "refuses the prompt: can only concatenate str"),
    ],
)
def test_damaged_files_of_a_model_are_one_message(tiny_model_path, prompts, tmp_path, capsys, file, content, message):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    (model / file).write_bytes(content)
    code, text = run_cli(capsys, *capture(model, prompts, tmp_path / "traces"))
    assert code == 2 and message in text


def test_columns_of_several_types_are_refused_before_anything_is_sampled(tiny_model_path, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": "x"}\n')
    code, text = run_cli(capsys, *capture(tiny_model_path, tmp_path / "data.jsonl", tmp_path / "out"))
    assert code == 2 and "'answer'" in text and "Traceback" not in text
    assert not list(tmp_path.glob("out/*"))


def test_a_dataset_without_prompts_is_named(tiny_model_path, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"question": "?"}\n')
    assert main([*map(str, capture(tiny_model_path, tmp_path / "data.jsonl", tmp_path / "out"))]) == 2
    assert "has no `prompt` column; it has question" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--batch_size", 0), "--batch_size: 0 is not a whole number of 1 or more"),
        (("--limit", 0), "--limit: 0 is not"),
        (("--num_generations", -1), "--num_generations: -1 is not"),
        (("--max_tokens", "x"), "--max_tokens: x is not"),
        (("--temperature", "inf"), "--temperature: inf is not a number above 0"),
        (("--temperature", 0), "--temperature: 0 is not a number above 0"),
        (("--top_p", 1.5), "--top_p: 1.5 is not a probability above 0 and up to 1"),
        (("--top_p", "nan"), "--top_p: nan is not a probability"),
        (("--min_p", 1), "--min_p: 1 is not a probability"),
        (("--engine_kwargs", "[1]"), "--engine_kwargs: [1] is not a JSON object, as"),
        (("--engine_kwargs", "{eager"), "--engine_kwargs: {eager is not JSON: Expecting property name"),
        (("--engine_kwargs", '{"dtype": "float16"}'), "--engine_kwargs holds dtype='float16'. Give it as --dtype."),
        (("--engine_kwargs", '{"model": "other"}'), "--engine_kwargs holds model='other'. Give it as --model."),
        (("--dtype", "float99"), "--dtype: invalid choice: 'float99' (choose from"),
        (("--model", "no/such/folder"), "--model no/such/folder has no tokenizer that can be loaded"),
        (("--output", __file__), f"--output {__file__} is not a folder that can be written (File exists)"),
    ],
)
def test_options_that_capture_cannot_follow_are_named(tiny_model_path, prompts, tmp_path, capsys, change, message):
    code, text = run_cli(capsys, *capture(tiny_model_path, prompts, tmp_path / "out"), *change)
    assert code == 2 and message in text and "Traceback" not in text
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "cannot be read: it is empty"),
        ('{"prompt": ', "cannot be read"),
        ('{"prompt": "a"}\n{"prompt": null}', "row 1: prompt=None is neither text nor messages"),
        ('{"prompt": 5}', "row 0: prompt=5 is neither text nor messages"),
        ('{"prompt": []}', "row 0: prompt=[] is neither text nor messages"),
        ('{"prompt": [{"text": "a"}]}', "is neither text nor messages with a role"),
        ('{"prompt": "a"}\n{"prompt": ""}', "row 1: prompt='' has no tokens"),
        ('{"prompt": "a", "model": "b", "sampling": 1}', "traces fill themselves: model, sampling. Rename them"),
    ],
)
def test_datasets_that_capture_cannot_follow_are_named(tiny_model_path, tmp_path, capsys, lines, message):
    data = tmp_path / "data.jsonl"
    data.write_text(lines)
    code, text = run_cli(capsys, *capture(tiny_model_path, data, tmp_path / "out"))
    assert code == 2 and message in text and f"--dataset {data}" in text
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("edit", ["drop", "reorder", "answer"])
def test_a_capture_does_not_go_on_with_other_rows(captured, tiny_model_path, prompts, tmp_path, capsys, edit):
    output, before = tmp_path / "traces", prompts.read_text()
    shutil.copytree(captured, output)
    ShardFolder(output).shards()[-1].unlink()
    lines = before.splitlines()
    changed = {"drop": lines[1:], "reorder": lines[::-1], "answer": [lines[0].replace("0}", "7}"), *lines[1:]]}[edit]
    assert changed != lines
    try:
        prompts.write_text("\n".join(changed))
        code, text = run_cli(capsys, *capture(tiny_model_path, prompts, output))
    finally:
        prompts.write_text(before)
    assert code == 2 and ("dataset_rows=6" if edit == "drop" else "dataset_sha256=") in text
    code, text = run_cli(capsys, *capture(tiny_model_path, prompts, output))
    assert code == 0 and "2 of 3 shards are there already" in text
    assert [p.read_bytes() for p in ShardFolder(output).shards()] == [
        p.read_bytes() for p in ShardFolder(captured).shards()
    ]


def test_a_capture_that_failed_ties_the_folder_to_nothing(tiny_model_path, prompts, tmp_path, capsys):
    bare = tmp_path / "bare"  # a tokenizer without a model
    shutil.copytree(tiny_model_path, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    code, text = run_cli(capsys, *capture(bare, prompts, tmp_path / "out"))
    assert code == 2 and f"--model {bare} cannot be loaded; give a folder with weights" in text
    code, text = run_cli(capsys, *capture(tiny_model_path, prompts, tmp_path / "out"), "--limit", 1)
    assert code == 0, text
    assert len(all_traces(tmp_path / "out")) == 2


def test_capture_does_not_go_on_in_a_folder_of_other_traces(captured, tiny_model_path, prompts, tmp_path, capsys):
    shard = ShardFolder(captured).shards()[0]
    shutil.copy(shard, tmp_path)
    code, text = run_cli(capsys, *capture(tiny_model_path, prompts, tmp_path))
    assert code == 2 and "no capture.json" in text and (tmp_path / shard.name).exists()


def test_a_torn_shard_is_sampled_anew(captured, tiny_model_path, prompts, tmp_path, capsys):
    output = tmp_path / "traces"
    shutil.copytree(captured, output)
    whole = [path.read_bytes() for path in ShardFolder(output).shards()]
    first, second, _ = ShardFolder(output).shards()
    first.write_bytes(whole[0][: len(whole[0]) // 2])
    table = pq.read_table(second)
    logprobs = pa.array([[-0.5] * len(row) for row in table["sampling_logprobs"].to_pylist()], pa.list_(pa.float32()))
    index = table.column_names.index("sampling_logprobs")
    pq.write_table(table.set_column(index, "sampling_logprobs", logprobs), second)
    code, text = run_cli(capsys, *capture(tiny_model_path, prompts, output))
    assert code == 0 and "1 of 3 shards are there already" in text
    assert f"sampled anew: {first} is not whole Parquet" in text
    assert f"sampled anew: {second.name}: Row 0 is not what was saved" in text
    assert [path.read_bytes() for path in ShardFolder(output).shards()] == whole


@pytest.mark.parametrize("other", ["shard", "sampling"])
def test_a_shard_of_another_capture_is_not_taken(captured, tiny_model_path, prompts, tmp_path, capsys, other):
    output = tmp_path / "traces"
    shutil.copytree(captured, output)
    first, second, _ = ShardFolder(output).shards()
    if other == "sampling":
        code, text = run_cli(capsys, *capture(tiny_model_path, prompts, tmp_path / "other"), "--seed", 5)
        assert code == 0, text
        second = tmp_path / "other" / first.name
    shutil.copy(second, first)
    code, text = run_cli(capsys, *capture(tiny_model_path, prompts, output))
    assert code == 2 and f"{first} holds traces of other prompts or sampling settings" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "images": ["x.png"]}, "row 0 has a value in the column 'images'"),
        ({"prompt": "a", "image": "x.png"}, "row 0 has a value in the column 'image'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]},
            "row 0: its prompt has a part of type 'image'",
        ),
    ],
)
def test_capture_refuses_images(tiny_model_path, tmp_path, capsys, row, message):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(row))
    code, text = run_cli(capsys, *capture(tiny_model_path, data, tmp_path / "out"))
    assert code == 2 and message in text and "carry no images" in text and not list(tmp_path.glob("out/*"))


def test_capture_refuses_the_ids_of_images(tiny_model_path, tmp_path, capsys):
    model = tmp_path / "vlm"
    shutil.copytree(tiny_model_path, model)
    config = json.loads((model / "config.json").read_text())
    config["image_token_id"] = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("#")
    (model / "config.json").write_text(json.dumps(config))
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "what"}\n{"prompt": "#what"}')
    code, text = run_cli(capsys, *capture(model, data, tmp_path / "out"))
    assert code == 2 and "row 1: its prompt hold 1 times the id" in text and "image_token_id of llama" in text


def test_a_damaged_prompts_file_is_named(tiny_model_path, tmp_path, capsys):
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"prompt": ["a", "b"]}).save_to_disk(str(saved))
    (saved / "state.json").write_text("{")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    for data in (saved, tmp_path / "torn.parquet"):
        code, text = run_cli(capsys, *capture(tiny_model_path, data, tmp_path / "out"))
        assert code == 2 and f"--dataset {data} cannot be read" in text and "Traceback" not in text


@pytest.mark.needs("vllm")
def test_capture_with_vllm_scores_as_recorded(smollm2_path, prompts, tmp_path):
    engine = json.dumps({"enforce_eager": True, "max_model_len": 256, "max_num_batched_tokens": 512})
    more = ("--engine", "vllm", "--top_k", 20, "--limit", 2, "--engine_kwargs", engine)
    more += ("--generation_kwargs", '{"structured_outputs": {"regex": "[A-Za-z ,.]+"}}')
    code, text = cli_alone(*capture(smollm2_path, prompts, tmp_path / "traces", *more))
    assert code == 0, text
    code, text = cli("score", "--traces", tmp_path / "traces", "--model", smollm2_path, "--output", tmp_path / "scored")
    assert code == 0 and "more than rounding" not in text, text
    largest = float(text.split("largest ")[1].split()[0])
    assert largest <= 1e-4
    assert len(all_traces(tmp_path / "traces")) == 4


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_a_whole_run(captured, tiny_model_path, prompts, tmp_path):
    output = tmp_path / "killed"
    rng = np.random.default_rng(1)
    for _ in range(20):
        process = subprocess.Popen(
            [*CLI, *map(str, capture(tiny_model_path, prompts, output))], stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=rng.uniform(4.0, 12.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if output.exists():
            for trace in all_traces(output):
                trace.check(vocab_size=99)
    assert cli(*capture(tiny_model_path, prompts, output))[0] == 0
    whole, resumed = ShardFolder(captured).shards(), ShardFolder(output).shards()
    assert [p.name for p in whole] == [p.name for p in resumed]
    assert [p.read_bytes() for p in whole] == [p.read_bytes() for p in resumed]
    assert not list(output.glob(".*"))
