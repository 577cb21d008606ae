"""Train with GRPO, scored over the sampling support.

Takes every argument of `trl grpo`, those of support replay, and those of `accelerate launch`; with any of the latter,
for example --accelerate_config, the training is started through accelerate.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ..cli import CommandError, run

_PROG = "trl-support-replay grpo"
_EXAMPLES = """
examples:
  trl-support-replay grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K \\
      --reward_funcs accuracy_reward --use_vllm true --top_k 20 --top_p 0.95 --output_dir runs/qwen3
  trl-support-replay grpo --config grpo.yaml --accelerate_config zero3
      any argument can stand in the YAML file, and the command line wins; a name of one of TRL's accelerate
      configurations, or a path to one, starts as many processes as it says
  trl-support-replay grpo --config grpo.yaml --reward_funcs my_package.rewards.exact_match
      a reward function of your own, importable from the current folder

Replay is on as soon as --top_k, --top_p or --min_p cuts the distribution. Metrics go to OUTPUT_DIR/metrics.jsonl as
they come. Ctrl-C finishes the step, writes a checkpoint and stops; --resume_from_checkpoint true goes on from there.
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def main(argv: Sequence[str]) -> int:
    """Train in this process, or through accelerate when any of its options is given."""
    argv = list(argv)
    launch_options = _parse(argv)[-1]
    if launch_options:
        return _launch(launch_options, argv)
    return train(argv)


