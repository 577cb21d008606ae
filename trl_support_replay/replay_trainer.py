"""What every replaying trainer does alike: build TRL's trainer with replay in place, score over supports, and check.

`ReplayTrainer` is mixed into one of TRL's online trainers, whose names it knows from `_trl`. What differs between
those (what a rollout returns, what the loss reads) is in the modules of the trainers themselves.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from .capture.recorder import SupportRecorder, TracedLogprob
from .capture.transformers_generate import ScoresRecorder, recording
from .completion_columns import completion_columns, empty_columns
from .contract import check_contract
from .engines import engine_builder
from .environment import check_supported
from .hub.publishing import PublishesTraces
from .preflight import check_dataset, check_traces, own_generation_config
from .rebind import rebound
from .replay_check import GapStatistics, ReplayCheck, ReplayGapError, explain
from .replay_head import ReplayCaller, add_replay_head, recorded_mask
from .replay_metrics import route_metrics, support_metrics
from .route_sessions import RouteSessions
from .support_growth import SupportGrowth
from .tensor_parallel import check_tensor_parallel, seed_alike
from .trace_saving import TraceSaver
from .traces.columns import Trace

if TYPE_CHECKING:
    from .collect import Collected

    _TRLTrainer = Any  # one of several, whose methods differ
else:
    _TRLTrainer = object

logger = logging.getLogger(__name__)

SAMPLES = "support_samples"
"""The batch's list of `Trace`, which TRL shuffles and splits with its tensors."""

