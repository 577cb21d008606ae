"""How many processes a run starts, and which parts of the model are sharded over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.commands.launch import _validate_launch_command, launch_command_parser


@dataclass(frozen=True)
class Launch:
    """What `accelerate launch` will start.

    Attributes:
        processes: number of processes, one per device.
        method: what a user calls it: "one process", "DDP", "ZeRO-3", "FSDP2", ...
        shards_optimizer, shards_gradients, shards_weights: whether each process holds only its part of these.
        tensor_parallel: processes that share one copy of the batch.
        mixed_precision: "no", "bf16" or "fp16", as accelerate is told; the training arguments may ask for it as well.
        offloads_optimizer, offloads_weights: whether these lie in host memory.
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
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*options, "script"]))
        if args.tpu or args.use_megatron_lm:
            raise ValueError(f"accelerate launch {' '.join(options)}: TPUs and Megatron-LM cannot be planned.")
        processes, tensor = int(args.num_processes or 1), int(args.parallelism_config_tp_size or 1)
        method = "tensor parallel" if tensor > 1 else "DDP" if processes > 1 else "one process"
        found: dict[str, Any] = {"method": method}
        if args.use_deepspeed:
            found = _deepspeed(args)
        elif args.use_fsdp:
            found = _fsdp(args)
        return cls(processes=processes, tensor_parallel=tensor, mixed_precision=args.mixed_precision, **found)


def _deepspeed(args: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {}
    if path := args.deepspeed_config_file:
        try:
            zero = dict(json.loads(Path(path).read_text(encoding="utf-8"))).get("zero_optimization", {})
        except (ValueError, TypeError) as error:
            raise ValueError(f"deepspeed_config_file {path} is not a JSON object: {error}.") from error
    stage = int(zero.get("stage", args.zero_stage or 2))
    offloads = {
        what: (zero.get(f"offload_{what}", {}).get("device") or getattr(args, f"offload_{what}_device") or "none")
        for what in ("optimizer", "param")
    }
    return {
        "method": f"ZeRO-{stage}",
        "shards_optimizer": stage >= 1,
        "shards_gradients": stage >= 2,
        "shards_weights": stage >= 3,
        "offloads_optimizer": offloads["optimizer"] != "none",
        "offloads_weights": stage >= 3 and offloads["param"] != "none",
    }


def _fsdp(args: Any) -> dict[str, Any]:
    version = int(args.fsdp_version)
    reshard = str(args.fsdp_reshard_after_forward).upper()
    whole = reshard in ("FALSE", "NO_SHARD")
    offload = str(args.fsdp_offload_params).lower() == "true"
    return {
        "method": f"FSDP{version}",
        "shards_optimizer": version == 2 or not whole,
        "shards_gradients": version == 2 or not whole,
        "shards_weights": not whole and reshard != "SHARD_GRAD_OP",
        "offloads_optimizer": offload,
        "offloads_weights": offload,
    }
