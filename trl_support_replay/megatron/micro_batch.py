"""`MicroBatch`: recorded traces as the tokens, targets, supports and routes of one Megatron micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from ..routing.batch import RouteBatch
from ..traces.columns import Trace
from ..traces.shifts import check_unshifted
from ..traces.support import SupportRows
from .core import PackedSeqParams
from .sequence_shard import SequenceShard


@dataclass(frozen=True)
class Tokens:
    """`[B, S]` positions, each with the token it predicts.

    Attributes:
        input_ids, position_ids: int64 `[B, S]`, what goes into the model.
        target_ids: int64 `[B, S]`, the token after each position; 0 after the last of a sequence.
        loss_mask: bool `[B, S]`, positions whose target is part of the loss.
        recorded_logprobs: float32 `[B, S]`, the engine's log-prob of the target; NaN where the engine sampled none.
        support: `B * S` rows, row `b * S + s` what the target of position `(b, s)` was drawn from. Empty where it was
            not sampled.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    target_ids: torch.Tensor
    loss_mask: torch.Tensor
    recorded_logprobs: torch.Tensor
    support: SupportRows

    def to(self, device: torch.device | str) -> Tokens:
        """The same tokens on another device; supports stay on the host until they are scored."""
        return self._changed(lambda values: values.to(device, non_blocking=True), self.support)

    def at(self, positions: torch.Tensor) -> Tokens:
        """The tokens at `positions` `[n]` of every row."""
        batch_size, width = self.input_ids.shape
        rows = torch.arange(batch_size)[:, None] * width + positions
        return self._changed(lambda values: values[:, positions], self.support.take(rows.flatten().numpy()))

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor], support: SupportRows) -> Tokens:
        changed = {f.name: change(getattr(self, f.name)) for f in fields(self) if f.name != "support"}
        return Tokens(**changed, support=support)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch before any split over ranks.

    Attributes:
        tokens: `[B, S]` positions; `B` is 1 when sequences are packed.
        routes: of all positions, for [`MegatronRouterReplay`]; `None` where none were recorded.
        lengths: of the sequences on the sequence axis, each with its padding: `(S,)`, or those packed end to end.
        num_loss_tokens: loss-bearing targets.
        num_synthetic_eos: those among them that nobody sampled; at most one a trace.
    """

    tokens: Tokens
    routes: RouteBatch | None
    lengths: tuple[int, ...]
    num_loss_tokens: int
    num_synthetic_eos: int

    @classmethod
    def from_traces(
        cls,
        traces: Sequence[Trace],
        *,
        multiple: int = 1,
        width: int | None = None,
        packed: bool = False,
        pad_token_id: int = 0,
        vocab_size: int | None = None,
    ) -> MicroBatch:
        """Lay traces out, prompts and completions, with padding behind each.

        Args:
            traces: with routes all, or none.
            multiple: every sequence is padded to a multiple of this; see [`SequenceShard.multiple`].
            width: `S`, for schedules that want all micro-batches alike. Default: as short as `multiple` allows.
            packed: one row with all sequences end to end, instead of one row each.
            pad_token_id: stands at padding.
            vocab_size: rows of the whole output layer, padded ones included, to check ids against.

        Raises:
            ValueError: no trace, one that does not fit `width`, or routes of some traces only.
            SupportError, TraceSchemaError: a trace without prompt, a support without its sampled token, more
                loss-bearing tokens without support than one at the very end, and other faults of a trace.
        """
        if not traces:
            raise ValueError("There is no trace to lay out.")
        for i, trace in enumerate(traces):
            trace.check(f"trace {i}", vocab_size)
        check_unshifted(traces, "scores in Megatron-Core do not repeat that")
        lengths, starts, shape = _layout(traces, multiple, width, packed)
        num_positions = shape[0] * shape[1]
        input_ids = np.full(num_positions, pad_token_id, dtype=np.int64)
        position_ids = np.concatenate([np.arange(length) for length in lengths])
        target_ids = np.zeros(num_positions, dtype=np.int64)
        loss_mask = np.zeros(num_positions, dtype=bool)
        logprobs = np.full(num_positions, np.nan, dtype=np.float32)
        rows = np.full(num_positions, -1, dtype=np.int64)
        first_row = 0
        for trace, start in zip(traces, starts, strict=True):
            ids = np.concatenate([trace.prompt_ids, trace.completion_ids])
            input_ids[start : start + len(ids)] = ids
            target_ids[start : start + len(ids) - 1] = ids[1:]
            # The position before a token predicts it.
            first = start + len(trace.prompt_ids) - 1
            predicts = slice(first, first + len(trace.completion_ids))
            loss_mask[predicts] = trace.loss_mask
            logprobs[predicts] = trace.sampling_logprobs
            rows[predicts] = np.arange(first_row, first_row + len(trace.completion_ids))
            first_row += len(trace.completion_ids)
        support = SupportRows.concatenate([trace.supports for trace in traces]).take(rows)
        tokens = Tokens(
            torch.from_numpy(input_ids.reshape(shape)),
            torch.from_numpy(position_ids.reshape(shape)),
            torch.from_numpy(target_ids.reshape(shape)),
            torch.from_numpy(loss_mask.reshape(shape)),
            torch.from_numpy(logprobs.reshape(shape)),
            support,
        )
        samples = [trace.routes for trace in traces if trace.routes is not None]
        if samples and len(samples) < len(traces):
            raise ValueError(f"{len(samples)} of {len(traces)} traces have routes; all must, or none.")
        routes = None
        if samples:
            places = [divmod(start, shape[1]) for start in starts]
            routes = RouteBatch.from_samples(
                samples, [column for _, column in places], shape[1], [row for row, _ in places]
            )
        return cls(
            tokens=tokens,
            routes=routes,
            lengths=tuple(lengths) if packed else (shape[1],),
            num_loss_tokens=int(loss_mask.sum()),
            num_synthetic_eos=int((loss_mask & (support.sizes == 0)).sum()),
        )

    def local(self, shard: SequenceShard) -> Tokens:
        """The positions that go into the model on one context-parallel rank, `[B, S / C]`."""
        return self.tokens.at(shard.before_scatter.positions(self.lengths))

    def packed_seq_params(self, device: torch.device | str = "cpu") -> PackedSeqParams:
        """How Transformer Engine's attention tells the packed sequences apart."""
        offsets = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        longest = max(self.lengths)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def attention_mask(self) -> torch.Tensor:
        """Bool `[1, 1, S, S]`, True where attention is not allowed: causal, and within each sequence.

        For attention that takes a mask; one that takes `packed_seq_params`, or is causal itself, needs none.
        """
        sequence = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        allowed = (sequence[:, None] == sequence[None, :]).tril()
        return ~allowed[None, None]


def _layout(
    traces: Sequence[Trace], multiple: int, width: int | None, packed: bool
) -> tuple[list[int], list[int], tuple[int, int]]:
    """Padded length and first flat position of each sequence, and `(B, S)`."""
    needed = [len(trace.prompt_ids) + len(trace.completion_ids) for trace in traces]
    lengths = [-(-length // multiple) * multiple for length in needed]
    least = sum(lengths) if packed else max(lengths)
    if width is not None and (width < least or width % multiple):
        raise ValueError(
            f"width={width} does not fit traces of {needed} tokens{', packed' if packed else ''}: it has to be a "
            f"multiple of {multiple} from {least} up."
        )
    size = width or least
    if packed:
        lengths[-1] += size - sum(lengths)
        return lengths, [sum(lengths[:i]) for i in range(len(lengths))], (1, size)
    return [size] * len(lengths), [size * i for i in range(len(lengths))], (len(lengths), size)
