"""`vllm-serve`: vLLM's own server command with the packed endpoint added."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ..environment import check_supported
from .settings import ServerSettings, variable

MIDDLEWARE = "trl_support_replay.serving.endpoint.SupportReplayMiddleware"
WORKER_EXTENSION = "trl_support_replay.serving.worker.ReloadWorkerExtension"
# Enough for any usual top_k and a few ties; vLLM's own default is 20.
_MAX_LOGPROBS = 1024


class ServeOptionError(ValueError):
    """Options that cannot go together."""


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
        help="folder shared with the trainer (its weight_sync_dir), from which weights may be reloaded; without it "
        "nothing can be",
    )
    for field, text in (
        ("max_request_bytes", "largest accepted request body, in bytes"),
        ("max_n", "most samples of one request"),
        ("max_tokens", "most new tokens of one sample"),
        ("max_top_k", "largest top_k of a request that records supports"),
    ):
        own.add_argument(
            f"--replay-{field.replace('_', '-')}",
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
        ServeOptionError: for options that would break recording or reloading, naming option, value and way out.
    """
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"} & set(argv):
            parser().parse_args(["--help"])
        raise ServeOptionError("MODEL comes first: trl-support-replay vllm-serve MODEL [options].")
    # Behind options that only vLLM knows, MODEL could not be told from the value of one.
    model = argv[0]
    own, passed = parser().parse_known_args(list(argv[1:]))
    given = _values(passed)
    settings = ServerSettings(
        weights_dir=None if own.weights_dir is None else Path(own.weights_dir).resolve(),
        **{name.removeprefix("replay_"): value for name, value in vars(own).items() if name.startswith("replay_")},
    )
    _refuse(given, "--logprobs-mode", {"processed_logprobs"}, "recorded log-probs are those of the processed logits")
    _refuse(given, "--worker-extension-cls", set(), "the reload of weights has its place")
    _refuse(given, "--api-server-count", {"1"}, "each front end would have its own idea of which weights are loaded")
    added = ["--middleware", MIDDLEWARE, "--worker-extension-cls", WORKER_EXTENSION]
    if "--logprobs-mode" not in given:
        added += ["--logprobs-mode", "processed_logprobs"]
    if "--max-logprobs" not in given:
        added += ["--max-logprobs", str(_MAX_LOGPROBS)]
    if on_cpu and settings.weights_dir is not None:
        _refuse(given, "--dtype", {"float32"}, "on a CPU a reload of a half-precision engine has no effect")
        if "--dtype" not in given:
            added += ["--dtype", "float32"]
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
