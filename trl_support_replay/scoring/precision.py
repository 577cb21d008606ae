"""In which precision scores are computed."""

from __future__ import annotations

import torch


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """float64 where an input is float64, else float32: half-precision products move log-probs by about 5e-3."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def full_precision(device: torch.device) -> torch.autocast:
    """A context in which autocast does not turn float32 products into half-precision ones."""
    return torch.autocast(device.type, enabled=False)
