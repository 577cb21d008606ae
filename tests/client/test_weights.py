"""Versions of the weights: written whole or not at all, and removed when their run ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from trl_support_replay.client.weights import VersionedWeights


def test_a_version_holds_every_tensor_bit_for_bit(tmp_path):
    tensors = {f"layer.{i}": torch.randn(i + 1, 5, dtype=torch.float32) for i in range(7)}
    tensors["tied"] = tensors["layer.3"]  # the same storage under a second name
    tensors["half"] = torch.randn(3).to(torch.bfloat16)
    tensors["transposed"] = torch.randn(4, 6).T
    writer = VersionedWeights(tmp_path / "new" / "folder", "run")
    version = writer.name(3)
    writer.write(version, tensors.items(), shard_bytes=100)
    files = sorted((writer.folder / version).iterdir())
    assert version == "run-000003" and len(files) > 3
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype


def test_a_tensor_that_is_gone_after_it_was_taken_is_still_written(tmp_path):
    def gathered():
        for i in range(3):
            buffer = torch.full((4,), float(i))
            yield f"w{i}", buffer
            buffer.fill_(float("nan"))  # as a gathered parameter is partitioned again

    writer = VersionedWeights(tmp_path, "run")
    writer.write("v", gathered())
    loaded = load_file(tmp_path / "v" / "00000.safetensors")
    assert [loaded[f"w{i}"][0].item() for i in range(3)] == [0.0, 1.0, 2.0]


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def broken():
        yield "w", torch.ones(100)
        raise RuntimeError("lost a rank")

    writer = VersionedWeights(tmp_path, "run")
    with pytest.raises(RuntimeError, match="lost a rank"):
        writer.write("v", broken(), shard_bytes=10)
    assert list(tmp_path.iterdir()) == []


def test_a_version_appears_only_when_it_is_whole(tmp_path):
    writer = VersionedWeights(tmp_path, "run")
    seen = []

    def watched():
        for i in range(3):
            yield f"w{i}", torch.ones(10)
            seen.append((tmp_path / "v").exists())

    writer.write("v", watched(), shard_bytes=10)
    assert seen == [False, False, False] and (tmp_path / "v").is_dir()


def test_only_older_versions_of_the_same_run_are_removed(tmp_path):
    ours, others = VersionedWeights(tmp_path, "ours"), VersionedWeights(tmp_path, "others")
    for writer in (ours, others):
        for number in (1, 2, 3, 10):
            writer.write(writer.name(number), [("w", torch.ones(1))])
    ours.remove_before(ours.name(10))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["others-000001", "others-000002", "others-000003", "others-000010", "ours-000010"]


RUN = """
import sys, torch
from trl_support_replay.client.weights import VersionedWeights
writer = VersionedWeights(sys.argv[1], sys.argv[2])
writer.claim()
writer.write(writer.name(1), [("w", torch.ones(1))])
if sys.argv[3] == "killed":
    import os
    os._exit(9)
"""


def test_a_run_takes_its_versions_along_and_nothing_else(tmp_path, caplog):
    for run, end in (("ended", "ended"), ("killed", "killed")):
        subprocess.run([sys.executable, "-c", RUN, tmp_path, run, end], timeout=100)
    assert [path.name for path in tmp_path.iterdir()] == ["killed-000001"]
    VersionedWeights(tmp_path, "next").claim()
    assert "holds killed-000001, of other runs" in caplog.text and (tmp_path / "killed-000001").is_dir()
