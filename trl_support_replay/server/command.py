"""`vllm-serve`: vLLM's own server command with the packed endpoint added."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..engine_outputs.vllm_capture import CAPTURE_SCHEDULER
from ..libraries.environment import check_supported, mask_channel_obstacle
from ..settings.contract import installed_logits_processors
from ..settings.sampling_table.vllm import ENGINE
from .settings import ServerSettingError, ServerSettings, variable

logger = logging.getLogger(__name__)

MIDDLEWARE = "trl_support_replay.server.endpoint.SupportReplayMiddleware"
WORKER_EXTENSION = "trl_support_replay.server.worker.ReloadWorkerExtension"
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
        ServeOptionError: for options that would break replay, recording or reloading, bounds below 1, or a folder of
            weights that cannot be made; naming option, value and way out.
    """
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"} & set(argv):
            parser().parse_args(["--help"])
        raise ServeOptionError("MODEL comes first: trl-support-replay vllm-serve MODEL [options].")
    # Behind options that only vLLM knows, MODEL could not be told from the value of one.
    model = argv[0]
    own, passed = parser().parse_known_args(list(argv[1:]))
    given = _given(model, passed)
    for name, value in given.items():
        why = ENGINE[name].refused(value) if name in ENGINE else None
        if why is not None:
            raise ServeOptionError(f"--{name.replace('_', '-')} {value}: {why.reason}. {why.remedy}.")
    for error in installed_logits_processors():
        raise ServeOptionError(str(error))
    _refuse(given, "worker_extension_cls", set(), "the reload of weights has its place")
    _refuse(given, "api_server_count", {"1"}, "each front end would have its own idea of which weights are loaded")
    added = ["--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION]
    if mask_channel_obstacle() is None and (on_cpu or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"):
        # Supports are taken in the worker, which only Model Runner V1 lets us do. V2 has a mask of its own.
        added += ["--scheduler-cls", CAPTURE_SCHEDULER]
    if "logprobs_mode" not in given:
        added += ["--logprobs-mode", "processed_logprobs"]
    if "max_logprobs" not in given:
        added += ["--max-logprobs", str(_MAX_LOGPROBS)]
    if on_cpu and own.weights_dir is not None:
        _refuse(given, "dtype", {"float32"}, "on a CPU a reload of a half-precision engine has no effect")
        if "dtype" not in given:
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


def _entry(model: str, given: Mapping[str, Any]) -> list[str]:
    """Module and first arguments of vLLM's server."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # The build for CPUs has another name, under which the `vllm` command does not start.
        return ["vllm.entrypoints.openai.api_server", "--model", model]
    single = [] if "api_server_count" in given else ["--api-server-count", "1"]
    return ["vllm.entrypoints.cli.main", "serve", model, *single]


def _given(model: str, passed: Sequence[str]) -> dict[str, Any]:
    """The options of vLLM that were given, by name, in whatever spelling and place vLLM's own parser knows."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = _vllm_arguments()(FlexibleArgumentParser(prog="vllm serve"))
    # An attribute that is there already gets no default, and so what was given can be told, a default's value too.
    not_given = argparse.Namespace(**{action.dest: None for action in parser._actions})
    values = vars(parser.parse_args(["--model", model, *passed], namespace=not_given))
    return {name: value for name, value in values.items() if value is not None and name != "model"}


def _vllm_arguments() -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """The function that adds the options of vLLM's server to a parser. Releases keep it in different places."""
    for place in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(place).make_arg_parser
    raise ServeOptionError("The options of this vLLM's server were not found. Install a supported release.")


def _refuse(given: Mapping[str, Any], name: str, allowed: set[str], reason: str) -> None:
    if name in given and str(given[name]) not in allowed:
        remedy = f"Leave it out or set it to {' or '.join(sorted(allowed))}" if allowed else "Leave it out"
        raise ServeOptionError(f"--{name.replace('_', '-')} {given[name]}: {reason}. {remedy}.")
