"""`SupportReplayGRPOTrainer`: TRL's `GRPOTrainer` scored over the supports that its completions were sampled from.

This is the only module that knows TRL's private methods. It overrides as little as it can and copies nothing: TRL
generates, rewards and computes the loss; here the supports are recorded beside the tokens, and the model call that
scores a batch is told over which supports to score.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import numpy as np
import torch
import trl
import trl.trainer.grpo_trainer as trl_grpo
from accelerate.utils import is_peft_model
from transformers import GenerationConfig, PreTrainedModel
from trl import GRPOTrainer

from .capture.recorder import SupportRecorder
from .capture.transformers_generate import ScoresRecorder, recording
from .collect import ROLLOUT_KEY, collect_samples
from .config import SupportReplayGRPOConfig
from .contract import check_contract
from .environment import UnsupportedVersionError, check_supported
from .rebind import rebound
from .replay_check import GapStatistics, ReplayGapError, Tolerance, explain
from .replay_head import ReplayBatch, SampleSupport, add_replay_head

logger = logging.getLogger(__name__)

# What TRL 1.15 and 1.16 call with; another signature means another TRL, whatever its version says.
_SEAM = {
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
}
for _name, _parameters in _SEAM.items():
    _found = tuple(inspect.signature(getattr(GRPOTrainer, _name)).parameters)[1:]
    if _found[: len(_parameters)] != _parameters:
        raise UnsupportedVersionError(
            f"trl {trl.__version__} is not supported: GRPOTrainer.{_name} takes {_found}, where {_parameters} is "
            "expected. Install trl 1.15 or 1.16: pip install 'trl>=1.15,<1.17'."
        )

_SAMPLES = "support_samples"  # the batch's list of `SampleSupport`, which TRL shuffles and splits with its tensors


class SupportReplayGRPOTrainer(GRPOTrainer):
    """GRPO whose log-probs are taken over the sampling support of each token.

    A drop-in for `trl.GRPOTrainer`: the same arguments, with `args` a `SupportReplayGRPOConfig`. Replay is on when the
    sampling truncates (`top_k`, `top_p`, `min_p`); otherwise this is stock GRPO. Evaluation is always stock.

    Metrics beside TRL's own, in training: `support/size_mean`, `support/size_max`, `support/singleton_fraction`,
    `support/repaired`, `support/entropy`, `support/log_mass` (when full-vocabulary scores are computed anyway),
    `support/synthetic_eos`, `support/logprob_gap_{mean,max}` and the sequence importance ratios before clipping,
    `sampling/importance_sampling_ratio_raw/{mean,min,max}` and `sampling/outside_10pct`.

    Raises:
        UnsupportedVersionError: for a TRL, transformers or vLLM out of range.
        UnreplayableSettingError: for settings that cannot be replayed exactly, before any model is loaded.
        ReplayGapError: during training, when replayed and recorded log-probs differ (see `replay_check`).
    """

    args: SupportReplayGRPOConfig  # type: ignore[assignment]
    model: Any
    vllm_generation: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: SupportReplayGRPOConfig | None = None,
        **kwargs: Any,
    ):
        check_supported()
        if args is None:
            name = model if isinstance(model, str) else trl_grpo.get_config_model_id(model.config)
            args = SupportReplayGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, SupportReplayGRPOConfig):
            raise TypeError(
                f"args is a {type(args).__name__}; SupportReplayGRPOTrainer needs a SupportReplayGRPOConfig, which "
                "takes every GRPOConfig argument."
            )
        self.sampling_settings = check_contract(args, _own_generation_config(model, args))
        self.replays_support = self.sampling_settings.truncates
        self._recorder: SupportRecorder | None = None
        self._scored_samples: list[SampleSupport] | None = None
        self._last_logps: torch.Tensor | None = None
        self._last_extra: dict[str, torch.Tensor] = {}
        self._rescoring_temperature: float | None = None
        self._loss_inputs: dict[str, Any] | None = None
        self._generated_at = -1  # optimizer step of the buffered completions
        if not self.replays_support:
            super().__init__(model, reward_funcs, args, **kwargs)
            return
        add_fused_lm_head = trl_grpo.add_fused_lm_head

        def add_heads(target: PreTrainedModel, *head_args: Any, **head_kwargs: Any) -> None:
            add_fused_lm_head(target, *head_args, **head_kwargs)
            add_replay_head(target)

        names: dict[str, Any] = {"add_fused_lm_head": add_heads}
        if args.use_vllm:
            from .capture.vllm_engine import SupportVLLMGeneration, policy_dtype_name

            def build_engine(*engine_args: Any, **engine_kwargs: Any) -> SupportVLLMGeneration:
                dtype = policy_dtype_name(self.model, args) if args.vllm_dtype == "auto" else args.vllm_dtype
                return SupportVLLMGeneration(
                    *engine_args,
                    settings=self.sampling_settings,
                    support_capture=args.support_capture,
                    recorder=lambda: self._recorder,
                    dtype=dtype,
                    engine_kwargs=args.vllm_engine_kwargs,
                    policy_step=lambda: self.state.global_step,
                    **engine_kwargs,
                )

            names["VLLMGeneration"] = build_engine
        with rebound(trl_grpo, **names):
            super().__init__(model, reward_funcs, args, **kwargs)
        half_precision = args.bf16 or args.fp16 or self.model.dtype != torch.float32
        if args.use_vllm and args.vllm_dtype not in ("auto", "float32"):
            half_precision = True
        self._tolerance = Tolerance.choose(full_precision=not half_precision, value=args.replay_tolerance)
        self._entropy_scope = args.entropy_scope
        if args.entropy_scope == "auto":
            in_loss = self._entropy_bonus_enabled or self.top_entropy_quantile < 1.0
            self._entropy_scope = "full" if in_loss else "support"

    # ------------------------------------------------------------------------------------------------- generation

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        generate = functools.partial(
            super()._generate_single_turn, prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        )
        if self._recorder is None or self.use_vllm:
            return generate()
        scores = ScoresRecorder(self.eos_token_ids)
        with recording(self._base_model(), scores):
            completion_ids, _ = generate()
        logprobs = [
            self._recorder.add(ids, values, rows)
            for ids, (values, rows) in zip(completion_ids, scores.collect(completion_ids), strict=True)
        ]
        return completion_ids, logprobs

    def _generate(self, prompts: list):
        if self._recorder is None:
            return super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, *rest = super()._generate(prompts)
        given = extra.pop(ROLLOUT_KEY, None)  # TRL would hand it to the reward functions
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        # The head's rows, not the tokenizer's words: padded ids can be sampled. ZeRO-3 keeps the shape elsewhere.
        head = self._base_model().get_output_embeddings().weight
        collected = collect_samples(
            self._recorder,
            completion_ids,
            tool_mask,
            logprobs,
            given,
            vocab_size=getattr(head, "ds_shape", head.shape)[0],
            eos_token_ids=self.eos_token_ids,
            synthetic_eos=self.args.synthetic_eos,
            leave_out=[self.mask_truncated_completions and ids[-1] not in ends for ids in completion_ids],
            asked_by=str(self.sampling_settings),
        )
        self._scored_samples = collected.samples
        self._log_supports(collected.samples, self._recorder.repaired, collected.num_synthetic)
        return prompt_ids, completion_ids, collected.tool_mask, completions, collected.logprobs, extra, *rest

    def _generate_and_score_completions(self, inputs):
        if not self.replays_support or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._recorder = SupportRecorder()
        try:
            output = super()._generate_and_score_completions(inputs)
            output[_SAMPLES] = self._scored_samples
        finally:
            self._recorder = None
            self._scored_samples = None
        self._generated_at = self.state.global_step
        if "old_per_token_logps" in output:
            self._check_replay(output["old_per_token_logps"], output)
        return output

    # ---------------------------------------------------------------------------------------------------- scoring

    def _compute_loss(self, model, inputs):
        samples = inputs.get(_SAMPLES)
        if samples is None:
            return super()._compute_loss(model, inputs)
        self._scored_samples = samples
        try:
            inputs = dict(inputs)
            self._loss_inputs = inputs
            loss = super()._compute_loss(model, inputs)
        finally:
            self._scored_samples = None
            self._loss_inputs = None
        # TRL scores the old policy only when it may differ from the current one; else this is the first look.
        if "old_per_token_logps" not in inputs and self.state.global_step == self._generated_at:
            assert self._last_logps is not None
            self._check_replay(self._last_logps, inputs)
        self._log_scores(inputs)
        self._last_logps, self._last_extra = None, {}
        return loss

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        samples = self._scored_samples
        score = functools.partial(
            super()._get_per_token_logps_and_entropies,
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            **kwargs,
        )
        if samples is None:
            return score(model)
        in_loss = compute_entropy
        kl_full = self.beta != 0.0 and self.args.kl_scope == "full"
        log_probs = "full_logprobs" if kl_full and self._is_reference_pass(model) else "logprobs"
        extra: tuple[str, ...] = ()
        if in_loss:
            extra = ("support_entropy",)
            if kl_full:
                extra += ("full_logprobs",)
            if kl_full or self._entropy_scope == "full":
                extra += ("log_mass",)
        caller = _ReplayCaller(
            model,
            samples,
            logits_to_keep,
            temperature=self._rescoring_temperature or self.temperature,
            log_probs=log_probs,
            entropy=f"{self._entropy_scope}_entropy" if compute_entropy else None,
            extra=extra,
        )
        logps, entropies, aux_loss = score(caller)
        caller.finish()
        if in_loss:
            self._last_logps = logps.detach()
            self._last_extra = caller.collected(logits_to_keep)
            if kl_full:
                self._shift_reference_for_full_kl(logps)
        return logps, entropies, aux_loss

    def _shift_reference_for_full_kl(self, logps: torch.Tensor) -> None:
        # TRL's KL term sees only ref - logps. With full-vocabulary scores f and support scores s of the policy, a
        # reference of ref_full - f + s makes that difference ref_full - f, in value and in gradient.
        inputs = self._loss_inputs
        assert inputs is not None
        inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] - self._last_extra["full_logprobs"] + logps

    def _is_reference_pass(self, model: Any) -> bool:
        if self.ref_model is not None:
            return model is self.ref_model
        if not is_peft_model(self.accelerator.unwrap_model(self.model)):
            return False
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)

    def _base_model(self) -> PreTrainedModel:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if is_peft_model(model) else model

    # ------------------------------------------------------------------------------------------ checks and metrics

    def _check_replay(self, replayed: torch.Tensor, batch: dict[str, Any]) -> None:
        """Compare with the recorded log-probs while engine and policy hold the same weights."""
        recorded = batch["sampling_per_token_logps"]
        mask = _recorded_mask(batch[_SAMPLES], recorded.shape).to(recorded.device)
        statistics = GapStatistics.gather(replayed, recorded, mask, self.accelerator.gather)
        if statistics.num_tokens == 0:
            return
        metrics = self._metrics["train"]
        metrics["support/logprob_gap_mean"].append(statistics.mean)
        metrics["support/logprob_gap_max"].append(statistics.max)
        metrics["sampling/importance_sampling_ratio_raw/mean"].append(statistics.ratio_mean)
        metrics["sampling/importance_sampling_ratio_raw/min"].append(statistics.ratio_min)
        metrics["sampling/importance_sampling_ratio_raw/max"].append(statistics.ratio_max)
        metrics["sampling/outside_10pct"].append(statistics.outside_10pct)
        if self.args.replay_check == "off" or not statistics.exceeds(self._tolerance):
            return
        cause = explain(
            replayed,
            recorded,
            mask,
            self.temperature,
            lambda temperature: self._rescore(batch, temperature),
            self._stale_weights(),
            self.accelerator.gather,
        )
        message = (
            f"Replayed and recorded log-probs differ by {statistics.max:.3g} at most and {statistics.mean:.3g} on "
            f"average over {statistics.num_tokens} tokens at step {self.state.global_step}; the "
            f"{self._tolerance.statistic} may be {self._tolerance.value:g} (replay_tolerance). {cause}"
        )
        if self.args.replay_check == "raise":
            raise ReplayGapError(message)
        logger.warning(message)

    def _rescore(self, batch: dict[str, Any], temperature: float) -> torch.Tensor:
        self._rescoring_temperature, saved = temperature, self._scored_samples
        self._scored_samples = batch[_SAMPLES]
        try:
            with torch.no_grad():
                logps, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                    torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                    batch["completion_ids"].size(1),
                    batch_size=self.args.per_device_train_batch_size,
                )
        finally:
            self._rescoring_temperature, self._scored_samples = None, saved
        return logps

    def _stale_weights(self) -> str | None:
        if not self.use_vllm:
            return None
        loaded = self.vllm_generation.loaded_step
        if loaded == self._generated_at:
            return None
        held = "never received the policy's weights" if loaded is None else f"holds the weights of step {loaded}"
        return f"it {held} while the policy is at step {self._generated_at}, so the weight sync was skipped or failed"

    def _log_supports(self, samples: list[SampleSupport], repaired: int, num_synthetic: int) -> None:
        sizes = np.concatenate([s.rows.sizes for s in samples])
        sizes = sizes[sizes > 0]
        local = [sizes.sum(), len(sizes), (sizes == 1).sum(), repaired, num_synthetic, sizes.max(initial=0)]
        device = self.accelerator.device
        stats = self.accelerator.gather(torch.tensor([local], dtype=torch.float32, device=device)).cpu()
        total, count, singletons, repaired, synthetic = stats[:, :5].sum(dim=0).tolist()
        metrics = self._metrics["train"]
        metrics["support/size_mean"].append(total / max(count, 1.0))
        metrics["support/size_max"].append(stats[:, 5].max().item())
        metrics["support/singleton_fraction"].append(singletons / max(count, 1.0))
        metrics["support/repaired"].append(repaired)
        metrics["support/synthetic_eos"].append(synthetic)

    def _log_scores(self, inputs: dict[str, Any]) -> None:
        mask = _recorded_mask(inputs[_SAMPLES], inputs["completion_ids"].shape)
        for name, metric in (("support_entropy", "support/entropy"), ("log_mass", "support/log_mass")):
            if name in self._last_extra:
                values = self._last_extra[name].detach()
                on = mask.to(values.device)
                local = torch.stack([values[on].sum(), on.sum().to(values.dtype)])
                total, count = self.accelerator.reduce(local, reduction="sum").tolist()
                self._metrics["train"][metric].append(total / max(count, 1.0))


class _ReplayCaller:
    """Stands in for the model while TRL scores a batch in chunks, and tells each call which supports are its own."""

    def __init__(self, model: Any, samples: list[SampleSupport], completion_length: int, **scores: Any):
        self._model = model
        self._samples = samples
        self._completion_length = completion_length
        self._scores = scores
        self._cursor = 0
        self._extra: list[tuple[torch.Tensor, ...] | None] = []

    def __call__(self, **kwargs: Any) -> Any:
        input_ids = kwargs["input_ids"]
        start, self._cursor = self._cursor, self._cursor + input_ids.shape[0]
        batch = ReplayBatch.build(
            self._samples[start : self._cursor],
            tuple(input_ids.shape),
            self._completion_length,
            input_ids.device,
            **self._scores,
        )
        output = self._model(**kwargs, replay=batch)
        self._extra.append(output.extra)
        return output

    def finish(self) -> None:
        if self._cursor != len(self._samples):
            raise RuntimeError(f"{self._cursor} rows were scored, but {len(self._samples)} samples were recorded.")

    def collected(self, completion_length: int) -> dict[str, torch.Tensor]:
        """The `extra` scores of all calls, `[B, completion_length]` each."""
        names = self._scores["extra"]
        return {
            name: torch.cat([extra[i] for extra in self._extra if extra is not None])[:, -completion_length:]
            for i, name in enumerate(names)
        }


def _recorded_mask(samples: list[SampleSupport], shape: tuple[int, int]) -> torch.Tensor:
    """`[B, T]` bool: loss-bearing tokens with a recorded support."""
    mask = np.zeros(tuple(shape), dtype=bool)
    for b, sample in enumerate(samples):
        mask[b, : len(sample.loss_mask)] = sample.loss_mask & (sample.rows.sizes > 0)
    return torch.from_numpy(mask)


def _own_generation_config(model: Any, args: SupportReplayGRPOConfig) -> GenerationConfig | None:
    """The model's generation defaults, read without loading its weights; `None` when it has none."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    init_kwargs: Any = args.model_init_kwargs or {}  # a dict by now: the config has parsed what came as JSON
    try:
        return GenerationConfig.from_pretrained(model, revision=init_kwargs.get("revision") or "main")
    except OSError:
        return None
