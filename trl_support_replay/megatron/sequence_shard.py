"""`SequenceShard`: which positions of a sequence axis one rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SequenceShard:
    """One rank's part of the sequence axis, as Megatron's batches and layers cut it.

    - Context parallelism, `C` ranks: every sequence is cut into `2 C` equal chunks, and rank `c` holds chunks `c` and
      `2 C - 1 - c`, so that causal attention costs every rank the same. Sequences that are packed end to end on one
      axis are cut one by one.
    - Sequence parallelism, `T` ranks: between the layers, rank `t` holds the `t`-th of `T` equal runs of what context
      parallelism left.

    Attributes:
        context_size, context_rank: `C` and `c`.
        tensor_size, tensor_rank: `T` and `t`; a size of 1 without sequence parallelism, whatever the tensor-parallel
            size.
    """

    context_size: int = 1
    context_rank: int = 0
    tensor_size: int = 1
    tensor_rank: int = 0

    @classmethod
    def from_groups(
        cls, context_group: ProcessGroup, tensor_group: ProcessGroup, sequence_parallel: bool
    ) -> SequenceShard:
        """This rank's part, by Megatron's groups and `config.sequence_parallel`."""
        scattered = sequence_parallel and tensor_group.size() > 1
        return cls(
            context_size=context_group.size(),
            context_rank=context_group.rank(),
            tensor_size=tensor_group.size() if scattered else 1,
            tensor_rank=tensor_group.rank() if scattered else 0,
        )

    @property
    def multiple(self) -> int:
        """Every sequence's length, padding included, is a multiple of this."""
        return (2 * self.context_size if self.context_size > 1 else 1) * self.tensor_size

    @property
    def before_scatter(self) -> SequenceShard:
        """The part that goes into the embedding and comes out of the head: cut by context, not by sequence."""
        return replace(self, tensor_size=1, tensor_rank=0)

    def positions(self, lengths: Sequence[int]) -> torch.Tensor:
        """Int64 positions on the sequence axis that this rank holds, in its order.

        Args:
            lengths: of the sequences that lie end to end on the axis; one for a batch that is not packed.

        Raises:
            ValueError: a length that cannot be cut evenly.
        """
        chunks, start = [], 0
        for length in lengths:
            if length % self.multiple:
                raise ValueError(
                    f"A sequence of {length} positions cannot be cut for context_size={self.context_size} and "
                    f"sequence-parallel size {self.tensor_size}: pad it to a multiple of {self.multiple}."
                )
            if self.context_size == 1:
                chunks.append(torch.arange(start, start + length))
            else:
                of_sequence = torch.arange(start, start + length).chunk(2 * self.context_size)
                chunks += [of_sequence[self.context_rank], of_sequence[2 * self.context_size - 1 - self.context_rank]]
            start += length
        return torch.cat(chunks).chunk(self.tensor_size)[self.tensor_rank]
