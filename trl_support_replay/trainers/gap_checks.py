"""Compares replayed with recorded log-probs in a trainer, and logs what scoring found."""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl import GRPOTrainer

from ..batch.layout import SampleBatch, recorded_mask
from ..checks.replay_check import GapStatistics, ReplayCheck, ReplayGapError, explain
from ..checks.replay_metrics import Metrics, StepMetrics, mean, over_processes, route_metrics
from ..parallel.tensor_parallel import SampleGroups
from .passes import ScoringPass

if TYPE_CHECKING:
    _TRLTrainer = Any  # one of several, whose methods differ
else:
    _TRLTrainer = object

logger = logging.getLogger(__name__)

SAMPLES = "support_samples"
"""The batch's list of `Trace`, which TRL shuffles and splits with its tensors."""


# What TRL hands to the model beside tokens (images), under the same names in a batch.
_SCORING = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
_MODEL_INPUTS = _SCORING[_SCORING.index("compute_aux_loss") + 1 :]


class GapChecks(_TRLTrainer):
    """Mixed into a replaying trainer: what it does with the scores of its own batches."""

    _replay_check: ReplayCheck
    _step_metrics: StepMetrics
    _groups: SampleGroups

    @abstractmethod
    def _recorded_logprobs(self, batch: dict[str, Any]) -> torch.Tensor:
        """`[B, T]` log-probs that the engine reported."""

    def _check_replay(self, replayed: torch.Tensor, batch: dict[str, Any], same_weights: bool = True) -> None:
        """Compare with the recorded log-probs.

        Args:
            replayed: `[B, T]` log-probs, scored while engine and policy held the same weights.
            batch: what was scored.
            same_weights: whether the policy still holds them, so that scoring once more tells something.
        """
        recorded = self._recorded_logprobs(batch)
        mask = recorded_mask(batch[SAMPLES], replayed.shape).to(replayed.device)
        stale = self._stale_weights()
        found = self._replay_check.look(replayed, recorded, mask, batch[SAMPLES], stale)
        if found.statistics.num_tokens == 0:
            return
        self._step_metrics.add(found.metrics())
        every = self.args.routes_gap_steps
        if same_weights and self.replays_routes and every and self.state.global_step % every == 0:
            self._log_live_route_gap(batch, recorded, mask)
        if self.args.replay_check == "off" or self._sampled_elsewhere or found.fault is None:
            return
        cause = explain(
            replayed,
            recorded,
            mask,
            batch[SAMPLES],
            self.temperature,
            (lambda temperature: self._rescore(batch, temperature)) if same_weights else None,
            (lambda: self._rescore(batch, live_routes=True)) if self.replays_routes else None,
            stale,
            self._replay_check.tolerance.mean,
            self._groups.gather,
        )
        message = f"At step {self.state.global_step}: {found.fault} {cause}"
        if self.args.replay_check == "raise":
            raise ReplayGapError(message)
        logger.warning(message)

    def _log_live_route_gap(self, batch: dict[str, Any], recorded: torch.Tensor, mask: torch.Tensor) -> None:
        live = self._rescore(batch, live_routes=True)
        gap = GapStatistics.gather(live, recorded, mask, self._groups.gather).metrics()
        self._step_metrics.add(
            {f"routes/logprob_gap_live_{x}": gap[f"support/logprob_gap_{x}"] for x in ("mean", "max")}
        )

    def _rescore(
        self, batch: dict[str, Any], temperature: float | None = None, live_routes: bool = False
    ) -> torch.Tensor:
        """`[B, T]` log-probs of a batch under the current policy.

        Args:
            batch: what `_generate_and_score_completions` returned, or a part of it.
            temperature: another softmax temperature than the trainer's.
            live_routes: leave recorded routes aside.
        """
        again = ScoringPass("rescore", SampleBatch.of(batch[SAMPLES]), batch, temperature, live_routes)
        with self._opened(again), torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
                **{name: batch[name] for name in _MODEL_INPUTS if name in batch},
            )
        return logps

    def _stale_weights(self) -> str | None:
        if not self.use_vllm:
            return None
        loaded = self.vllm_generation.loaded_step
        if loaded == self._generated_at:
            return None
        held = "never received the policy's weights" if loaded is None else f"holds the weights of step {loaded}"
        return f"it {held} while the policy is at step {self._generated_at}, so the weight sync was skipped or failed"

    def _log_scores(self, done: ScoringPass) -> None:
        samples = done.inputs[SAMPLES]
        on = recorded_mask(samples, done.inputs["completion_ids"].shape)
        for name, metric in (("support_entropy", "support/entropy"), ("log_mass", "support/log_mass")):
            if name in done.extra:
                values = done.extra[name].detach().cpu().double()[on]
                self._log({metric: mean(values.sum().item(), len(values))})
        if self._growth is not None and "log_mass" in done.extra:
            growth = self._growth.measure(samples, done.extra["log_mass"], self.state.global_step, self._gather_row)
            self._step_metrics.add(growth)

    def _log_routes(self) -> None:
        found = self._routes.close(self.model)
        if found is not None:
            self._log(route_metrics(found))

    def _log(self, metrics: Metrics) -> None:
        """Log metrics of this process; every process calls it at the same time with the same names."""
        self._step_metrics.add(over_processes(metrics, self._gather_row))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.model.training:
            self._metrics["train"].update(self._step_metrics.take())
        super().log(logs, *args, **kwargs)

    def _gather_row(self, values: Sequence[float]) -> np.ndarray:
        """`[groups, len(values)]`: processes with the same samples count once."""
        return self._groups.gather_row(values)
