"""Stacks values of routers that `device_map` has put on several devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stack_across_devices(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.stack` on the device of the first of at least one tensor."""
    return torch.stack([x.to(tensors[0].device) for x in tensors], dim)
