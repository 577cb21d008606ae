"""`SupportReplayGRPOTrainer`: TRL's `GRPOTrainer` scored over the supports that its completions were sampled from.

TRL generates, rewards and computes the loss; here the supports are recorded beside the tokens, and the model call that
scores a batch is told over which supports to score. It overrides as little as it can and copies nothing. What is not
particular to GRPO is in `replay_trainer`; the two are, with `rloo_trainer`, the only modules that know private methods
of TRL's trainers, but for `demo.variant`, which looks at the batches of one. Those of its engine are known to
`capture.vllm_engine` and `capture.vllm_server`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import trl.trainer.grpo_trainer as trl_grpo
from trl import GRPOTrainer

from ..libraries.environment import check_seam
from ..libraries.rebind import rebound
from ..parallel.processes import agreeing
from ..rollouts.collect import collect_samples
from ..rollouts.offline import GROUP_COLUMN, OfflineTraces
from ..settings.config import SupportReplayGRPOConfig
from ..settings.preflight import own_config
from ..traces.columns import TraceSchemaError
from ..traces.reading import is_trace_dataset
from ..traces.rollout_keys import ROLLOUT_KEY, ROUTES_KEY
from .base import SHARED_SEAM, ReplayTrainer
from .passes import LossInputs, ScoringPass

_TURN = ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images")
check_seam(GRPOTrainer, SHARED_SEAM | {"_generate_single_turn": _TURN})


class SupportReplayGRPOTrainer(ReplayTrainer, GRPOTrainer):
    """GRPO whose log-probs are taken over the sampling support of each token.

    A drop-in for `trl.GRPOTrainer`: the same arguments, with `args` a `SupportReplayGRPOConfig`. Replay is on when a
    setting cuts tokens (`top_k`, `top_p`, `min_p`, a constraint); otherwise this is stock GRPO. Evaluation is always
    stock.

    Metrics beside TRL's own, in training: `support/size_mean`, `support/size_max`, `support/singleton_fraction`,
    `support/repaired`, `support/entropy`, `support/log_mass` (when full-vocabulary scores are computed anyway),
    `support/synthetic_eos`, `support/logprob_gap_{mean,max}` and the sequence importance ratios before clipping,
    `sampling/importance_sampling_ratio_raw/{mean,min,max}` and `sampling/outside_10pct`; with `support_growth`,
    `support/outside_mass` and `support/outside_mass_growth`, `..._max`.

    Raises:
        UnsupportedVersionError: for a TRL, transformers or vLLM out of range.
        UnreplayableSettingError: for settings that cannot be replayed exactly, before any model is loaded.
        UnreplayableModelError: for models that cannot; sharded ones are tried before the first generation.
        ReplayGapError: during training, when replayed and recorded log-probs differ (see `replay_check`).
    """

    _trl = trl_grpo
    _config = SupportReplayGRPOConfig
    _algorithm = "GRPO"
    args: SupportReplayGRPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: SupportReplayGRPOConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        **kwargs: Any,
    ):
        kwargs = self._by_name(more, kwargs)
        args = self._checked_args(model, args)
        self._offline: OfflineTraces | None = None
        if is_trace_dataset(train_dataset):
            with agreeing():
                self._offline = OfflineTraces(train_dataset, args, own_config(model, args))
            self._sampled_elsewhere = True
            train_dataset = self._offline.prompts()
            kwargs["rollout_func"] = self._offline
            if reward_funcs is None:
                reward_funcs = self._offline.reward_func()
                if kwargs.get("eval_dataset") is not None:
                    raise TraceSchemaError(
                        "eval_dataset with saved traces: their `reward` column says nothing of completions that an "
                        "evaluation samples. Give reward_funcs, or leave eval_dataset out."
                    )
        with warnings.catch_warnings():
            if self._offline is not None:
                # The rollout function is not the user's, who can do nothing about its being experimental.
                warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(model, reward_funcs, args, train_dataset, **kwargs)

    def _entropy_in_loss(self) -> bool:
        return self._entropy_bonus_enabled or self.top_entropy_quantile < 1.0

    # ------------------------------------------------------------------------------------------------- generation

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        generate = functools.partial(
            super()._generate_single_turn, prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        )
        if self._recorder is None or self.use_vllm:
            return generate()
        return self._record_transformers(prompt_ids, lambda: generate()[0])

    def _generate(self, prompts: list):
        if self._recorder is None:
            return super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, *rest = super()._generate(prompts)
        # TRL would hand these to the reward functions.
        given, given_routes = extra.pop(ROLLOUT_KEY, None), extra.pop(ROUTES_KEY, None)
        with self._collecting() as samples:
            collected = collect_samples(
                self._recorder,
                prompt_ids,
                completion_ids,
                tool_mask,
                logprobs,
                given,
                given_routes,
                **self._collect_settings(completion_ids),
            )
            samples += collected.samples
        self._keep_samples(collected)
        return prompt_ids, completion_ids, collected.tool_mask, completions, collected.logprobs, extra, *rest

    def _generate_and_score_completions(self, inputs):
        if self._offline is None:
            return super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._offline.choose([row[GROUP_COLUMN] for row in inputs])
            return super()._generate_and_score_completions(inputs)
        # The prompts of an evaluation have no saved completions: the policy answers them.
        with rebound(self, rollout_func=None):
            return super()._generate_and_score_completions(inputs)

    def _check_generated(self, output: dict[str, Any], generation: ScoringPass) -> None:
        if self._offline is not None:
            self._use_recorded_policy(output)
        elif "old_per_token_logps" in output:
            self._check_replay(output["old_per_token_logps"], output)

    def _recorded_logprobs(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["sampling_per_token_logps"]

    def _use_recorded_policy(self, output: dict[str, Any]) -> None:
        """The policy that sampled saved traces is the old policy, whatever the current weights."""
        old = output["sampling_per_token_logps"]
        unknown = torch.isnan(old)  # a synthetic end of sequence
        # One process with such a token is enough: a sharded model runs on all of them, or on none.
        if self._gather_row([float(unknown.any())]).any():
            old = torch.where(unknown, self._rescore(output), old)
        output["old_per_token_logps"] = old

    # ---------------------------------------------------------------------------------------------------- scoring

    def _entries_completed_by_the_loss(self) -> tuple[str, ...]:
        return ("ref_per_token_logps",) if self._full_kl else ()

    def _extra_scores(self, current: ScoringPass, reference: bool) -> tuple[str, ...]:
        full = current.role == "loss" and not reference and self._full_kl
        return super()._extra_scores(current, reference) + (("full_logprobs",) if full else ())

    def _scored(
        self, current: ScoringPass, logps: torch.Tensor, extra: dict[str, torch.Tensor], reference: bool
    ) -> torch.Tensor:
        if isinstance(current.inputs, LossInputs) and not reference:
            # TRL scores the old policy only when it may differ from the current one; else this is the first look. What
            # the check may run waits until this batch's backward is done and its routes are closed.
            unseen = "old_per_token_logps" not in current.inputs or self._offline is not None
            if unseen and current.logprobs is None and self.state.global_step == self._generated_at:
                current.unchecked.append((logps.detach(), current.inputs))
            if self._full_kl:
                # TRL's KL term sees only ref - logps. With full-vocabulary scores f and support scores s of the
                # policy, a reference of ref_full - f + s makes that difference ref_full - f, in value and in gradient.
                current.inputs.complete("ref_per_token_logps", lambda ref: ref - extra["full_logprobs"] + logps)
        return super()._scored(current, logps, extra, reference)
