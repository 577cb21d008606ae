"""How many processes a run starts, and what of the model they share out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType


@dataclass(frozen=True)
class Launch:
    """What `accelerate launch` will start.

    Attributes:
        processes: number of processes, one a device.
        method: what a user calls it: "one process", "DDP", "ZeRO-3", "FSDP2", ...
        shards_optimizer, shards_gradients, shards_weights: what each process holds only its part of.
        tensor_parallel: processes that share one copy of the batch.
        mixed_precision: "no", "bf16" or "fp16", as accelerate is told; the training arguments may ask for it as well.
        offloads_optimizer, offloads_weights: what lies in host memory.
    """

    processes: int = 1
    method: str = "one process"
    shards_optimizer: bool = False
    shards_gradients: bool = False
    shards_weights: bool = False
    tensor_parallel: int = 1
    mixed_precision: str = "no"
    offloads_optimizer: bool = False
    offloads_weights: bool = False

    @property
    def replicas(self) -> int:
        """Processes that each take their own part of the batch."""
        return self.processes // self.tensor_parallel

    @property
    def is_deepspeed(self) -> bool:
        return self.method.startswith("ZeRO")

    @classmethod
    def read(cls, options: Sequence[str]) -> Launch:
        """From the arguments of `accelerate launch`, its configuration file included; options win over the file.

        Raises:
            ValueError: a kind of launch that GRPO training does not use.
        """
        if not options:
            return cls()
        args = launch_command_parser().parse_args([*options, "script"])
        config: Any = load_config_from_file(args.config_file) if args.config_file else None
        kind = getattr(config, "distributed_type", DistributedType.NO)
        processes = args.num_processes or getattr(config, "num_processes", 1) or 1
        parallel = getattr(config, "parallelism_config", None) or {}
        tensor = int(parallel.get("parallelism_config_tp_size", args.parallelism_config_tp_size) or 1)
        common: dict[str, Any] = {
            "processes": processes,
            "tensor_parallel": tensor,
            "mixed_precision": args.mixed_precision or getattr(config, "mixed_precision", None) or "no",
        }
        if args.use_deepspeed or kind == DistributedType.DEEPSPEED:
            return cls(**common, **_deepspeed(args, getattr(config, "deepspeed_config", None) or {}))
        if args.use_fsdp or kind == DistributedType.FSDP:
            return cls(**common, **_fsdp(args, getattr(config, "fsdp_config", None) or {}))
        if kind in (DistributedType.MEGATRON_LM, DistributedType.XLA):
            raise ValueError(f"{args.config_file}: distributed_type {kind.value} cannot be planned.")
        if tensor > 1:
            return cls(**common, method="tensor parallel")
        return cls(**common, method="DDP" if processes > 1 else "one process")


def _deepspeed(args: Any, found: dict[str, Any]) -> dict[str, Any]:
    path = args.deepspeed_config_file or found.get("deepspeed_config_file")
    zero: dict[str, Any] = _json(path).get("zero_optimization", {}) if path else {}
    stage = int(zero.get("stage", args.zero_stage or found.get("zero_stage", 2)))

    def offloads(what: str) -> bool:
        device = zero.get(f"offload_{what}", {}).get("device")
        device = device or getattr(args, f"offload_{what}_device") or found.get(f"offload_{what}_device")
        return (device or "none") != "none"

    return {
        "method": f"ZeRO-{stage}",
        "shards_optimizer": stage >= 1,
        "shards_gradients": stage >= 2,
        "shards_weights": stage >= 3,
        "offloads_optimizer": offloads("optimizer"),
        "offloads_weights": stage >= 3 and offloads("param"),
    }


def _json(path: str) -> dict[str, Any]:
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"deepspeed_config_file {path} is not a JSON object: {error}.") from error


def _fsdp(args: Any, found: dict[str, Any]) -> dict[str, Any]:
    version = int(found.get("fsdp_version", args.fsdp_version))
    reshard = str(found.get("fsdp_reshard_after_forward", args.fsdp_reshard_after_forward)).upper()
    whole = reshard in ("FALSE", "NO_SHARD")
    only_gradients = reshard == "SHARD_GRAD_OP" or (version == 2 and whole)
    offload = str(found.get("fsdp_offload_params", args.fsdp_offload_params)).lower() == "true"
    return {
        "method": f"FSDP{version}",
        "shards_optimizer": not (version == 1 and whole),
        "shards_gradients": not (version == 1 and whole),
        "shards_weights": not (whole or only_gradients),
        "offloads_optimizer": offload,
        "offloads_weights": offload,
    }
