"""`LMHead`: the output projection of a language model, as the scorer reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup


@dataclass
class VocabShard:
    """The vocabulary rows `[start, stop)` that this rank owns.

    Attributes:
        group: ranks whose shards together are the vocabulary; `None` when this rank holds all of it.
        reduce_hidden_grad: sum the gradient of the hidden states over `group`. False where the caller does so itself:
            with sequence parallelism the gather before the head reduces and scatters it in backward.
    """

    start: int
    stop: int
    group: ProcessGroup | None = None
    reduce_hidden_grad: bool = True


@dataclass
class LoRAFactors:
    """A low-rank addition to the head: its weight is `weight + scaling * b @ a`, behind a dropout of the states.

    Attributes:
        a: `[r, H]`.
        b: `[V_local, r]`.
        scaling: factor of the product.
        dropout: of the hidden states that go into `a`; `None` for none.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    dropout: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass
class LMHead:
    """Logits of hidden state `h`: `softcap * tanh(logit_scale * (weight @ h + bias) / softcap)`.

    Every family in transformers that has both a scale and a softcap scales first.

    Attributes:
        weight: `[V_local, H]`.
        bias: `[V_local]`.
        shard: the rows of the vocabulary that `weight` holds; `None` when it holds all.
        logit_scale: factor of the projection.
        softcap: bound of the logits; `None` for unbounded ones.
        lora: low-rank addition to `weight`.

    Raises:
        ValueError: parts whose shapes disagree.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    shard: VocabShard | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    lora: LoRAFactors | None = None

    def __post_init__(self) -> None:
        num_rows = self.weight.shape[0]
        if self.bias is not None and self.bias.shape != (num_rows,):
            raise ValueError(f"Head bias has shape {tuple(self.bias.shape)} for a weight of {num_rows} rows.")
        if self.shard is not None and self.shard.stop - self.shard.start != num_rows:
            raise ValueError(
                f"The vocabulary shard [{self.shard.start}, {self.shard.stop}) has "
                f"{self.shard.stop - self.shard.start} rows and the head's weight {num_rows}."
            )
        if self.lora is not None and (
            self.lora.a.shape[1:] != self.weight.shape[1:] or self.lora.b.shape != (num_rows, self.lora.a.shape[0])
        ):
            raise ValueError(
                f"LoRA factors of shapes a {tuple(self.lora.a.shape)} and b {tuple(self.lora.b.shape)} do not fit a "
                f"head of shape {tuple(self.weight.shape)}."
            )

    @property
    def vocab_range(self) -> tuple[int, int]:
        if self.shard is None:
            return 0, self.weight.shape[0]
        return self.shard.start, self.shard.stop

    @property
    def group(self) -> ProcessGroup | None:
        return None if self.shard is None else self.shard.group
