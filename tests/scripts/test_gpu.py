"""The command for a GPU says what it would run, what is missing, and which part failed."""

import sys

import pytest

from benchmarks import gpu


def called(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", *map(str, arguments)])
    return gpu.main()


def test_a_dry_run_names_every_part_and_what_it_lacks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert called(monkeypatch, "--dry-run", "--output", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in gpu.PARTS]
    assert "kernels  skipped: triton is not here" in lines and "capture  skipped: vllm, models/SmolLM2" in lines[4]
    assert not (tmp_path / "gpu.md").exists()


def test_a_part_that_fails_is_told_and_the_others_run(monkeypatch, capsys, tmp_path):
    good = gpu.Part("good", "something", "a.gpu", 1, (), "platform --help")
    bad = gpu.Part("bad", "something", "a.gpu", 1, (), "no_such_module")
    monkeypatch.setattr(gpu, "PARTS", (bad, good, gpu.Part("mask", "something", "a.gpu", 1)))
    assert called(monkeypatch, "--cpu", "--output", tmp_path) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "| bad | something | failed with exit status 1 |" in page and "| mask | something | needs a GPU |" in page
    assert "No module named no_such_module" in (tmp_path / "bad.log").read_text()


def test_without_a_gpu_it_says_what_can_be_done(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as error:
        called(monkeypatch)
    assert error.value.code == 2 and "--cpu runs what a CPU can" in capsys.readouterr().err
