"""`vllm-serve`: vLLM's own server command with the packed endpoint added."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ..environment import check_supported
from .settings import ServerSettingError, ServerSettings, variable

logger = logging.getLogger(__name__)

MIDDLEWARE = "trl_support_replay.serving.endpoint.SupportReplayMiddleware"
WORKER_EXTENSION = "trl_support_replay.serving.worker.ReloadWorkerExtension"
# Enough for any usual top_k and a few ties; vLLM's own default is 20.
_MAX_LOGPROBS = 1024
_BOUND = "replay_"  # what the names of the options for bounds begin with


class ServeOptionError(ValueError):
    """An option with a value that it cannot have, or options that cannot go together."""


def parser() -> argparse.ArgumentParser:
    """The options that are ours; every other one is vLLM's and is passed on."""
    defaults = ServerSettings()
    own = argparse.ArgumentParser(
        prog="trl-support-replay vllm-serve",
        usage="trl-support-replay vllm-serve MODEL [options] [options of `vllm serve`]",
        description="vLLM's OpenAI server with all of its options, and beside it the packed endpoint that carries "
        "sampling supports, log-probs and routed experts to a trainer. Ordinary requests are served as ever.",
        epilog="Example: trl-support-replay vllm-serve Qwen/Qwen3-4B --port 8000 --weights-dir /shared/weights",
        allow_abbrev=False,
    )
    own.add_argument(
        "--weights-dir",
        metavar="DIR",
        help="folder shared with the trainer (its weight_sync_dir), from which weights may be reloaded; it is made "
        "when it is not there. Without this option nothing can be reloaded",
    )
    for field, text in (
        ("max_request_bytes", "largest accepted request body, in bytes"),
        ("max_n", "most samples of one request"),
        ("max_tokens", "most new tokens of one sample"),
        ("max_top_k", "largest top_k of a request that records supports"),
    ):
        own.add_argument(
            f"--{_BOUND}{field}".replace("_", "-"),
            metavar="N",
            type=int,
            default=getattr(defaults, field),
            help=f"{text} (default: %(default)s)",
        )
    return own


def serve_command(argv: Sequence[str], on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """The command that starts vLLM's server, and the variables to add to its environment.

    Args:
        argv: arguments after `vllm-serve`.
        on_cpu: whether vLLM runs on a CPU here.

    Raises:
        ServeOptionError: for options that would break recording or reloading, bounds below 1, or a folder of weights
            that cannot be made; naming option, value and way out.
    """
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"} & set(argv):
            parser().parse_args(["--help"])
        raise ServeOptionError("MODEL comes first: trl-support-replay vllm-serve MODEL [options].")
    # Behind options that only vLLM knows, MODEL could not be told from the value of one.
    model = argv[0]
    own, passed = parser().parse_known_args(list(argv[1:]))
    given = _values(passed)
    _refuse(given, "--logprobs-mode", {"processed_logprobs"}, "recorded log-probs are those of the processed logits")
    _refuse(given, "--worker-extension-cls", set(), "the reload of weights has its place")
    _refuse(given, "--api-server-count", {"1"}, "each front end would have its own idea of which weights are loaded")
    added = ["--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION]
    if "--logprobs-mode" not in given:
        added += ["--logprobs-mode", "processed_logprobs"]
    if "--max-logprobs" not in given:
        added += ["--max-logprobs", str(_MAX_LOGPROBS)]
    if on_cpu and own.weights_dir is not None:
        _refuse(given, "--dtype", {"float32"}, "on a CPU a reload of a half-precision engine has no effect")
        if "--dtype" not in given:
            added += ["--dtype", "float32"]
    settings = _settings(own)
    command = [sys.executable, "-m", *_entry(model, given), *passed, *added]
    environment = {variable(name): str(value) for name, value in vars(settings).items() if value is not None}
    return command, environment


def main(argv: Sequence[str]) -> None:
    """Become vLLM's server. Does not return."""
    check_supported("vllm")
    from vllm.platforms import current_platform

    command, environment = serve_command(argv, on_cpu=current_platform.is_cpu())
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, **environment})


def _settings(own: argparse.Namespace) -> ServerSettings:
    """The settings that our options ask for; makes the folder of weights, which a first run does not have yet."""
    bounds = {name: value for name, value in vars(own).items() if name.startswith(_BOUND)}
    folder = None if own.weights_dir is None else Path(own.weights_dir).resolve()
    if folder is not None and not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)  # another server may make it at the same time
        except OSError as error:
            raise ServeOptionError(
                f"--weights-dir {own.weights_dir}: the folder cannot be made ({error}). Give one that can be written, "
                "the same as the trainer's weight_sync_dir."
            ) from error
        logger.warning("The folder %s was not there and has been made.", folder)
    try:
        return ServerSettings(folder, **{name.removeprefix(_BOUND): value for name, value in bounds.items()})
    except ServerSettingError as error:
        raise ServeOptionError(f"--{_BOUND}{error.field}".replace("_", "-") + f" {error.problem}") from None


def _entry(model: str, given: Mapping[str, str]) -> list[str]:
    """Module and first arguments of vLLM's server."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # The build for CPUs has another name, under which the `vllm` command does not start.
        return ["vllm.entrypoints.openai.api_server", "--model", model]
    single = [] if "--api-server-count" in given else ["--api-server-count", "1"]
    return ["vllm.entrypoints.cli.main", "serve", model, *single]


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """Value of each option, whether written `--name value` or `--name=value`, with `-` for `_`."""
    values = {}
    for i, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, _, value = argument.partition("=")
            if not _ and i + 1 < len(arguments) and not arguments[i + 1].startswith("--"):
                value = arguments[i + 1]
            values[name.replace("_", "-")] = value
    return values


def _refuse(given: Mapping[str, str], option: str, allowed: set[str], reason: str) -> None:
    if option in given and given[option] not in allowed:
        remedy = f"Leave it out or set it to {' or '.join(sorted(allowed))}" if allowed else "Leave it out"
        raise ServeOptionError(f"{option} {given[option]}: {reason}. {remedy}.")