def train(argv: Sequence[str]) -> int:
    """Train in this process; 130 when stopped by Ctrl-C, with checkpoint and metrics written."""
    with _input_errors():
        script_args, training_args, model_args, mixture, _ = _parse(argv)
        trainer = _build_trainer(script_args, training_args, model_args, mixture)
    from ..callbacks import StopOnInterrupt

    with StopOnInterrupt() as interrupt:
        trainer.add_callback(interrupt)
        trainer.train(resume_from_checkpoint=_checkpoint(training_args.resume_from_checkpoint))
    echo = trainer.accelerator.print
    if interrupt.requested:
        echo(f"Stopped at step {trainer.state.global_step}. Checkpoint: {interrupt.checkpoint}. Go on from there with")
        echo("--resume_from_checkpoint true.")
        return 130
    trainer.save_model(training_args.output_dir)
    echo(f"Trained {trainer.state.global_step} steps. Model and metrics.jsonl: {training_args.output_dir}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return 0


@contextlib.contextmanager
def _input_errors() -> Iterator[None]:
    """Whatever goes wrong before training starts is about the input: say it without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        if type(error).__module__.startswith("trl_support_replay."):
            raise
        raise CommandError(f"{error}\n(trl-support-replay --debug grpo ... shows where.)") from error


def _parse(argv: Sequence[str]) -> tuple[Any, ...]:
    """Script, training, model and mixture arguments, and what is left over for `accelerate launch`."""
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.scripts.grpo import GRPOScriptArguments

    from ..config import SupportReplayGRPOConfig

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            # The usage of some hundred options would hide the message.
            raise CommandError(f"{message}. See {_PROG} --help.")

    dataclasses: Any = (GRPOScriptArguments, SupportReplayGRPOConfig, ModelConfig, DatasetMixtureConfig)
    parser = Parser(
        dataclasses,
        prog=_PROG,
        usage=f"{_PROG} [--config FILE.yaml] [--accelerate_config NAME_OR_FILE] [options]",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=_HelpFormatter,
    )
    with _input_errors():
        *parsed, left_over = parser.parse_args_and_config(list(argv), return_remaining_strings=True)
        _check_launch_options(left_over, parser)
        return *parsed, resolve_accelerate_config_argument(left_over)


def _check_launch_options(left_over: Sequence[str], parser: argparse.ArgumentParser) -> None:
    from accelerate.commands.launch import launch_command_parser

    ours = set(parser._option_string_actions)
    launch = {"--accelerate_config", *launch_command_parser()._option_string_actions}
    for i, argument in enumerate(left_over):
        name = argument.split("=", 1)[0]
        if argument.startswith("-") and name not in launch:
            close = difflib.get_close_matches(name, [*ours, *launch], n=1)
            hint = f"Did you mean {close[0]}?" if close else f"See {_PROG} --help."
            raise CommandError(f"unknown option {name}. {hint}")
        if i == 0 and not argument.startswith("-"):
            raise CommandError(f"unexpected argument {argument!r}. Options start with --; see {_PROG} --help.")


def _launch(launch_options: Sequence[str], argv: Sequence[str]) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser

    command = [*launch_options, "--module", __name__, *argv]
    # Ctrl-C is for the workers, which stop in their own time; the launcher waits for them.
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        launch_command(launch_command_parser().parse_args(command))
    except Exception as error:
        # A worker has said what was wrong; the launcher's own traceback would only say that it failed.
        if type(error).__name__ == "SignalException":
            return 130
        return getattr(error, "returncode", 1)
    finally:
        signal.signal(signal.SIGINT, previous)
    return 0


def _build_trainer(script_args: Any, training_args: Any, model_args: Any, mixture: Any) -> Any:
    from trl import get_peft_config, get_quantization_config

    from ..callbacks import MetricsFile
    from ..preflight import check_dataset, check_output_dir
    from ..trainer import SupportReplayGRPOTrainer

    if not model_args.model_name_or_path:
        raise CommandError("--model_name_or_path is missing: a model's name on the Hub, or its folder.")
    check_output_dir(training_args.output_dir)
    rewards = _reward_functions(script_args)
    splits, name = _load_splits(script_args, mixture)
    train_dataset = _split(splits, script_args.dataset_train_split, name, "--dataset_train_split")
    check_dataset(train_dataset, f"dataset {name}, split {script_args.dataset_train_split!r},")
    if not rewards and "reward" not in (train_dataset.column_names or []):
        raise CommandError("There is no reward: give --reward_funcs or --reward_model_name_or_path.")
    eval_dataset = None
    if training_args.eval_strategy != "no":
        eval_dataset = _split(splits, script_args.dataset_test_split, name, "--dataset_test_split")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": getattr(training_args, "trust_remote_code", False),
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    } | (training_args.model_init_kwargs or {})
    return SupportReplayGRPOTrainer(
        model_args.model_name_or_path,
        rewards or None,
        training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        callbacks=[MetricsFile()],
    )


def _reward_functions(script_args: Any) -> list[Any]:
    from trl import rewards as trl_rewards

    named = {
        name: getattr(trl_rewards, name)
        for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
    }
    named["get_soft_overlong_punishment"] = trl_rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    )
    found: list[Any] = []
    if script_args.reward_model_name_or_path:
        found.append(script_args.reward_model_name_or_path)
    for name in script_args.reward_funcs or []:
        if name in named:
            found.append(named[name])
            continue
        module, _, function = name.rpartition(".")
        if not module:
            raise CommandError(f"--reward_funcs {name}: neither one of {', '.join(named)}, nor a dotted import path.")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            found.append(getattr(importlib.import_module(module), function))
        except (ImportError, AttributeError) as error:
            raise CommandError(f"--reward_funcs {name}: {error}.") from error
    return found


def _load_splits(script_args: Any, mixture: Any) -> tuple[Any, str]:
    from datasets import load_dataset
    from trl import get_dataset

    if mixture.datasets:
        return get_dataset(mixture), " + ".join(str(part.path) for part in mixture.datasets)
    if not script_args.dataset_name:
        raise CommandError("There is no data: give --dataset_name, or `datasets` in the configuration file.")
    name = script_args.dataset_name
    return load_dataset(name, name=script_args.dataset_config, streaming=script_args.dataset_streaming), name


def _split(splits: Any, split: str, name: str, option: str) -> Any:
    if split not in splits:
        raise CommandError(f"{option} {split}: dataset {name} has the splits {', '.join(map(str, splits))}.")
    return splits[split]


def _checkpoint(value: str | None) -> str | bool | None:
    """`true` stands for the last checkpoint in the output folder, anything else is a folder."""
    if value is None:
        return None
    return {"true": True, "false": None}.get(str(value).lower(), value)


if __name__ == "__main__":
    # A worker of `accelerate launch`.
    sys.exit(run(train, sys.argv[1:]))
