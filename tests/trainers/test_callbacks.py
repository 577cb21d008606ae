"""What a run keeps when it is stopped."""

import json
import os
import signal
import threading
from types import SimpleNamespace

import pytest

from trl_support_replay.trainers.callbacks import MetricsFile, StopOnInterrupt


def begin(folder, step=0, first=True):
    metrics = MetricsFile()
    metrics.on_train_begin(
        SimpleNamespace(output_dir=str(folder)), SimpleNamespace(global_step=step, is_world_process_zero=first), None
    )
    return metrics


def log(metrics, step, **values):
    metrics.on_log(None, SimpleNamespace(global_step=step), None, logs=values)


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_log_is_on_disk_at_once(tmp_path):
    metrics = begin(tmp_path / "new")
    log(metrics, 1, reward=0.5)
    log(metrics, 2, reward=0.75)
    rows = [json.loads(line) for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.5), (2, 0.75)]


def test_only_the_first_process_writes(tmp_path):
    log(begin(tmp_path, first=False), 1, reward=0.5)
    assert list(tmp_path.iterdir()) == []


def test_resuming_goes_on_from_the_checkpoints_step(tmp_path):
    metrics = begin(tmp_path)
    for step in range(1, 6):
        log(metrics, step, reward=0.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')  # cut short
    metrics = begin(tmp_path, step=3)
    log(metrics, 4, reward=1.0)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_new_run_loses_nothing_of_an_older_one(tmp_path):
    for step in (1, 2, 3):
        log(begin(tmp_path), step, reward=0.0)
    assert steps(tmp_path / "metrics.jsonl") == [3]
    assert [steps(tmp_path / f"metrics.{n}.jsonl") for n in (1, 2)] == [[1], [2]]


def end_step(stop, step=7):
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    stop.on_step_end(SimpleNamespace(output_dir="out", device="cpu"), SimpleNamespace(global_step=step), control)
    return control


def test_ctrl_c_saves_and_stops_at_the_end_of_the_step():
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt() as stop:
        control = end_step(stop)
        assert not control.should_save and not control.should_training_stop and not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and stop.checkpoint is None
        control = end_step(stop)
        assert control.should_save and control.should_training_stop
        assert str(stop.checkpoint) == "out/checkpoint-7"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_echo_is_not_a_second_ctrl_c_but_a_later_one_is(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trl_support_replay.trainers.callbacks.time.monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopOnInterrupt() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 0.5
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        now[0] += 5
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def train():
        with StopOnInterrupt() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
