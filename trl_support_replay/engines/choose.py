"""Which engine takes the place of TRL's `VLLMGeneration` in a trainer that replays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def engine_builder(trainer: Any, args: Any) -> Callable[..., Any]:
    """A function with the parameters of `VLLMGeneration` that builds the engine which `args` asks for.

    Args:
        trainer: a `ReplayTrainer`; what it has only when it is built is looked up when the engine asks.
        args: its configuration.
    """
    shared: dict[str, Any] = {
        "settings": trainer.sampling_settings,
        "support_capture": args.support_capture,
        "routers": (lambda: trainer._routes.of(trainer.model)) if trainer.replays_routes else None,
        "routes_missing": args.routes_missing,
        "recorder": lambda: trainer._recorder,
        "policy_step": lambda: trainer.state.global_step,
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
            compression=args.vllm_server_compression,
        )
    from .vllm_engine import SupportVLLMGeneration, policy_dtype_name

    def build(*engine_args: Any, **engine_kwargs: Any) -> Any:
        dtype = policy_dtype_name(trainer.model, args) if args.vllm_dtype == "auto" else args.vllm_dtype
        return SupportVLLMGeneration(
            *engine_args, **shared, dtype=dtype, engine_kwargs=args.vllm_engine_kwargs, **engine_kwargs
        )

    return build
