"""Runs megatron-core, which is written for GPUs, on a CPU, for tests and for trying the recipe.

    python on_cpu.py SCRIPT [ARGUMENTS]      (also under torchrun)

replaces what asks for a CUDA device by its counterpart on the CPU. It touches no router, no schedule and no gradient.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


class _NoStream:
    """A stream or event: everything is done in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, other: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def record_event(self, *args: Any) -> _NoStream:
        return self

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = None  # type: ignore[assignment]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        elif kwargs.get("pin_memory"):
            kwargs.pop("pin_memory")
        return factory(*args, **kwargs)

    return create


def _type_on_gpu(of: Callable[..., Any]) -> Callable[..., Any]:
    """The optimizer checks by name that gradients are CUDA tensors."""

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = of(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    return type_name


def _no_compile(function: Any = None, **kwargs: Any) -> Any:
    return function if function is not None else lambda f: f


def _norm() -> Any:
    """`WrappedTorchNorm.__new__` without its refusal of sequence parallelism, which its norms do support."""

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """megatron-core on the CPU inside the block. Modules of it that are first imported inside are not compiled."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module="megatron")
        put(torch, "compile", _no_compile)
        for name in _FACTORIES:
            put(torch, name, _on_cpu(getattr(torch, name)))
        put(torch.Tensor, "type", _type_on_gpu(torch.Tensor.type))
        put(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
        cuda = torch.cuda
        put(cuda, "current_device", lambda: _CPU)
        put(cuda, "set_device", lambda device: None)
        put(cuda, "synchronize", lambda *args: None)
        put(cuda, "Stream", _NoStream)
        put(cuda, "Event", _NoStream)
        put(cuda, "current_stream", _NoStream)
        put(cuda, "default_stream", _NoStream)
        put(cuda, "stream", lambda stream: contextlib.nullcontext())
        put(cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state())
        put(cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
        put(cuda, "manual_seed", torch.manual_seed)

        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import torch_norm
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

        put(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
        put(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
        put(torch_norm.WrappedTorchNorm, "__new__", _norm())
        if not hasattr(moe_utils, "te_general_gemm"):  # a name that 0.16 looks up without Transformer Engine
            put(moe_utils, "te_general_gemm", None)
        put(
            token_dispatcher,
            "maybe_move_tensor_to_cpu",
            lambda tensor, as_numpy=False, record_stream=False: (
                tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
            ),
        )
        yield


if __name__ == "__main__":
    _, *sys.argv = sys.argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # as if the script had been started itself
    with megatron_on_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
