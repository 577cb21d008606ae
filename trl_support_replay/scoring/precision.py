"""In which precision scores are computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float64 where an input is float64, else float32: half-precision products move log-probs by about 5e-3."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def full_precision(device: torch.device) -> AbstractContextManager:
    """A context in which float32 products are float32 ones: neither autocast nor TF32 rounds what goes into them."""
    autocast = torch.autocast(device.type, enabled=False)
    return _on_cuda(autocast) if device.type == "cuda" else autocast


@contextmanager
def _on_cuda(autocast: torch.autocast) -> Iterator[None]:
    with autocast, _without_tf32:
        yield


class _WithoutTF32:
    """Switches TF32 off for matrix products while any thread is inside, and back on when the last one leaves.

    PyTorch keeps this setting for the whole process, and backward runs in a thread of each device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._was_on = _tf32_is_on()
                if self._was_on:
                    _set_tf32(False)
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and self._was_on:
                _set_tf32(True)


_without_tf32 = _WithoutTF32()

# From PyTorch 2.9 on products follow `fp32_precision`. The older `allow_tf32` sets it too, but reading that one raises
# when both have been set, so where there is the newer one, it alone is read and written.
_HAS_FP32_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def _tf32_is_on() -> bool:
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if _HAS_FP32_PRECISION else matmul.allow_tf32


def _set_tf32(on: bool) -> None:
    matmul = torch.backends.cuda.matmul
    if _HAS_FP32_PRECISION:
        matmul.fp32_precision = "tf32" if on else "ieee"
    else:
        matmul.allow_tf32 = on
