"""The arguments of the `grpo` command, and which of them belong to `accelerate launch`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.scripts.grpo import GRPOScriptArguments

from ...errors import CommandError
from ...settings.config import SupportReplayGRPOConfig

PROG = "trl-support-replay grpo"


@dataclass
class ReplayScriptArguments(GRPOScriptArguments):
    """What TRL's `grpo` script takes, and options for what would otherwise need a script.

    Attributes:
        dataset_map: name or dotted path of a function from a dataset's row to one with `prompt`; see `datasets`.
        tools: dotted paths of functions that the model may call; see `GRPOTrainer`'s `tools`.
        dry_run: plan, and do not train.
        device_memory: GiB of one device, for the plan.
    """

    dataset_map: str | None = field(
        default=None,
        metadata={
            "help": "Function that makes a row with a `prompt`, and the columns that the rewards need, of a row of the "
            "dataset: `gsm8k`, or the dotted import path of a function of yours."
        },
    )
    tools: list[str] | None = field(
        default=None,
        metadata={
            "help": "Dotted import paths of functions that the model may call. The model is shown their type hints and "
            "docstrings."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Resolve every setting, refuse what cannot be replayed, estimate memory roughly, "
            "print the plan and exit. Loads no weights and no data."
        },
    )
    device_memory: float | None = field(
        default=None,
        metadata={"help": "GiB of one device, for the plan of --dry_run. Default: what this machine's GPU has."},
    )


class LaunchOptions(NamedTuple):
    """What has to be known before a configuration can be made.

    Attributes:
        arguments: every argument of the command, as it was given; the configurations are not made yet.
        accelerate: arguments for `accelerate launch`; empty when training runs in this process.
    """

    arguments: argparse.Namespace
    accelerate: list[str]


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        # The usage of some hundred options would hide the message.
        raise CommandError(f"{message}. See {PROG} --help.")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class _LaunchParser(_Parser):
    """Stops short of making the dataclasses: their checks depend on the number of processes."""

    def parse_args_into_dataclasses(self, args: Any = None, *_: Any, **__: Any) -> tuple[Any, ...]:  # type: ignore[override]
        namespace, left_over = self.parse_known_args(args)
        return namespace, left_over


def launch_options(argv: Sequence[str], description: str = "", epilog: str = "") -> LaunchOptions:
    """Tell apart what is for `accelerate launch`, from the command line and the `--config` file.

    Args:
        argv: the command's arguments.
        description, epilog: of its help, which is printed here when it is asked for.

    Raises:
        CommandError: an option that nobody knows.
    """
    parser = _LaunchParser(
        _dataclasses(SupportReplayGRPOConfig),
        prog=PROG,
        usage=f"{PROG} [--config FILE.yaml] [--accelerate_config NAME_OR_FILE] [options]",
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
    )
    arguments, left_over = parser.parse_args_and_config(list(argv), return_remaining_strings=True)
    _check_options(left_over, parser)
    return LaunchOptions(arguments, resolve_accelerate_config_argument(left_over))


def parse(argv: Sequence[str], config_class: type = SupportReplayGRPOConfig) -> tuple[Any, Any, Any, Any]:
    """Script, training, model and mixture arguments.

    Args:
        argv: the command's arguments; those for `accelerate launch` are passed over.
        config_class: what to make the training arguments of.

    Raises:
        ValueError: from the configuration itself, `UnreplayableSettingError` included.
    """
    parser = _Parser(_dataclasses(config_class), prog=PROG)
    *parsed, _ = parser.parse_args_and_config(list(argv), return_remaining_strings=True)
    script, training, model, mixture = parsed
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": getattr(training, "trust_remote_code", False),
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    } | (training.model_init_kwargs or {})
    return script, training, model, mixture


def _dataclasses(config_class: type) -> Any:
    return ReplayScriptArguments, config_class, ModelConfig, DatasetMixtureConfig


def _check_options(left_over: Sequence[str], parser: argparse.ArgumentParser) -> None:
    ours = set(parser._option_string_actions)
    launch = {"--accelerate_config", *launch_command_parser()._option_string_actions}
    for i, argument in enumerate(left_over):
        name = argument.split("=", 1)[0]
        if argument.startswith("-") and name not in launch:
            close = difflib.get_close_matches(name, [*ours, *launch], n=1)
            hint = f"Did you mean {close[0]}?" if close else f"See {PROG} --help."
            raise CommandError(f"unknown option {name}. {hint}")
        if i == 0 and not argument.startswith("-"):
            raise CommandError(f"unexpected argument {argument!r}. Options start with --; see {PROG} --help.")
