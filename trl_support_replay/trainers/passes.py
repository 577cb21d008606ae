"""One scoring pass: which completions are scored, for what, at which temperature, and what came of it.

A training step scores the same completions several times: for the old and the reference policy right after generation,
for the loss, and for checks. Whoever starts such a pass opens a `ScoringPass`. Everything that scores inside finds the
supports there, whichever method of whichever subclass it is called from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..batch.layout import SampleBatch
from ..rollouts.recorder import SupportRecorder


class UnscoredBatchError(RuntimeError):
    """Completions with recorded supports that are scored, or would be, without their supports."""


class LossInputs(dict):
    """The batch that a loss is computed from.

    Some entries are complete only when the policy has been scored: with `kl_scope="full"` the reference's log-probs are
    set off against the policy's. Reading such an entry earlier is an error, since it would give another penalty.
    """

    def __init__(self, batch: dict[str, Any], pending: tuple[str, ...] = ()):
        super().__init__(batch)
        self.pending = set(pending)
        self._given: dict[str, Any] = {}  # entries that are complete, as the batch gave them

    def complete(self, name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace an entry by `function` of what the batch gave; from here on it can be read.

        Called at each scoring. One without gradients does not replace what one with gradients made: the entry takes
        part in the gradient of the loss.
        """
        if name in self._given and not torch.is_grad_enabled():
            return
        self.pending.discard(name)
        given = self._given.setdefault(name, self[name])
        self[name] = function(given)

    def check_part(self, part: dict[str, Any]) -> None:
        """Refuse a part or a copy of the batch that may hold an entry which is complete already.

        Raises:
            UnscoredBatchError: scoring the part would complete the entry a second time.
        """
        twice = [name for name in self._given if name in part]
        if twice:
            raise UnscoredBatchError(
                f"_compute_loss was given a part or a copy of a batch that was scored before, so inputs[{twice[0]!r}] "
                "is complete already and would be completed twice. With kl_scope='full', give _compute_loss the inputs "
                "themselves, take parts and copies before anything is scored, or set kl_scope='support'."
            )

    def __getitem__(self, name: str) -> Any:
        if name in self.pending:
            raise UnscoredBatchError(
                f"inputs[{name!r}] was read before the policy was scored. With kl_scope='full' it is complete only "
                "after _get_per_token_logps_and_entropies has scored the batch: score first, or set kl_scope='support'."
            )
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default


@dataclass(eq=False)
class ScoringPass:
    """One pass over `B` recorded completions.

    Attributes:
        role: `"generation"` (old and reference policy, right after sampling), `"loss"`, or `"rescore"` (whatever else).
        samples: the completions; `None` where none are recorded, so that scores are over the vocabulary.
        inputs: the batch that is scored; empty while it is still being generated.
        temperature: softmax temperature; `None` for the trainer's own.
        live_routes: score through the live routers, whatever routes were recorded.
        recorder: records supports, while completions are sampled.
        extra: scores beside the log-probs by name, `[B, T]` each, of the policy's latest scoring.
        logprobs: `[B, T]` log-probs of the policy, over the supports; `None` until it has been scored.
        unchecked: log-probs and batches that were scored for the first time, to be compared with the record.
        scoring: whether `_get_per_token_logps_and_entropies` is running.
    """

    role: Literal["generation", "loss", "rescore"]
    samples: SampleBatch | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    live_routes: bool = False
    recorder: SupportRecorder | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    logprobs: torch.Tensor | None = None
    unchecked: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)
    scoring: bool = False

    def recorded(self, trainer: str) -> SampleBatch:
        """The completions that were sampled.

        Args:
            trainer: name of the trainer's class.

        Raises:
            UnscoredBatchError: they were sampled by a method that records nothing.
        """
        if self.samples is None:
            raise UnscoredBatchError(
                f"{trainer} sampled completions without recording their supports: its _generate does not call the one "
                "that it overrides. Call super()._generate(prompts), or sample in a rollout_func that returns supports."
            )
        return self.samples

    def check_model_call(self, input_ids: Any) -> None:
        """Refuse a model call that would score the batch of a loss over the vocabulary.

        Args:
            input_ids: `[b, s]` ids of a call without supports; other tokens than the batch's may be scored freely.

        Raises:
            UnscoredBatchError: a row of them begins as one of the batch's does, and reaches into its completion.
        """
        if self.role != "loss" or self.scoring or self.samples is None or not isinstance(input_ids, torch.Tensor):
            return
        whole = torch.cat([self.inputs["prompt_ids"], self.inputs["completion_ids"]], dim=1)  # [B, S]
        width = min(whole.shape[1], input_ids.shape[-1])
        if input_ids.dim() != 2 or width <= self.inputs["prompt_ids"].shape[1]:
            return
        if (input_ids[:, None, :width] == whole[None, :, :width]).all(dim=2).any():
            raise UnscoredBatchError(
                "The loss calls the model on completions with recorded supports, but without their supports: these "
                "scores would be over the whole vocabulary. Score them by "
                "self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, ...); to "
                "see logits of the whole vocabulary on purpose, call the model inside `with self.scoring({}):`."
            )

    def check_scored(self, trainer: str) -> None:
        """Refuse a loss that did not score its batch.

        Args:
            trainer: name of the trainer's class.

        Raises:
            UnscoredBatchError: the batch has recorded supports, and no score was taken over them.
        """
        if self.role == "loss" and self.samples is not None and self.logprobs is None:
            raise UnscoredBatchError(
                f"{trainer} computed its loss without scoring the batch over its recorded supports. Take log-probs "
                "from self._get_per_token_logps_and_entropies, or leave out the settings that cut tokens."
            )
