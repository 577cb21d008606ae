"""trackio, wandb and tensorboard, the real libraries without a network, each get what training logs."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.processes import environment

pytestmark = pytest.mark.needs("tensorboard", "trackio", "wandb")
ROOT = Path(__file__).resolve().parents[2]
RUN = """
import json, sys, wandb
from tests.trainers.conftest import checksum_reward, sums
from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

args = SupportReplayGRPOConfig(
    output_dir="run", report_to=["tensorboard", "wandb", "trackio"], run_name="a-run",
    log_completions=True, num_completions_to_print=1,
    use_cpu=True, bf16=False, disable_tqdm=True, max_steps=2, logging_steps=1, save_strategy="no", top_p=0.9,
    per_device_train_batch_size=4, num_generations=4, max_completion_length=8, eval_strategy="steps", eval_steps=2,
    per_device_eval_batch_size=4,
)
trainer = SupportReplayGRPOTrainer(
    sys.argv[1], checksum_reward, args, train_dataset=sums(), eval_dataset=sums(1)
)
trainer.train()
json.dump(trainer.state.log_history, open("history.json", "w"))
wandb.finish()
"""
METRICS = ("support/size_mean", "support/logprob_gap_max", "sampling/importance_sampling_ratio_raw/mean", "reward")


@pytest.fixture(scope="module")
def tracked(tiny_model_path, tmp_path_factory):
    """Folder of a run that reported to all three."""
    folder = tmp_path_factory.mktemp("tracked")
    variables = environment(
        PYTHONPATH=str(ROOT),
        WANDB_MODE="offline",
        WANDB_DIR=str(folder),
        TRACKIO_DIR=str(folder / "trackio"),
        TENSORBOARD_LOGGING_DIR=str(folder / "tensorboard"),
        HF_HUB_OFFLINE="1",
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, tiny_model_path],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    return {tag.removeprefix("train/"): [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def records(data):
    """Records of an offline wandb file: a LevelDB log, in blocks of 32 KiB, after a header of 7 bytes."""
    place, parts = 7, []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for a header: the block's end is padding
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def read_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.rglob("run-*.wandb")
    values = {}
    for data in records(file.read_bytes()):
        for item in Record.FromString(data).history.item:
            name = item.key or "/".join(item.nested_key)
            values.setdefault(name.removeprefix("train/"), []).append(json.loads(item.value_json))
    return values


def read_trackio(folder):
    import sqlite3

    (file,) = (folder / "trackio").glob("*.db")
    values = {}
    with sqlite3.connect(file) as database:
        for (text,) in database.execute("select metrics from metrics order by id"):
            for name, value in json.loads(text).items():
                values.setdefault(name.removeprefix("train/"), []).append(value)
    return values


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio}


@pytest.mark.parametrize("name", READ)
def test_every_tracker_gets_the_metrics(tracked, name):
    found = READ[name](tracked)
    history = json.loads((tracked / "history.json").read_text())
    for metric in METRICS:
        logged = [log[metric] for log in history if metric in log]
        assert len(logged) == 2
        assert found[metric] == pytest.approx(logged, rel=1e-5), metric


def test_the_completions_table_has_columns_of_supports(tracked):
    table = pd.concat([pd.read_parquet(path) for path in sorted(tracked.glob("run/completions/*.parquet"))])
    trained = table[table["support_size_mean"].notna()]
    evaluated = table[table["support_size_mean"].isna()]
    assert len(trained) and len(evaluated)  # an evaluation is never captured, and has rows all the same
    assert (trained["support_size_mean"] >= 1).all() and (trained["support_size_max"] >= 1).all()
    assert trained["support_singletons"].between(0, 1).all() and (trained["sampling_logprob_mean"] <= 0).all()


@pytest.mark.parametrize("name", ["wandb", "trackio"])  # tensorboard has no tables; TRL sends it none
def test_trackers_with_tables_get_the_completions(tracked, name):
    assert any(key.startswith("completions") for key in READ[name](tracked))