SHARED_SEAM: dict[str, tuple[str, ...]] = {
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
"""Private methods of TRL's trainers that are overridden alike in all of them, with their parameters."""


class ReplayTrainer(PublishesTraces, _TRLTrainer):
    """Mixed into a trainer of TRL in front of it: `class Replaying(ReplayTrainer, trl.SomeTrainer)`.

    Subclasses set `_trl` (the module of TRL's trainer, whose names are bound anew while it is built), `_config` and
    `_algorithm`, and override the methods by which TRL's trainers differ.
    """

    _trl: Any
    _config: Any
    _algorithm: str
    args: Any
    model: Any
    vllm_generation: Any

    _sampled_elsewhere = False  # by an older policy: a gap is no fault

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *more: Any,
        **kwargs: Any,
    ):
        check_supported()
        args = self._checked_args(model, args)
        if args.use_vllm and args.vllm_mode == "colocate":
            check_supported("vllm")
        if train_dataset is not None:
            check_dataset(train_dataset, "train_dataset")
        self.sampling_settings = check_contract(args, own_generation_config(model, args))
        check_tensor_parallel(model, args)
        self.replays_support = self.sampling_settings.truncates
        self.replays_routes = args.routed_experts_replay
        self._routes = RouteSessions()
        self._saver: TraceSaver | None = None
        self._recorder: SupportRecorder | None = None
        self._scored_samples: list[Trace] | None = None
        self._last_extra: dict[str, torch.Tensor] = {}
        self._rescoring_temperature: float | None = None
        self._live_routes = False  # while a batch is scored through the live routers, for comparison
        self._rewards: list[float] = []  # weighted sum for each completion of this process's latest generation batch
        self._unchecked: tuple[torch.Tensor, dict[str, Any]] | None = None
        self._generated_at = -1  # optimizer step of the buffered completions
        growth = self.replays_support and args.support_growth
        self._growth = SupportGrowth(args.support_mass_floor) if growth else None
        if not (self.replays_support or self.replays_routes):
            check_traces(args, self._sampled_elsewhere)
            # Stock, but for how a server gets its weights.
            own = {"VLLMGeneration": engine_builder(self, args)} if args.weight_sync == "filesystem" else {}
            with rebound(self._trl, **own):
                super().__init__(model, reward_funcs, args, train_dataset, *more, **kwargs)
            return
        add_fused_lm_head = self._trl.add_fused_lm_head

        def add_heads(target: PreTrainedModel, *head_args: Any, **head_kwargs: Any) -> None:
            add_fused_lm_head(target, *head_args, **head_kwargs)
            add_replay_head(target)

        engine = {"VLLMGeneration": engine_builder(self, args)} if args.use_vllm else {}
        with rebound(self._trl, add_fused_lm_head=add_heads, **engine):
            super().__init__(model, reward_funcs, args, train_dataset, *more, **kwargs)
        seed_alike(self.model, args, self.accelerator.process_index)
        if args.save_traces:
            self._saver = TraceSaver(args, self)
            self.add_callback(self._saver)
        half_precision = args.bf16 or args.fp16 or self.model.dtype != torch.float32
        if args.use_vllm:
            engine_dtype = self.vllm_generation.engine_dtype if args.vllm_mode == "server" else args.vllm_dtype
            half_precision |= engine_dtype not in ("auto", "float32")
        self._replay_check = ReplayCheck(not half_precision, args.replay_tolerance, self.accelerator.gather)
        self._entropy_scope = args.entropy_scope if self.replays_support else "full"
        if self.replays_support and args.entropy_scope == "auto":
            self._entropy_scope = "full" if self._entropy_in_loss() else "support"

    @classmethod
    def _checked_args(cls, model: Any, args: Any) -> Any:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            return cls._config(f"{name.split('/')[-1]}-{cls._algorithm}")
        if not isinstance(args, cls._config):
            raise TypeError(
                f"args is a {type(args).__name__}; {cls.__name__} needs a {cls._config.__name__}, which takes every "
                "argument of TRL's own."
            )
        return args

    # ------------------------------------------------------------------------------------------------- generation

    def _record_transformers(self, prompt_ids: list, generate: Any) -> tuple[list, list[list[TracedLogprob]]]:
        """Completions of `generate`, which calls the model's own, and their log-probs, which know their rows."""
        assert self._recorder is not None
        scores = ScoresRecorder(self.eos_token_ids, truncates=self.replays_support)
        with contextlib.ExitStack() as stack:
            stack.enter_context(recording(self._base_model(), scores))
            routing = stack.enter_context(self._routes.of(self.model).record()) if self.replays_routes else None
            completion_ids = generate()
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

    def _collect_settings(self, completion_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What `collect_samples` has to know of model, tokenizer and configuration."""
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        # The head's rows, not the tokenizer's words: padded ids can be sampled. ZeRO-3 keeps the shape elsewhere.
        head = self._base_model().get_output_embeddings().weight
        return {
            "vocab_size": getattr(head, "ds_shape", head.shape)[0],
            "eos_token_ids": self.eos_token_ids,
            "synthetic_eos": self.args.synthetic_eos,
            "leave_out": [self.mask_truncated_completions and ids[-1] not in ends for ids in completion_ids],
            "asked_by": str(self.sampling_settings),
        }

    def _keep_samples(self, collected: Collected) -> None:
        assert self._recorder is not None
        self._scored_samples = collected.samples
        self._log_completion_columns(completion_columns(collected.samples))
        self._log(
            support_metrics(collected.samples, self._recorder.repaired, collected.num_synthetic, self._gather_row)
        )

    def _log_completion_columns(self, columns: dict[str, list[float | None]]) -> None:
        if self.log_completions:
            for name, values in columns.items():
                self._log_completion_extra(name, values)

    def _generate_and_score_completions(self, inputs):
        if not (self.replays_support or self.replays_routes):
            return super()._generate_and_score_completions(inputs)
        if not self.model.training:
            self._log_completion_columns(empty_columns(len(inputs)))  # the table has a value a row in every column
            return super()._generate_and_score_completions(inputs)
        self._recorder = SupportRecorder()
        try:
            output = super()._generate_and_score_completions(inputs)
            samples = output[SAMPLES] = self._scored_samples
        finally:
            self._recorder = None
            self._scored_samples = None
        self._generated_at = self.state.global_step
        if self._growth is not None:
            self._growth.start()
        if self._saver is not None:
            assert samples is not None
            self._saver.save(samples, inputs, self._rewards)
        self._check_generated(output)
        return output

    @abstractmethod
    def _check_generated(self, output: dict[str, Any]) -> None:
        """Check a new generation batch, if its scores are there already."""

    @abstractmethod
    def _recorded_logprobs(self, batch: dict[str, Any]) -> torch.Tensor:
        """`[B, T]` log-probs that the engine reported."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start = self.accelerator.process_index * len(prompts)
        weighted = rewards * self.reward_weights.to(rewards.device)
        # As TRL: a completion that no function could score has no reward, not one of 0.
        total = weighted.nansum(dim=1).masked_fill(weighted.isnan().all(dim=1), torch.nan)
        self._rewards = total[start : start + len(prompts)].tolist()
        return rewards

    # ---------------------------------------------------------------------------------------------------- scoring

    def _compute_loss(self, model, inputs):
        samples = inputs.get(SAMPLES)
        if samples is None:
            return super()._compute_loss(model, inputs)
        self._scored_samples = samples
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._scored_samples = None
        self._log_scores(inputs)
        self._last_extra = {}
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
        # Without truncation the distribution that was sampled from is the whole vocabulary's.
        full = not self.replays_support or (self._full_kl and reference)
        caller = ReplayCaller(
            model,
            samples,
            logits_to_keep,
            temperature=self._rescoring_temperature or self.temperature,
            log_probs="full_logprobs" if full else "logprobs",
            entropy=f"{self._entropy_scope}_entropy" if compute_entropy else None,
            extra=self._extra_scores(in_loss, reference) if self.replays_support else (),
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
        return self._scored(logps, caller.collected(logits_to_keep), in_loss, reference), entropies, aux_loss

    @property
    def _full_kl(self) -> bool:
        return self.replays_support and self.beta != 0.0 and self.args.kl_scope == "full"

    def _entropy_in_loss(self) -> bool:
        """Whether the loss depends on the entropy, and not only a metric."""
        return False

    def _extra_scores(self, in_loss: bool, reference: bool) -> tuple[str, ...]:
        """Scores beside the log-probs that a pass is asked for under truncation."""
        extra: tuple[str, ...] = ()
        if in_loss:
            extra += ("support_entropy",)
            if self._full_kl or self._entropy_scope == "full" or self._growth is not None:
                extra += ("log_mass",)
        return extra

    def _scored(
        self, logps: torch.Tensor, extra: dict[str, torch.Tensor], in_loss: bool, reference: bool
    ) -> torch.Tensor:
        """The log-probs that TRL is given, `[B, T]`, after what a pass has found is kept."""
        if in_loss:
            self._last_extra = extra
        return logps

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
        recorded = self._recorded_logprobs(batch)
        mask = recorded_mask(batch[SAMPLES], replayed.shape).to(replayed.device)
        stale = self._stale_weights()
        found = self._replay_check.look(replayed, recorded, mask, batch[SAMPLES], stale)
        if found.statistics.num_tokens == 0:
            return
        self._log(found.metrics())
        every = self.args.routes_gap_steps
        if self.replays_routes and every and self.state.global_step % every == 0:
            self._log_live_route_gap(batch, recorded, mask)
        if self.args.replay_check == "off" or self._sampled_elsewhere or found.fault is None:
            return
        cause = explain(
            replayed,
            recorded,
            mask,
            batch[SAMPLES],
            self.temperature,
            lambda temperature: self._rescore(batch, temperature),
            (lambda: self._rescore_live(batch)) if self.replays_routes else None,
            stale,
            self._replay_check.tolerance.mean,
            self.accelerator.gather,
        )
        message = f"At step {self.state.global_step}: {found.fault} {cause}"
        if self.args.replay_check == "raise":
            raise ReplayGapError(message)
        logger.warning(message)

    def _log_live_route_gap(self, batch: dict[str, Any], recorded: torch.Tensor, mask: torch.Tensor) -> None:
        live = self._rescore_live(batch)
        statistics = GapStatistics.gather(live, recorded, mask, self.accelerator.gather)
        self._log({"routes/logprob_gap_live_mean": statistics.mean, "routes/logprob_gap_live_max": statistics.max})

    def _rescore_live(self, batch: dict[str, Any]) -> torch.Tensor:
        self._live_routes = True
        try:
            return self._rescore(batch, self.temperature)
        finally:
            self._live_routes = False

    def _rescore(self, batch: dict[str, Any], temperature: float) -> torch.Tensor:
        self._rescoring_temperature, saved = temperature, self._scored_samples
        self._scored_samples = batch[SAMPLES]
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
        on = recorded_mask(inputs[SAMPLES], inputs["completion_ids"].shape)
        for name, metric in (("support_entropy", "support/entropy"), ("log_mass", "support/log_mass")):
            if name in self._last_extra:
                values = self._last_extra[name].detach().cpu()[on]
                total, count = self._gather_row([values.sum().item(), len(values)]).sum(axis=0)
                self._log({metric: float(total) / max(float(count), 1.0)})
        if self._growth is not None:
            log_mass = self._last_extra["log_mass"]
            self._log(self._growth.measure(inputs[SAMPLES], log_mass, self.state.global_step, self._gather_row))
