"""`plan_run`: the settings, memory and warnings of a run, from the arguments of the `grpo` command."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from rich.console import Console
from rich.table import Table
from trl import get_peft_config

from ...errors import CommandError
from ...libraries.environment import REQUIREMENTS, package_status
from ...libraries.rebind import rebound
from ...settings.config import SupportReplayGRPOConfig
from ...settings.contract import SamplingSettings, check_contract
from ...settings.preflight import generation_defaults
from ...settings.urls import without_credentials
from ..grpo_inputs.arguments import parse
from ..grpo_inputs.named import dataset_map, reward_functions, tool_functions
from .launch import Launch
from .memory import GIB, UNBOUNDED_SUPPORT, Batch, Item, batch_items, compute_bytes, model_items, traces_item
from .shapes import ModelShapes, read_shapes

# Assumed length of the longest prompt when the model's length in the engine does not bound it.
_PROMPT = 512


@dataclass(frozen=True)
class RunPlan:
    """What a run would do and need.

    Attributes:
        settings: what was resolved, as pairs of name and value.
        items: memory terms.
        device_memory: GiB of one device; `None` when it is not known.
        warnings: what should be looked at before starting.
    """

    settings: list[tuple[str, str]]
    items: list[Item]
    device_memory: float | None
    warnings: list[str]

    @property
    def device_bytes(self) -> float:
        return sum(item.bytes for item in self.items if not item.on_host)

    @property
    def host_bytes(self) -> float:
        return sum(item.bytes for item in self.items if item.on_host)

    def show(self) -> None:
        """Settings, memory and warnings, on standard output."""
        console = Console(markup=False, highlight=False)
        for name, value in self.settings:
            console.print(f"{name:<10} {value}", soft_wrap=True)
        table = Table(title="memory of one process, roughly", title_justify="left")
        table.add_column("")
        table.add_column("memory", justify="right")
        table.add_column("of")
        for item in self.items:
            table.add_row(item.name, _size(item.bytes), item.note + (", on the host" if item.on_host else ""))
        total = f"of {self.device_memory:.0f} GiB a device" if self.device_memory is not None else "on the device"
        table.add_section()
        table.add_row("together", _size(self.device_bytes), total + f", and {_size(self.host_bytes)} on the host")
        console.print(table)
        for warning in self.warnings:
            console.print(f"look at: {warning}", soft_wrap=True)
        console.print("Dry run: nothing was loaded or started.")


def plan_run(argv: Sequence[str], accelerate_options: Sequence[str]) -> RunPlan:
    """The plan of `trl-support-replay grpo` with these arguments.

    Args:
        argv: the command's arguments.
        accelerate_options: those of them that are for `accelerate launch`.

    Raises:
        UnreplayableSettingError: a setting that cannot be replayed.
        CommandError: a reward, tool or map that is not there, or no model.
    """
    launch = Launch.read(accelerate_options)
    # Plans for GPUs are also made on machines without GPUs.
    with rebound(transformers.training_args, is_torch_bf16_gpu_available=lambda: True):
        script, training, model, mixture = parse(argv, _planned_config(launch.replicas))
    if not model.model_name_or_path:
        raise CommandError("--model_name_or_path is missing: a model's name on the Hub, or its folder.")
    if not (mixture.datasets or script.dataset_name):
        raise CommandError("There is no data: give --dataset_name, or `datasets` in the configuration file.")
    if training.max_completion_length is None:
        raise CommandError(
            "max_completion_length=None: nothing bounds a completion, so what it needs cannot be planned. Set "
            "--max_completion_length."
        )
    # Only `generate` takes anything from the model's own defaults; they are read when they are on this machine.
    inherits = not training.use_vllm and Path(model.model_name_or_path).is_dir()
    settings = check_contract(training, generation_defaults(model.model_name_or_path) if inherits else None)
    rewards, tools, row_map = reward_functions(script), tool_functions(script), dataset_map(script)
    shapes = read_shapes(
        model.model_name_or_path,
        model.model_revision,
        getattr(training, "trust_remote_code", False),
        get_peft_config(model),
    )
    if training.routed_experts_replay and not shapes.moe_layers:
        raise CommandError(f"routed_experts_replay=True, but {model.model_name_or_path} is not a mixture of experts.")
    dtype = training.model_init_kwargs["dtype"] or "float32"
    mixed = "bf16" if training.bf16 else "fp16" if training.fp16 else launch.mixed_precision
    compute = compute_bytes(dtype, mixed)
    completion, longest = training.max_completion_length, training.vllm_max_model_length if training.use_vllm else None
    batch = Batch(
        micro=training.per_device_train_batch_size,
        generation=training.generation_batch_size // launch.replicas,
        prompt=longest - completion if longest and longest > completion else _PROMPT,
        completion=completion,
        support=settings.bound or UNBOUNDED_SUPPORT,
    )
    here = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
    device_memory = None if training.use_cpu else script.device_memory or here
    bits = 4 if model.load_in_4bit else 8 if model.load_in_8bit else None
    items = [
        *model_items(shapes, launch, dtype, mixed, bits, reference=training.beta > 0 and not model.use_peft),
        *batch_items(shapes, batch, compute, training.gradient_checkpointing),
        *_engine_items(training, shapes, compute_bytes(dtype, "no"), batch, device_memory),
    ]
    if settings.truncates or training.routed_experts_replay:
        items.append(traces_item(shapes, batch, settings.truncates, training.routed_experts_replay))
    names = [getattr(reward, "__name__", str(reward)) for reward in rewards]
    shown = [
        ("model", _model_line(model.model_name_or_path, shapes)),
        ("data", " + ".join(str(d.path) for d in mixture.datasets) or script.dataset_name),
        ("rows", script.dataset_map if row_map is not None else "as they are"),
        ("rewards", ", ".join(names) or "the column `reward` of the traces"),
        *([("tools", ", ".join(tool.__name__ for tool in tools))] if tools else []),
        ("processes", f"{launch.processes}, {launch.method}"),
        ("precision", f"loaded in {dtype}, {compute}-byte products, {training.optim.value}"),
        ("batch", _batch_line(training, launch)),
        ("sampling", f"temperature={settings.temperature:g}, {str(settings) or 'no token is cut'}"),
        ("engine", _engine_line(training)),
        ("replay", _replay_line(training, settings)),
        ("check", f"replay_check={training.replay_check!r}, synthetic_eos={training.synthetic_eos!r}"),
        ("output", str(training.output_dir)),
    ]
    plan = RunPlan(shown, items, device_memory, [])
    plan.warnings.extend(_warnings(plan, training, settings, batch, launch, model.use_peft))
    return plan


def _planned_config(replicas: int) -> type[SupportReplayGRPOConfig]:
    """A configuration that takes itself for one of `replicas` processes: batch sizes are checked against them."""

    class PlannedConfig(SupportReplayGRPOConfig):
        @property
        def world_size(self) -> int:
            return replicas

    return PlannedConfig


def _engine_items(
    training: Any, shapes: ModelShapes, loaded: int, batch: Batch, device_memory: float | None
) -> list[Item]:
    if not training.use_vllm or training.vllm_mode == "server":
        return []
    if device_memory is not None:
        share = training.vllm_gpu_memory_utilization
        return [Item("engine", share * device_memory * GIB, f"vllm_gpu_memory_utilization={share:g} of the device")]
    width = {"float32": 4, "bfloat16": 2, "float16": 2}.get(training.vllm_dtype, loaded)
    weights = shapes.parameters * width / training.vllm_tensor_parallel_size
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE") if training.use_cpu else None
    if space is not None:
        return [Item("engine", weights + float(space) * GIB, f"weights, and VLLM_CPU_KVCACHE_SPACE={space} GiB")]
    cache = (
        batch.generation * batch.width * shapes.layers * shapes.kv_width * width / training.vllm_tensor_parallel_size
    )
    return [Item("engine", weights + cache, "weights, and keys and values of a whole generation batch")]


def _model_line(name: str, shapes: ModelShapes) -> str:
    experts = f", {shapes.experts_per_token} of {shapes.experts} experts" if shapes.experts else ""
    trained = "" if shapes.trainable == shapes.parameters else f", adapter with {shapes.trainable:,}"
    return f"{name}: {shapes.parameters:,} parameters, {shapes.layers} layers{experts}{trained}"


def _batch_line(training: Any, launch: Launch) -> str:
    step = training.per_device_train_batch_size * training.gradient_accumulation_steps * launch.replicas
    prompts = training.generation_batch_size // training.num_generations
    return (
        f"{step} completions per step; {training.generation_batch_size} per generation: {prompts} prompts x "
        f"{training.num_generations}"
    )


def _engine_line(training: Any) -> str:
    if not training.use_vllm:
        return "transformers generate"
    if training.vllm_mode == "colocate":
        return f"vLLM in the training processes, tensor parallel {training.vllm_tensor_parallel_size}"
    own = training.vllm_server_base_url or f"{training.vllm_server_host}:{training.vllm_server_port}"
    places = ", ".join(map(without_credentials, training.vllm_server_urls or [own]))
    return f"vLLM servers at {places}, weights over {training.weight_sync}"


def _replay_line(training: Any, settings: SamplingSettings) -> str:
    parts = []
    if settings.truncates:
        bound = f"at most {settings.bound} candidates per token" if settings.bound else "supports of any size"
        parts.append(f"sampling supports ({bound})")
    if training.routed_experts_replay:
        parts.append("routed experts")
    return " and ".join(parts) or "off: no token is cut, so this is stock GRPO"


def _warnings(
    plan: RunPlan, training: Any, settings: SamplingSettings, batch: Batch, launch: Launch, adapter: bool
) -> Iterator[str]:
    if not settings.truncates and not training.routed_experts_replay:
        yield "Nothing is replayed: no setting cuts tokens (top_k, top_p, min_p, a constraint)."
    if plan.device_memory is not None and plan.device_bytes > 0.9 * plan.device_memory * GIB:
        yield (
            f"{plan.device_bytes / GIB:.1f} GiB are needed, and nine tenths of a device's {plan.device_memory:g} GiB "
            f"are {0.9 * plan.device_memory:.1f}. Shard more, lower per_device_train_batch_size, or train an adapter."
        )
    needed = {"vllm": training.use_vllm, "deepspeed": launch.is_deepspeed, "peft": adapter}
    for requirement in REQUIREMENTS:
        status = package_status(requirement)
        if (status.required or needed.get(requirement.name)) and not status.usable:
            yield f"{status.name} is {status.version or 'missing'} on this machine. To run here: {status.remedy}"
    if batch.prompt == _PROMPT and not (training.use_vllm and training.vllm_max_model_length):
        yield f"Prompts are taken for at most {_PROMPT} tokens: nothing bounds them."


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"
