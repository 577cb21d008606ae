"""Traces captured once, and the command line, in a process of its own or in this one."""

import contextlib
import io
import json
import subprocess
import sys

import pytest

from trl_support_replay.cli.main import main

CLI = [sys.executable, "-m", "trl_support_replay"]


def cli(*argv):
    """A command in this process: its exit status and everything it printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = main([*map(str, argv)])
        except SystemExit as ended:  # of argparse
            code = ended.code
    return code, text.getvalue()


def cli_alone(*argv):
    """A command in a process of its own."""
    done = subprocess.run([*CLI, *map(str, argv)], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}?"}], "answer": a + b} for a in range(3) for b in range(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def capture(model, prompts, output, *more):
    sampling = ("--top_p", 0.9, "--num_generations", 2, "--max_tokens", 10, "--batch_size", 2)
    return ("capture", "--model", model, "--dataset", prompts, "--output", output, *sampling, *more)


@pytest.fixture(scope="session")
def captured(tiny_model_path, prompts, tmp_path_factory):
    output = tmp_path_factory.mktemp("captured") / "traces"
    code, text = cli(*capture(tiny_model_path, prompts, output))
    assert code == 0, text
    return output


def run_cli(capsys, *argv):
    """As `cli`, with white space folded."""
    code, text = cli(*argv)
    return code, " ".join((text + "".join(capsys.readouterr())).split())
