"""`vllm-serve`: vLLM's own command with what is needed added, and nothing that would break it let through."""

from __future__ import annotations

import pytest

from trl_support_replay.engine_outputs.vllm_capture import CAPTURE_SCHEDULER
from trl_support_replay.server import command as command_module
from trl_support_replay.server.command import MIDDLEWARE, WORKER_EXTENSION, ServeOptionError, serve_command
from trl_support_replay.server.settings import ServerSettingError, ServerSettings


def option(command, name):
    return command[command.index(name) + 1]


@pytest.mark.needs("vllm")  # its parser reads the options
def test_vllms_own_options_are_passed_on_unchanged(tmp_path):
    flags = ["--port", "81", "--tensor-parallel-size=2", "--enable-prefix-caching", "--api-key", "k", "--seed", "-1"]
    command, _ = serve_command(["org/model", *flags], on_cpu=False)
    start = command.index("--port")
    assert command[start : start + len(flags)] == flags
    assert "org/model" in command[:start]
    assert option(command, "--middleware") == MIDDLEWARE
    assert option(command, "--worker-extension-cls") == WORKER_EXTENSION
    assert option(command, "--logprobs-mode") == "processed_logprobs"
    assert option(command, "--max-logprobs") == "1024"
    assert "--dtype" not in command and "--scheduler-cls" not in command


@pytest.mark.needs("vllm")  # its parser reads the options
def test_our_options_travel_in_the_environment(tmp_path):
    arguments = ["m", "--weights-dir", str(tmp_path), "--replay-max-n=3", "--replay-max-tokens", "77"]
    command, environment = serve_command(arguments, on_cpu=False)
    assert not any("replay-max" in argument or argument == "--weights-dir" for argument in command)
    settings = ServerSettings.from_environment(environment)
    assert settings == ServerSettings(weights_dir=tmp_path.resolve(), max_n=3, max_tokens=77)


@pytest.mark.needs("vllm")  # its parser reads the options
def test_an_option_that_was_given_is_not_given_again():
    command, _ = serve_command(["m", "--max_logprobs=50", "--logprobs-mode", "processed_logprobs"], on_cpu=False)
    assert "--max-logprobs" not in command and command.count("--logprobs-mode") == 1


@pytest.mark.needs("vllm")  # its parser reads the options
def test_supports_are_taken_in_the_worker_of_model_runner_v1(monkeypatch):
    assert option(serve_command(["m"], on_cpu=True)[0], "--scheduler-cls") == CAPTURE_SCHEDULER
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert option(serve_command(["m"], on_cpu=False)[0], "--scheduler-cls") == CAPTURE_SCHEDULER
    monkeypatch.setattr(command_module, "mask_channel_obstacle", lambda: "vLLM 0.27 has no channel")
    assert "--scheduler-cls" not in serve_command(["m"], on_cpu=True)[0]


@pytest.mark.needs("vllm")  # its parser reads the options
def test_on_a_cpu_reloading_means_float32(tmp_path):
    assert option(serve_command(["m", "--weights-dir", str(tmp_path)], on_cpu=True)[0], "--dtype") == "float32"
    assert "--dtype" not in serve_command(["m"], on_cpu=True)[0]
    with pytest.raises(ServeOptionError, match="--dtype bfloat16.*no effect.*float32"):
        serve_command(["m", "--weights-dir", str(tmp_path), "--dtype=bfloat16"], on_cpu=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "1", "m"], "MODEL comes first"),
        ([], "MODEL comes first"),
        (["m", "--logprobs-mode", "raw_logprobs"], "--logprobs-mode raw_logprobs"),
        (["m", "--logprobs_mode=raw_logits"], "--logprobs-mode raw_logits"),
        (["m", "--worker-extension-cls", "a.B"], "--worker-extension-cls a.B"),
        (["m", "--api-server-count", "4"], "--api-server-count 4"),
        (["m", "--speculative-config", '{"method": "ngram"}'], "--speculative-config .*draft"),
        (["m", "-sc", '{"method": "ngram"}'], "--speculative-config .*draft"),
        (["m", "--speculative_config.method=ngram"], "--speculative-config .*draft"),
        (["m", "--speculative", '{"method": "ngram"}'], "--speculative-config .*draft"),
        (["m", "--spec-method", "ngram"], "--spec-method ngram: .*draft"),
        (["m", "--logits-processors", "my:Processor"], "--logits-processors .*my:Processor"),
        (["m", "--watermark-config", '{"key": 7}'], "--watermark-config .*watermark"),
        (["m", "--enable-trace-replay"], "--enable-trace-replay"),
        (["m", "--scheduler-cls", "my.Scheduler"], "--scheduler-cls my.Scheduler"),
    ],
)
@pytest.mark.needs("vllm")  # its parser reads the options
def test_options_that_would_break_replay_or_recording_are_refused(arguments, says):
    with pytest.raises(ServeOptionError, match=says):
        serve_command(arguments, on_cpu=False)


@pytest.mark.needs("vllm")  # its parser reads the options
def test_options_of_a_file_are_read_as_well(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 8001\nmax-logprobs: 50\n")
    command, _ = serve_command(["m", "--config", str(file)], on_cpu=False)
    assert "--max-logprobs" not in command and option(command, "--logprobs-mode") == "processed_logprobs"
    file.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\n")
    with pytest.raises(ServeOptionError, match="--speculative-config .*ngram"):
        serve_command(["m", "--config", str(file)], on_cpu=False)


@pytest.mark.needs("vllm")  # its parser reads the options
def test_a_folder_of_weights_that_is_not_there_yet_is_made(tmp_path, caplog):
    folder = tmp_path / "runs" / "weights"
    _, environment = serve_command(["m", "--weights-dir", str(folder)], on_cpu=False)
    assert folder.is_dir() and ServerSettings.from_environment(environment).weights_dir == folder.resolve()
    assert f"{folder} was not there and has been made" in caplog.text


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--weights-dir", "{file}", "--weights-dir .*the folder cannot be made .*weight_sync_dir"),
        ("--weights-dir", "{file}/weights", "--weights-dir .*the folder cannot be made .*weight_sync_dir"),
        ("--replay-max-n", "0", "--replay-max-n 0 must be at least 1"),
        ("--replay-max-request-bytes", "-1", "--replay-max-request-bytes -1 must be at least 1"),
    ],
)
@pytest.mark.needs("vllm")  # its parser reads the options
def test_values_that_are_none_are_refused_under_the_names_of_their_options(tmp_path, option, value, says):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ServeOptionError, match=f"^{says}"):
        serve_command(["m", option, value.format(file=file)], on_cpu=False)


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_N", "0"), ("MAX_TOKENS", "-5"), ("MAX_TOP_K", "many"), ("WEIGHTS_DIR", "/no/such/folder")]
)
def test_bounds_that_are_none_are_refused(name, value):
    with pytest.raises(ServerSettingError, match=f"TRL_SUPPORT_REPLAY_{name}='?{value}"):
        ServerSettings.from_environment({f"TRL_SUPPORT_REPLAY_{name}": value})


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        serve_command(["--help"], on_cpu=False)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--weights-dir" in text and "Example:" in text and "--replay-max-n" in text
