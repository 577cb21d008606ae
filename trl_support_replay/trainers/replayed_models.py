"""Make the models of a trainer fit for replay, once, as soon as they can run."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..batch.layout import BatchLayout
from ..policy.model_probe import Probe
from ..policy.noise import silence
from ..policy.replay_head import ReplayBatch
from ..settings.contract import UnreplayableSettingError
from ..settings.neftune import refuse_neftune
from ..traces.columns import Trace

logger = logging.getLogger(__name__)


class ReplayedModels:
    """The policy and the reference of a trainer: their noise is switched off, and both are probed.

    This happens at construction. Models that are still to be sharded (FSDP, DeepSpeed, tensor parallelism) or moved to
    their device cannot run there; for them it happens before the first generation, on every process.

    Args:
        trainer: a replaying trainer, built.

    Raises:
        UnreplayableSettingError: for adapters with virtual tokens, and for NEFTune.
        UnreplayableModelError: for a model whose scores cannot be replayed.
    """

    def __init__(self, trainer: Any):
        refuse_neftune(trainer.args)
        _refuse_virtual_tokens(trainer.model)
        self._trainer = trainer
        self._done = False
        if self._can_run():
            self.make_ready()

    def make_ready(self) -> None:
        """Switch noise off and probe, unless that is done."""
        if self._done:
            return
        off: dict[str, float] = {}
        for model in self._models():
            probe = Probe.run(model)
            off |= silence(model)
            probe.check_training_mode(model)
            probe.check_scores(model, functools.partial(replayed_scores, model))
        if off and self._trainer.accelerator.is_main_process:
            listed = ", ".join(f"{name}={value:g}" for name, value in off.items())
            logger.warning(
                "Dropout and other noise of training mode is off while supports are replayed, since the engine samples "
                f"without it: {listed}. The configuration that is saved with the model keeps these values."
            )
        self._done = True

    def _models(self) -> list[Any]:
        return [m for m in (self._trainer.model, self._trainer.ref_model) if m is not None]

    def _can_run(self) -> bool:
        trainer = self._trainer
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return False
        parameters = [p for model in self._models() for p in model.parameters()]
        here = trainer.accelerator.device.type
        return not any(isinstance(p, DTensor) or p.device.type != here for p in parameters)


def _refuse_virtual_tokens(model: Any) -> None:
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning:
            raise UnreplayableSettingError(
                "peft_config",
                type(config).__name__,
                "adapters that add virtual tokens (prompt tuning, prefix tuning) score positions that the batch does "
                "not have",
                "Use LoRA, which adds none",
            )


def replayed_scores(model: Any, traces: list[Trace]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens by the replay head: over the supports, and over the vocabulary."""
    ids = torch.tensor([[*t.prompt_ids.tolist(), *t.completion_ids.tolist()] for t in traces])
    ids = ids.to(next(p.device for p in model.parameters() if not p.is_meta))
    layout = BatchLayout.build(traces, (ids.shape[0], ids.shape[1]), len(traces[0].completion_ids), ids.device)
    batch = ReplayBatch(layout, temperature=1.0, log_probs="logprobs", extra=("full_logprobs",))
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, replay=batch)
    return output.log_probs, output.extra[0]
