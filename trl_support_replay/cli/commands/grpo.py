"""Train with GRPO, scored over the sampling support.

Takes every argument of `trl grpo`, those of support replay, and those of `accelerate launch`; with any of the latter,
for example --accelerate_config, the training is started through accelerate.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ...errors import CommandError
from ..grpo_inputs import input_errors
from ..main import run

_WHERE = "trl-support-replay --debug grpo ... shows where."
_EXAMPLES = """
examples:
  trl-support-replay grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/DeepMath-103K \\
      --reward_funcs accuracy_reward --use_vllm true --top_k 20 --top_p 0.95 --output_dir runs/qwen3
  trl-support-replay grpo --config grpo.yaml --accelerate_config zero3
      any argument can stand in the YAML file, and the command line wins; a name of one of TRL's accelerate
      configurations, or a path to one, starts as many processes as it says
  trl-support-replay grpo --config grpo.yaml --dry_run true --device_memory 80
      what would run, and the memory of each device; loads no weights and no data
  trl-support-replay grpo --config grpo.yaml --reward_funcs my_package.rewards.exact_match
      a reward function of your own, importable from the current folder

Replay is on as soon as --top_k, --top_p or --min_p cuts the distribution. Metrics go to OUTPUT_DIR/metrics.jsonl as
they come. Ctrl-C finishes the step, writes a checkpoint and stops; --resume_from_checkpoint true goes on from there.
"""


def main(argv: Sequence[str]) -> int:
    """Train in this process, or through accelerate when any of its options is given; or only plan."""
    argv = list(argv)
    with input_errors(_WHERE):
        from ..grpo_inputs.arguments import launch_options

        options = launch_options(argv, __doc__ or "", _EXAMPLES)
    if options.arguments.dry_run:
        return _plan(argv, options.accelerate)
    # Under a launcher already, a recipe's own launch options have been overruled.
    if options.accelerate and "LOCAL_RANK" not in os.environ:
        return _launch(options.accelerate, argv)
    return train(argv)


def _plan(argv: Sequence[str], accelerate_options: Sequence[str]) -> int:
    with input_errors(_WHERE):
        from ..planning.plan import plan_run

        plan_run(argv, accelerate_options).show()
    return 0


def train(argv: Sequence[str]) -> int:
    """Train in this process; 130 when stopped by Ctrl-C, with checkpoint and metrics written."""
    with input_errors(_WHERE):
        from ..grpo_inputs.arguments import parse

        script_args, training_args, model_args, mixture = parse(argv)
        checkpoint = _checkpoint(training_args.resume_from_checkpoint, training_args.output_dir)
        trainer = _build_trainer(script_args, training_args, model_args, mixture)
    from ...trainers.callbacks import StopOnInterrupt

    echo = trainer.accelerator.print
    echo(_what_is_replayed(trainer))
    with StopOnInterrupt() as interrupt:
        trainer.add_callback(interrupt)
        trainer.train(resume_from_checkpoint=checkpoint)
    # An interruption after the last step has come too late to stop anything.
    if interrupt.checkpoint is not None:
        echo(f"Stopped at step {trainer.state.global_step}. Checkpoint: {interrupt.checkpoint}. Go on from there with")
        echo("--resume_from_checkpoint true.")
        return 130
    trainer.save_model(training_args.output_dir)
    echo(f"Trained {trainer.state.global_step} steps. Model and metrics.jsonl: {training_args.output_dir}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return 0


def _launch(launch_options: Sequence[str], argv: Sequence[str]) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = [*launch_options, "--module", __name__, *argv]
    # Ctrl-C is for the workers, which stop in their own time; the launcher waits for them.
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with input_errors(_WHERE):
            launch_command(launch_command_parser().parse_args(command))
    except SignalException:
        return 130
    except (subprocess.CalledProcessError, ChildFailedError) as error:
        # A worker has said what was wrong; the launcher's own traceback would only say that it failed.
        return getattr(error, "returncode", 1)
    finally:
        signal.signal(signal.SIGINT, previous)
    return 0


def _build_trainer(script_args: Any, training_args: Any, model_args: Any, mixture: Any) -> Any:
    from trl import get_peft_config, get_quantization_config

    from ...settings.preflight import check_dataset, check_output_dir
    from ...trainers.callbacks import MetricsFile
    from ...trainers.grpo import SupportReplayGRPOTrainer
    from ..grpo_inputs.datasets import choose_split, load_splits, mapped
    from ..grpo_inputs.named import dataset_map, reward_functions, tool_functions

    if not model_args.model_name_or_path:
        raise CommandError("--model_name_or_path is missing: a model's name on the Hub, or its folder.")
    check_output_dir(training_args.output_dir)
    rewards, tools, row_map = reward_functions(script_args), tool_functions(script_args), dataset_map(script_args)
    splits, name = load_splits(script_args, mixture)
    train_dataset = mapped(
        choose_split(splits, script_args.dataset_train_split, name, "--dataset_train_split"), row_map
    )
    check_dataset(train_dataset, f"dataset {name}, split {script_args.dataset_train_split!r},")
    if not rewards and "reward" not in (train_dataset.column_names or []):
        raise CommandError("There is no reward: give --reward_funcs or --reward_model_name_or_path.")
    eval_dataset = None
    if training_args.eval_strategy != "no":
        eval_dataset = mapped(
            choose_split(splits, script_args.dataset_test_split, name, "--dataset_test_split"), row_map
        )
    return SupportReplayGRPOTrainer(
        model_args.model_name_or_path,
        rewards or None,
        training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        tools=tools,
        callbacks=[MetricsFile()],
    )


def _what_is_replayed(trainer: Any) -> str:
    replayed = [f"the supports of {trainer.sampling_settings}"] if trainer.replays_support else []
    replayed += ["routed experts"] if trainer.replays_routes else []
    if not replayed:
        return "No setting cuts tokens (top_k, top_p, min_p, a constraint), so nothing is replayed: this is stock GRPO."
    return f"Replaying {' and '.join(replayed)}."


def _checkpoint(value: str | None, output_dir: str) -> str | None:
    """The folder to resume from; `true` stands for the last checkpoint in the output folder.

    Raises:
        CommandError: there is none.
    """
    from transformers.trainer_utils import get_last_checkpoint

    if value is None or str(value).lower() == "false":
        return None
    if str(value).lower() == "true":
        found = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
        if found is None:
            raise CommandError(
                f"--resume_from_checkpoint true: there is no checkpoint in {output_dir} yet. Leave it out to begin."
            )
        return found
    if not os.path.isdir(value):
        raise CommandError(f"--resume_from_checkpoint {value} is not a folder. Name one, or true for the last.")
    return value


if __name__ == "__main__":
    # A worker of `accelerate launch`.
    sys.exit(run(train, sys.argv[1:]))
