"""`SupportReplayRLOOTrainer`: TRL's `RLOOTrainer` scored over the supports that its completions were sampled from."""

from __future__ import annotations

from typing import Any

import torch
import trl.trainer.rloo_trainer as trl_rloo
from trl import RLOOTrainer

from ..libraries.environment import check_seam
from ..libraries.rebind import rebound
from ..rollouts.collect import collect_samples
from ..rollouts.recorder import TracedLogprob
from ..settings.config import SupportReplayRLOOConfig
from ..traces.columns import TraceSchemaError
from ..traces.reading import is_trace_dataset
from .base import SHARED_SEAM, ReplayTrainer
from .gap_checks import SAMPLES
from .passes import ScoringPass

check_seam(RLOOTrainer, SHARED_SEAM | {"_generate_single_turn": ("prompt_ids", "images", "multimodal_fields")})


class SupportReplayRLOOTrainer(ReplayTrainer, RLOOTrainer):
    """RLOO whose log-probs are taken over the sampling support of each token.

    A drop-in for `trl.RLOOTrainer`: the same arguments, with `args` a `SupportReplayRLOOConfig`. Replay is on when a
    setting cuts tokens (`top_k`, `top_p`, `min_p`, a constraint); otherwise this is stock RLOO. Evaluation is always
    stock.

    RLOO has no correction for the difference between engine and trainer, and its ratio is that of a whole sequence: one
    token that leaves its support moves it as a whole. Its KL penalty is part of the reward, and compares what
    `kl_scope` says. Metrics as in [`SupportReplayGRPOTrainer`].

    Raises:
        UnsupportedVersionError: for a TRL, transformers or vLLM out of range.
        UnreplayableSettingError: for settings that cannot be replayed exactly, before any model is loaded.
        UnreplayableModelError: for models that cannot; sharded ones are tried before the first generation.
        TraceSchemaError: for a dataset of saved traces, which only GRPO trains on.
        ReplayGapError: during training, when replayed and recorded log-probs differ (see `replay_check`).
    """

    _trl = trl_rloo
    _config = SupportReplayRLOOConfig
    _algorithm = "RLOO"
    args: SupportReplayRLOOConfig  # type: ignore[assignment]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: SupportReplayRLOOConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        **kwargs: Any,
    ):
        if is_trace_dataset(train_dataset):
            raise TraceSchemaError("RLOO cannot train on saved traces; SupportReplayGRPOTrainer can.")
        self._sampled_logprobs: list[list[TracedLogprob]] = []
        super().__init__(model, reward_funcs, args, train_dataset, *more, **kwargs)

    # ------------------------------------------------------------------------------------------------- generation

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
        def generate():
            return super(SupportReplayRLOOTrainer, self)._generate_single_turn(prompt_ids, images, multimodal_fields)

        if self._recorder is None:
            return generate()
        if not self.use_vllm:
            completion_ids, self._sampled_logprobs = self._record_transformers(prompt_ids, generate)
            return completion_ids
        engine_generate = self.vllm_generation.generate

        def keep_logprobs(*args: Any, **kwargs: Any) -> tuple:
            # The trainer drops them; they know their rows.
            answer = engine_generate(*args, **kwargs)
            self._sampled_logprobs = [[entries[0] for entries in row] for row in answer[2]]
            return answer

        with rebound(self.vllm_generation, generate=keep_logprobs):
            return generate()

    def _generate(self, prompts: list):
        if self._recorder is None:
            return super()._generate(prompts)
        prompt_ids, completion_ids, completions = super()._generate(prompts)
        with self._collecting() as samples:
            collected = collect_samples(
                self._recorder,
                prompt_ids,
                completion_ids,
                None,
                self._sampled_logprobs,
                None,
                **self._collect_settings(completion_ids),
            )
            samples += collected.samples
        self._sampled_logprobs = []
        self._keep_samples(collected)
        return prompt_ids, completion_ids, completions

    def _check_generated(self, output: dict[str, Any], generation: ScoringPass) -> None:
        assert generation.logprobs is not None
        self._check_replay(generation.logprobs, output)

    def _recorded_logprobs(self, batch: dict[str, Any]) -> torch.Tensor:
        recorded = torch.zeros(batch["completion_ids"].shape)
        for row, sample in zip(recorded, batch[SAMPLES], strict=True):
            row[: len(sample.sampling_logprobs)] = torch.from_numpy(sample.sampling_logprobs)
        return recorded.to(batch["completion_ids"].device)

    # ---------------------------------------------------------------------------------------------------- scoring

    def _extra_scores(self, current: ScoringPass, reference: bool) -> tuple[str, ...]:
        full = current.role == "generation" and not reference and self._full_kl
        return super()._extra_scores(current, reference) + (("full_logprobs",) if full else ())

    def _scored(
        self, current: ScoringPass, logps: torch.Tensor, extra: dict[str, torch.Tensor], reference: bool
    ) -> torch.Tensor:
        if reference and self._full_kl:
            # TRL's penalty is old - ref, and its ratio needs the old policy's support scores s. With its
            # full-vocabulary scores f, a reference of ref_full - f + s makes the penalty f - ref_full.
            assert current.logprobs is not None
            logps = logps - current.extra["full_logprobs"] + current.logprobs
        return super()._scored(current, logps, extra, reference)
