"""Which engine takes the place of TRL's `VLLMGeneration` in a trainer that replays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from ..rollouts.recorder import SupportRecorder
from ..routing import RouterReplay
from ..settings.contract import SamplingSettings


@dataclass(frozen=True)
class CaptureSession:
    """What an engine knows of the trainer that samples through it.

    The functions give the state of the moment: engines are built before the trainer is, and outlive many batches.

    Attributes:
        settings: the sampling settings, already checked by the contract.
        model: returns the policy.
        recorder: returns the recorder of the current generation batch; `None` when nothing is to be recorded.
        routers: returns the policy's `RouterReplay`; `None` in its place when routes are not recorded.
        policy_step: returns the policy's optimizer step, to know which weights the engine holds.
    """

    settings: SamplingSettings
    model: Callable[[], torch.nn.Module]
    recorder: Callable[[], SupportRecorder | None]
    routers: Callable[[], RouterReplay] | None
    policy_step: Callable[[], int]


def engine_builder(session: CaptureSession, args: Any) -> Callable[..., Any]:
    """A function with the parameters of `VLLMGeneration` that builds the engine which `args` asks for.

    Args:
        session: what the engine knows of its trainer.
        args: the trainer's configuration.
    """
    shared: dict[str, Any] = {
        "settings": session.settings,
        "support_capture": args.support_capture,
        "routers": session.routers,
        "routes_missing": args.routes_missing,
        "recorder": session.recorder,
        "policy_step": session.policy_step,
    }
    if args.vllm_mode == "server":
        from .vllm_server import SupportVLLMServerGeneration

        return functools.partial(
            SupportVLLMServerGeneration,
            **shared,
            server_urls=args.vllm_server_urls,
            weight_sync=args.weight_sync,
            weight_sync_dir=args.weight_sync_dir,
            request_timeout=args.vllm_server_request_timeout,
        )
    from .vllm_captures import choose_capture
    from .vllm_engine import SupportVLLMGeneration, policy_dtype_name

    # What is known before the model is loaded is refused before.
    choose_capture(args.support_capture, session.settings, args.vllm_engine_kwargs or {}, planned=True)

    def build(*engine_args: Any, **engine_kwargs: Any) -> Any:
        dtype = policy_dtype_name(session.model(), args) if args.vllm_dtype == "auto" else args.vllm_dtype
        return SupportVLLMGeneration(
            *engine_args, **shared, dtype=dtype, engine_kwargs=args.vllm_engine_kwargs, **engine_kwargs
        )

    return build


def engine_used(trainer: Any) -> dict[str, str]:
    """Name and version of what a trainer samples with; of servers, as far as they tell."""
    if trainer.use_vllm and trainer.vllm_mode == "server":
        versions = {str(s.info.get("engine_version", "unknown")) for s in trainer.vllm_generation.pool.servers}
        return {"name": "vllm", "version": ", ".join(sorted(versions))}
    if trainer.use_vllm:
        from .vllm_captures import vllm_version

        return {"name": "vllm", "version": str(vllm_version())}
    return {"name": "transformers", "version": transformers.__version__}
