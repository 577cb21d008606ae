"""`PackedTensor`: per-sample values of different lengths in one tensor, for the training batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class PackedTensor:
    """`B` samples, packed one after the other without padding.

    Sample `b` is `values[cu_seqlens[b]:cu_seqlens[b + 1]]`. Slices and single samples are views.

    Pickling, `torch.save` and the queues of data-loader workers see two tensors, so values are shared or written as any
    tensor is. `torch.load` wants `weights_only=False`, or `torch.serialization.safe_globals([PackedTensor])`.

    Args:
        values: `[N, …]`, of any type, on any device.
        cu_seqlens: `[B + 1]` integers from 0 to `N`, never falling. Kept as int64 on the host, whatever the device of
            the values: choosing samples never waits for a device. Kernels take `cu_seqlens.to(device, torch.int32)`.

    Raises:
        ValueError: sequence lengths that do not cover the values.
    """

    __slots__ = ("values", "cu_seqlens")

    values: torch.Tensor
    cu_seqlens: torch.Tensor

    def __init__(self, values: torch.Tensor, cu_seqlens: Any) -> None:
        ends = torch.as_tensor(cu_seqlens, device="cpu")
        if ends.ndim != 1 or ends.is_floating_point() or ends.dtype == torch.bool:
            raise ValueError(f"cu_seqlens of type {ends.dtype} and shape {tuple(ends.shape)} are not [B + 1] integers.")
        ends = ends.to(torch.int64)
        if values.ndim == 0:
            raise ValueError("A single number cannot be packed: values are [N, …].")
        if len(ends) == 0 or ends[0] != 0 or ends[-1] != len(values) or (ends[1:] < ends[:-1]).any():
            raise ValueError(f"cu_seqlens {ends.tolist()} do not rise from 0 to the {len(values)} values.")
        self.values = values
        self.cu_seqlens = ends

    @classmethod
    def from_samples(cls, samples: Sequence[torch.Tensor]) -> PackedTensor:
        """Pack tensors `[len, …]` that agree in all but their length.

        Raises:
            ValueError: no samples (their type and width would be unknown; pack an empty tensor with `cu_seqlens=[0]`),
                or types or widths that differ.
        """
        if not samples:
            raise ValueError("No samples: give PackedTensor an empty tensor of the right type and cu_seqlens [0].")
        for i, sample in enumerate(samples):
            _check_alike(sample, samples[0], f"sample {i}", "sample 0")
        return cls(torch.cat(list(samples)), _ends(torch.tensor([len(sample) for sample in samples])))

    @classmethod
    def concatenate(cls, parts: Sequence[PackedTensor]) -> PackedTensor:
        """The samples of several packs, in order.

        Raises:
            ValueError: no parts, or types or widths that differ.
        """
        if not parts:
            raise ValueError("No parts: type and width of the result would be unknown.")
        for i, part in enumerate(parts):
            _check_alike(part.values, parts[0].values, f"part {i}", "part 0")
        return cls(torch.cat([part.values for part in parts]), _ends(torch.cat([part.lengths for part in parts])))

    @property
    def lengths(self) -> torch.Tensor:
        """`[B]` int64 on the host."""
        return self.cu_seqlens.diff()

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.values.dtype

    def split(self, sizes: int | Sequence[int]) -> list[PackedTensor]:
        """Packs of consecutive samples, as views.

        Args:
            sizes: samples a pack (the last may have fewer), or the size of each pack, `B` in total.
        """
        if isinstance(sizes, int):
            if sizes < 1:
                raise ValueError(f"Cannot split {len(self)} samples into packs of {sizes}.")
            starts = range(0, len(self), sizes)
            return [self[start : start + sizes] for start in starts]
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ValueError(f"Packs of {list(sizes)} samples do not add up to {len(self)}.")
        return [self[start:stop] for start, stop in itertools.pairwise([0, *itertools.accumulate(sizes)])]

    def to(self, *args: Any, **kwargs: Any) -> PackedTensor:
        """The values moved or converted, as `Tensor.to` does; the sequence lengths stay on the host."""
        return self._with(self.values.to(*args, **kwargs))

    def pin_memory(self) -> PackedTensor:
        """The values in page-locked memory. A data loader with `pin_memory=True` calls this."""
        return self._with(self.values.pin_memory())

    def _with(self, values: torch.Tensor) -> PackedTensor:
        return self if values is self.values else PackedTensor(values, self.cu_seqlens)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def __getitem__(self, index: Any) -> Any:
        """One sample's values, by integer; a pack by slice, list, integer tensor, or boolean mask of length `B`."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                ends = self.cu_seqlens[start : max(start, stop) + 1]
                first, last = ends[0].item(), ends[-1].item()
                return PackedTensor(self.values[first:last], ends - first)
            return self._gather(torch.arange(len(self)).numpy()[index].tolist())
        chosen = torch.as_tensor(index, device="cpu")
        if chosen.ndim > 1 or chosen.is_floating_point() and chosen.numel():
            raise TypeError(f"Samples are chosen by integers or a boolean mask, not by {index!r}.")
        if chosen.dtype == torch.bool:
            if chosen.shape != (len(self),):
                raise IndexError(f"A mask of shape {tuple(chosen.shape)} chooses among {len(self)} samples.")
            return self._gather(chosen.nonzero().flatten().tolist())
        if chosen.ndim == 0:
            start = self._position(int(chosen))
            return self.values[self.cu_seqlens[start] : self.cu_seqlens[start + 1]]
        return self._gather([self._position(i) for i in chosen.tolist()])

    def _position(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Sample {index} is outside {len(self)} samples.")
        return index % len(self)

    def _gather(self, samples: list[int]) -> PackedTensor:
        chosen = torch.tensor(samples, dtype=torch.int64)
        starts, lengths = self.cu_seqlens[chosen], self.lengths[chosen]
        ends = _ends(lengths)
        total = int(ends[-1])
        source = torch.arange(total) + (starts - ends[:-1]).repeat_interleave(lengths, output_size=total)
        return PackedTensor(self.values[source.to(self.device, non_blocking=True)], ends)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The samples, as views."""
        return iter(self.values.split(self.lengths.tolist()))

    def __reduce__(self) -> tuple:
        return PackedTensor, (self.values, self.cu_seqlens)

    def __repr__(self) -> str:
        shape, dtype, device = tuple(self.values.shape), self.dtype, self.device
        return f"PackedTensor(samples={len(self)}, values={shape}, dtype={dtype}, device={device})"


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _check_alike(values: torch.Tensor, first: torch.Tensor, name: str, first_name: str) -> None:
    if values.dtype != first.dtype or values.shape[1:] != first.shape[1:] or values.ndim == 0:
        raise ValueError(
            f"{name} holds {values.dtype} of shape {tuple(values.shape)}, "
            f"{first_name} {first.dtype} of shape {tuple(first.shape)}."
        )
