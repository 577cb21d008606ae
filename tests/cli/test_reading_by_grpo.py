"""Saved traces as `--dataset_name` of the `grpo` command."""

import shutil
from types import SimpleNamespace

import datasets
import pytest

from tests.cli.conftest import run_cli
from trl_support_replay.cli.grpo_inputs.datasets import load_splits
from trl_support_replay.errors import CommandError
from trl_support_replay.traces.columns import TraceSchemaError
from trl_support_replay.traces.shards import ShardFolder

NO_MIXTURE = SimpleNamespace(datasets=None)


def load(folder):
    args = SimpleNamespace(dataset_name=str(folder), dataset_config=None, dataset_streaming=False)
    return load_splits(args, NO_MIXTURE)[0]["train"]


def copied(captured, folder):
    shards = ShardFolder(folder)
    for path in ShardFolder(captured).shards():
        (folder / path.name).write_bytes(path.read_bytes())
    return shards


def test_a_folder_is_read_without_the_earlier_runs_inside(captured, tmp_path):
    folder = copied(captured, tmp_path / "traces")
    folder.set_aside()
    copied(captured, tmp_path / "traces")
    plain = datasets.Dataset.from_parquet([str(path) for path in folder.shards()])
    assert load(folder.path).to_list() == plain.to_list() and load(folder.path).features == plain.features
    plain.save_to_disk(str(tmp_path / "saved"))
    assert load(tmp_path / "saved").to_list() == plain.to_list()


def test_a_damaged_shard_is_named(captured, tmp_path):
    folder = copied(captured, tmp_path / "traces")
    last = folder.shards()[-1]
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(TraceSchemaError, match=f"{last} is not whole Parquet"):
        load(folder.path)


def test_other_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(CommandError, match=f"--dataset_name {tmp_path} cannot be read"):
        load(tmp_path)


def test_damaged_weights_are_one_message(tiny_model_path, captured, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    (model / "model.safetensors").write_bytes(b"\0" * 100)
    arguments = ("--model_name_or_path", model, "--dataset_name", captured, "--output_dir", tmp_path / "out")
    reward = ("--reward_funcs", "think_format_reward", "--use_cpu", "true", "--bf16", "false", "--top_p", 0.9)
    code, text = run_cli(capsys, "grpo", *arguments, *reward, "--num_generations", 2)
    assert code == 2 and "deserializing header" in text and "Traceback" not in text, text
