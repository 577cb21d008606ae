"""The head rows that some tokens need, fetched from the ranks that hold them, instead of the whole head.

Data-parallel sharding splits the output head over ranks that score different tokens. Its usual way is to gather the
whole `[V, H]` weight on every rank, twice, and to reduce a whole gradient. Support scores need only the union of the
candidates. Here each rank asks each owner for the rows it needs, and sends their gradients back: what travels, and what
a rank holds, is `[U, H]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# Fetch when every rank needs less than this part of the rows: up to it, fetching was the faster in
# benchmarks/head_fetch.py, and never moved more.
FETCH_BELOW = 0.5


@dataclass(frozen=True)
class RowShards:
    """A matrix whose rows lie on the ranks of a group, in rank order.

    Attributes:
        rows: `[v, H]`, this rank's rows, `v` at most `step`. Gradients flow to it.
        num_rows: `V`, rows of all ranks.
        step: rows of each rank but the last ones.
        group: the ranks.
        dtype: in which rows travel and are returned.
        divide_gradient: divide gradients by the number of ranks, as data parallelism does, which averages them.
    """

    rows: torch.Tensor
    num_rows: int
    step: int
    group: ProcessGroup
    dtype: torch.dtype
    divide_gradient: bool

    def fetch(self, ids: np.ndarray | None) -> torch.Tensor | None:
        """`[U, H]` rows of sorted distinct `ids`, or `None` on every rank if that would not pay on each.

        Every rank of the group calls this, whatever it needs. It makes one small collective, and if rows are fetched
        two more, then one in backward if the rows bear gradient. The counts are read on the host.

        Args:
            ids: `None` if this rank needs all rows.

        Raises:
            ValueError: on every rank, when one of them has an id beyond the rows.
        """
        size = dist.get_world_size(self.group)
        counts_here, stray = np.full(size, self.num_rows), np.zeros(0, dtype=np.int64)
        if ids is not None:
            bounds = np.minimum(np.arange(size + 1) * self.step, self.num_rows)
            counts_here = np.diff(np.searchsorted(ids, bounds))
            stray = ids[(ids < 0) | (ids >= self.num_rows)]
        row = np.array([*counts_here, len(stray), stray[0] if len(stray) else 0])
        asked = torch.from_numpy(row).to(self.rows.device)
        everyone = asked.new_empty(size * (size + 2))
        dist.all_gather_into_tensor(everyone, asked, group=self.group)
        table = everyone.view(size, size + 2).cpu().numpy()
        # After the exchange, so that every rank stops: one that raised before it would leave the others waiting.
        for asking, (number, first) in enumerate(table[:, size:].tolist()):
            if number:
                raise ValueError(
                    f"{number} candidates of rank {asking}, {first} among them, lie beyond the head's {self.num_rows} "
                    "rows."
                )
        counts = table[:, :size]  # [asking rank, owner]
        if ids is None or counts.sum(axis=1).max() >= FETCH_BELOW * self.num_rows:
            return None
        rank = dist.get_rank(self.group)
        sent, received = counts[rank].tolist(), counts[:, rank].tolist()
        wanted = torch.from_numpy(ids).to(self.rows.device)
        requests = wanted.new_empty(sum(received))
        dist.all_to_all_single(requests, wanted, received, sent, group=self.group)
        return _Exchange.apply(self, requests - rank * self.step, received, sent, self.rows)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: RowShards, local: torch.Tensor, received: list, sent: list, rows: torch.Tensor):
        ctx.shards, ctx.received, ctx.sent, ctx.shape = shards, received, sent, rows.shape
        ctx.save_for_backward(local)
        answers = rows[local].to(shards.dtype)
        fetched = answers.new_empty(sum(sent), rows.shape[1])
        dist.all_to_all_single(fetched, answers, sent, received, group=shards.group)
        return fetched

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (local,) = ctx.saved_tensors
        shards, dtype = ctx.shards, ctx.shards.rows.dtype
        # In the wider dtype: partial sums of half precision would be rounded once a rank.
        returned = grad.new_empty(sum(ctx.received), grad.shape[1], dtype=torch.promote_types(grad.dtype, dtype))
        dist.all_to_all_single(
            returned, grad.to(returned.dtype).contiguous(), ctx.received, ctx.sent, group=shards.group
        )
        if shards.divide_gradient:
            returned /= dist.get_world_size(shards.group)
        # Rank by rank, so that the order of the additions is fixed.
        total = returned.new_zeros(ctx.shape)
        for part, places in zip(returned.split(ctx.received), local.split(ctx.received), strict=True):
            total.index_add_(0, places, part)
        return None, None, None, None, total.to(dtype)


def row_shards(module: nn.Module, parameter: nn.Parameter) -> RowShards | None:
    """The rows of a head's `parameter`, if it is sharded by rows in a way that rows can be fetched from.

    - FSDP2, where the head is sharded as a unit that is not gathered now: in its own unit, that is. Not where its rows
      are offloaded to the CPU.
    - DeepSpeed ZeRO-3, where the parameter is frozen (LoRA) and its partitions end with a row, lie on the device, and
      are in the parameter's own dtype: neither offloaded nor quantised. A trained parameter's gradient has to go
      through DeepSpeed's own hooks, which want it whole.

    Args:
        module: the module that holds the parameter.
        parameter: `[V, H]`, or `[V]`, whose rows have width 1.
    """
    if isinstance(parameter, DTensor) and isinstance(module, FSDPModule):
        return _fsdp2_shards(module, parameter)
    if getattr(parameter, "ds_tensor", None) is not None and not parameter.requires_grad:
        return _zero3_shards(parameter)
    return None


def _fsdp2_shards(module: FSDPModule, parameter: DTensor) -> RowShards | None:
    mesh = parameter.device_mesh
    if mesh.ndim != 1 or not parameter.placements[0].is_shard(0):
        return None
    unit = module._get_fsdp_state()._fsdp_param_group
    assert unit is not None  # it holds the parameter
    num_rows = parameter.shape[0]
    rows = parameter.to_local()
    if rows.device.type != unit.device.type:
        return None
    return RowShards(
        rows.reshape(len(rows), -1),
        num_rows,
        step=-(-num_rows // mesh.size()),  # as torch.chunk splits
        group=mesh.get_group(),
        dtype=unit.mp_policy.param_dtype or parameter.dtype,
        divide_gradient=True,
    )


def _zero3_shards(parameter: Any) -> RowShards | None:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    partition, group = parameter.ds_tensor, parameter.ds_process_group
    width = int(np.prod(parameter.ds_shape[1:], dtype=np.int64))
    aligned = partition.numel() % width == 0
    if parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE or not aligned or not partition.numel():
        return None
    if (partition.device.type, partition.dtype) != (parameter.device.type, parameter.dtype):
        return None
    return RowShards(
        partition.detach().view(-1, width),
        num_rows=parameter.ds_shape[0],
        step=partition.numel() // width,
        group=group,
        dtype=parameter.dtype,
        divide_gradient=False,
    )
