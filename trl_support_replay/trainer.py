"""`SupportReplayGRPOTrainer`: TRL's `GRPOTrainer` scored over the supports that its completions were sampled from.

This is the only module that knows TRL's private methods. It overrides as little as it can and copies nothing: TRL
generates, rewards and computes the loss; here the supports are recorded beside the tokens, and the model call that
scores a batch is told over which supports to score.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from pathlib import Path
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
from .collect import ROLLOUT_KEY, ROUTES_KEY, collect_samples
from .completion_columns import completion_columns, empty_columns
from .config import SupportReplayGRPOConfig
from .contract import check_contract
from .environment import UnsupportedVersionError, check_supported
from .offline import GROUP_COLUMN, OfflineTraces, is_trace_dataset
from .rebind import rebound
from .replay_check import GapStatistics, ReplayGapError, Tolerance, explain
from .replay_head import ReplayCaller, add_replay_head, recorded_mask
from .replay_metrics import route_metrics, support_metrics
from .route_sessions import RouteSessions
from .tensor_parallel import check_tensor_parallel, seed_alike
from .trace_saving import TraceSaver
from .traces.columns import Trace

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

_SAMPLES = "support_samples"  # the batch's list of `Trace`, which TRL shuffles and splits with its tensors


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
        if args.use_vllm and args.vllm_mode == "colocate":
            check_supported("vllm")
        if is_trace_dataset(kwargs.get("train_dataset")):
            self._offline: OfflineTraces | None = OfflineTraces(kwargs["train_dataset"], args)
            kwargs |= {"train_dataset": self._offline.prompts(), "rollout_func": self._offline.rollout}
            reward_funcs = reward_funcs if reward_funcs is not None else self._offline.reward_func()
        else:
            self._offline = None
        self.sampling_settings = check_contract(args, _own_generation_config(model, args))
        check_tensor_parallel(model, args)
        self.replays_support = self.sampling_settings.truncates
        self.replays_routes = args.routed_experts_replay
        self._routes = RouteSessions()
        self._saver: TraceSaver | None = None
        self._recorder: SupportRecorder | None = None
        self._scored_samples: list[Trace] | None = None
        self._last_logps: torch.Tensor | None = None
        self._last_extra: dict[str, torch.Tensor] = {}
        self._rescoring_temperature: float | None = None
        self._live_routes = False  # while a batch is scored through the live routers, for comparison
        self._loss_inputs: dict[str, Any] | None = None
        self._rewards: list[float] = []  # weighted sum for each completion of this process's latest generation batch
        self._unchecked: tuple[torch.Tensor, dict[str, Any]] | None = None
        self._generated_at = -1  # optimizer step of the buffered completions
        if not (self.replays_support or self.replays_routes):
            # Stock, but for how a server gets its weights.
            own = {"VLLMGeneration": self._build_server_client} if args.weight_sync == "filesystem" else {}
            with rebound(trl_grpo, **own):
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
                    routers=(lambda: self._routes.of(self.model)) if self.replays_routes else None,
                    routes_missing=args.routes_missing,
                    recorder=lambda: self._recorder,
                    dtype=dtype,
                    engine_kwargs=args.vllm_engine_kwargs,
                    policy_step=lambda: self.state.global_step,
                    **engine_kwargs,
                )

            names["VLLMGeneration"] = self._build_server_client if args.vllm_mode == "server" else build_engine
        with rebound(trl_grpo, **names):
            super().__init__(model, reward_funcs, args, **kwargs)
        seed_alike(self.model, args, self.accelerator.process_index)
        if args.save_traces:
            self._saver = TraceSaver(args, self)
            self.add_callback(self._saver)
        half_precision = args.bf16 or args.fp16 or self.model.dtype != torch.float32
        if args.use_vllm:
            engine_dtype = self.vllm_generation.engine_dtype if args.vllm_mode == "server" else args.vllm_dtype
            half_precision |= engine_dtype not in ("auto", "float32")
        self._tolerance = Tolerance.choose(full_precision=not half_precision, value=args.replay_tolerance)
        self._entropy_scope = args.entropy_scope if self.replays_support else "full"
        if self.replays_support and args.entropy_scope == "auto":
            in_loss = self._entropy_bonus_enabled or self.top_entropy_quantile < 1.0
            self._entropy_scope = "full" if in_loss else "support"

    def _build_server_client(self, *client_args: Any, **client_kwargs: Any) -> Any:
        from .capture.vllm_server import SupportVLLMServerGeneration

        return SupportVLLMServerGeneration(
            *client_args,
            settings=self.sampling_settings,
            recorder=lambda: self._recorder,
            routers=(lambda: self._routes.of(self.model)) if self.replays_routes else None,
            routes_missing=self.args.routes_missing,
            support_capture=self.args.support_capture,
            policy_step=lambda: self.state.global_step,
            server_urls=self.args.vllm_server_urls,
            weight_sync=self.args.weight_sync,
            weight_sync_dir=self.args.weight_sync_dir,
            request_timeout=self.args.vllm_server_request_timeout,
            **client_kwargs,
        )

    # ------------------------------------------------------------------------------------------------- generation

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        generate = functools.partial(
            super()._generate_single_turn, prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        )
        if self._recorder is None or self.use_vllm:
            return generate()
        scores = ScoresRecorder(self.eos_token_ids, truncates=self.replays_support)
        with contextlib.ExitStack() as stack:
            stack.enter_context(recording(self._base_model(), scores))
            routing = stack.enter_context(self._routes.of(self.model).record()) if self.replays_routes else None
            completion_ids, _ = generate()
        routes: list[Any] = [None] * len(completion_ids)
        if routing is not None:
            lengths = [(len(p), len(c)) for p, c in zip(prompt_ids, completion_ids, strict=True)]
            padded = max(p for p, _ in lengths)
            multiple = int(self.pad_to_multiple_of or 1)
            padded = -(-padded // multiple) * multiple
            width = padded + scores.num_steps
            routes = routing.samples([padded - p for p, _ in lengths], [p + c for p, c in lengths], width)
        logprobs = [
            self._recorder.add(ids, values, rows, routes=route)
            for ids, (values, rows), route in zip(completion_ids, scores.collect(completion_ids), routes, strict=True)
        ]
        return completion_ids, logprobs

    def _generate(self, prompts: list):
        if self._recorder is None:
            return super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, *rest = super()._generate(prompts)
        # TRL would hand these to the reward functions.
        given, given_routes = extra.pop(ROLLOUT_KEY, None), extra.pop(ROUTES_KEY, None)
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        # The head's rows, not the tokenizer's words: padded ids can be sampled. ZeRO-3 keeps the shape elsewhere.
        head = self._base_model().get_output_embeddings().weight
        collected = collect_samples(
            self._recorder,
            prompt_ids,
            completion_ids,
            tool_mask,
            logprobs,
            given,
            given_routes,
            vocab_size=getattr(head, "ds_shape", head.shape)[0],
            eos_token_ids=self.eos_token_ids,
            synthetic_eos=self.args.synthetic_eos,
            leave_out=[self.mask_truncated_completions and ids[-1] not in ends for ids in completion_ids],
            asked_by=str(self.sampling_settings),
        )
        self._scored_samples = collected.samples
        self._log_completion_columns(completion_columns(collected.samples))
        self._log(
            support_metrics(collected.samples, self._recorder.repaired, collected.num_synthetic, self._gather_row)
        )
        return prompt_ids, completion_ids, collected.tool_mask, completions, collected.logprobs, extra, *rest

    def _generate_and_score_completions(self, inputs):
        if not (self.replays_support or self.replays_routes):
            return super()._generate_and_score_completions(inputs)
        if not self.model.training:
            self._log_completion_columns(empty_columns(len(inputs)))  # the table has a value a row in every column
            return super()._generate_and_score_completions(inputs)
        self._recorder = SupportRecorder()
        if self._offline is not None:
            self._offline.choose([row[GROUP_COLUMN] for row in inputs])
        try:
            output = super()._generate_and_score_completions(inputs)
            samples = output[_SAMPLES] = self._scored_samples
        finally:
            self._recorder = None
            self._scored_samples = None
        self._generated_at = self.state.global_step
        if self._saver is not None:
            assert samples is not None
            self._saver.save(samples, inputs, self._rewards)
        if self._offline is not None:
            self._use_recorded_policy(output)
        elif "old_per_token_logps" in output:
            self._check_replay(output["old_per_token_logps"], output)
        return output

    def _log_completion_columns(self, columns: dict[str, list[float | None]]) -> None:
        if self.log_completions:
            for name, values in columns.items():
                self._log_completion_extra(name, values)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start = self.accelerator.process_index * len(prompts)
        weighted = rewards * self.reward_weights.to(rewards.device)
        self._rewards = weighted.nansum(dim=1)[start : start + len(prompts)].tolist()
        return rewards

    def _use_recorded_policy(self, output: dict[str, Any]) -> None:
        """The policy that sampled saved traces is the old policy, whatever the current weights."""
        old = output["sampling_per_token_logps"]
        unknown = torch.isnan(old)  # a synthetic end of sequence
        if unknown.any():
            old = torch.where(unknown, self._rescore(output, self.temperature), old)
        output["old_per_token_logps"] = old

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
        # TRL scores the old policy only when it may differ from the current one; else this is the first look. What the
        # check may run waits until this batch's backward is done and its routes are closed.
        unseen = "old_per_token_logps" not in inputs or self._offline is not None
        if unseen and self.state.global_step == self._generated_at:
            assert self._last_logps is not None
            self._unchecked = (self._last_logps, inputs)
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
        reference = self._is_reference_pass(model)
        kl_full = self.replays_support and self.beta != 0.0 and self.args.kl_scope == "full"
        # Without truncation the distribution that was sampled from is the whole vocabulary's.
        full = not self.replays_support or (kl_full and reference)
        log_probs = "full_logprobs" if full else "logprobs"
        extra: tuple[str, ...] = ()
        if in_loss and self.replays_support:
            extra = ("support_entropy",)
            if kl_full:
                extra += ("full_logprobs",)
            if kl_full or self._entropy_scope == "full":
                extra += ("log_mass",)
        caller = ReplayCaller(
            model,
            samples,
            logits_to_keep,
            temperature=self._rescoring_temperature or self.temperature,
            log_probs=log_probs,
            entropy=f"{self._entropy_scope}_entropy" if compute_entropy else None,
            extra=extra,
        )
        routed = self.ref_model if model is self.ref_model else self.model
        if self._replays_routes_in(reference):
            num_samples, width = input_ids.shape
            self._routes.open(routed, samples, width, logits_to_keep, batch_size or num_samples)
        try:
            logps, entropies, aux_loss = score(caller)
        except BaseException:
            self._routes.discard()
            raise
        caller.finish()
        if not torch.is_grad_enabled():
            self._routes.close(routed)  # a pass with gradients stays open until its backward is done
        if in_loss:
            self._last_logps = logps.detach()
            self._last_extra = caller.collected(logits_to_keep)
            if kl_full:
                self._shift_reference_for_full_kl(logps)
        return logps, entropies, aux_loss

    def _replays_routes_in(self, reference: bool) -> bool:
        if not self.replays_routes or self._live_routes:
            return False
        return not reference or self.args.routes_for_reference == "replay"

    def training_step(self, *args, **kwargs):
        # Checkpointed layers run their routers again in backward, which is over only when this returns.
        try:
            loss = super().training_step(*args, **kwargs)
            self._log_routes()
            if self._unchecked is not None:
                self._check_replay(*self._unchecked)
        finally:
            self._routes.discard()
            self._unchecked = None
        return loss

    def _log_routes(self) -> None:
        found = self._routes.close(self.model)
        if found is not None:
            self._log(route_metrics(found, self._gather_row))

    def _log(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _gather_row(self, values: list[float]) -> np.ndarray:
        """`[processes, len(values)]`."""
        row = torch.tensor([values], dtype=torch.float32, device=self.accelerator.device)
        return self.accelerator.gather(row).cpu().numpy()

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
        mask = recorded_mask(batch[_SAMPLES], recorded.shape).to(recorded.device)
        statistics = GapStatistics.gather(replayed, recorded, mask, self.accelerator.gather)
        if statistics.num_tokens == 0:
            return
        self._log(statistics.metrics())
        every = self.args.routes_gap_steps
        if self.replays_routes and every and self.state.global_step % every == 0:
            self._log_live_route_gap(batch, recorded, mask)
        if self.args.replay_check == "off" or self._offline is not None or not statistics.exceeds(self._tolerance):
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

    def _log_live_route_gap(self, batch: dict[str, Any], recorded: torch.Tensor, mask: torch.Tensor) -> None:
        self._live_routes = True
        try:
            live = self._rescore(batch, self.temperature)
        finally:
            self._live_routes = False
        statistics = GapStatistics.gather(live, recorded, mask, self.accelerator.gather)
        self._log({"routes/logprob_gap_live_mean": statistics.mean, "routes/logprob_gap_live_max": statistics.max})

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

    def _log_scores(self, inputs: dict[str, Any]) -> None:
        on = recorded_mask(inputs[_SAMPLES], inputs["completion_ids"].shape)
        for name, metric in (("support_entropy", "support/entropy"), ("log_mass", "support/log_mass")):
            if name in self._last_extra:
                values = self._last_extra[name].detach().cpu()[on]
                total, count = self._gather_row([values.sum().item(), len(values)]).sum(axis=0)
                self._log({metric: float(total) / max(float(count), 1.0)})

    # -------------------------------------------------------------------------------------------------- publishing

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        super().create_model_card(model_name, dataset_name, tags)
        if (self.replays_support or self.replays_routes) and self.is_world_process_zero():
            from .hub.model_card import RunFacts, add_section

            add_section(Path(str(self.args.output_dir)) / "README.md", RunFacts.of(self))

    def push_to_hub(self, commit_message="End of training", blocking=True, token=None, revision=None, **kwargs):
        if self.args.traces_hub_id is not None and self.args.save_traces is not None:
            self.accelerator.wait_for_everyone()  # every process writes shards
            if self.is_world_process_zero():
                from .hub.traces import push_traces

                push_traces(
                    self.args.save_traces,
                    self.args.traces_hub_id,
                    token=token or self.args.hub_token,
                    private=self.args.hub_private_repo,
                )
        return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)


def _own_generation_config(model: Any, args: SupportReplayGRPOConfig) -> GenerationConfig | None:
    """The model's generation defaults, read without loading its weights; `None` when it has none."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    init_kwargs: Any = args.model_init_kwargs or {}  # a dict by now: the config has parsed what came as JSON
    try:
        return GenerationConfig.from_pretrained(model, revision=init_kwargs.get("revision") or "main")
    except OSError:
        return None
