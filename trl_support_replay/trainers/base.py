"""`ReplayTrainer`, what the GRPO and RLOO trainers share: construction with replay in place, and scoring over supports.

`ReplayTrainer` is mixed into one of TRL's online trainers, whose names it knows from `_trl`. What differs between
those (what a rollout returns, what the loss reads) is in the modules of the trainers themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from ..batch.layout import SampleBatch
from ..checks.replay_check import ReplayCheck
from ..checks.replay_metrics import StepMetrics
from ..checks.support_growth import SupportGrowth
from ..engines.choose import CaptureSession, engine_builder
from ..libraries.environment import check_supported
from ..libraries.rebind import rebound
from ..parallel.processes import agreeing
from ..parallel.tensor_parallel import SampleGroups, check_tensor_parallel
from ..policy.model_probe import causal_model
from ..policy.replay_head import ReplayCaller, add_replay_head
from ..settings.contract import check_contract
from ..settings.preflight import check_dataset, check_single_requests, check_traces, own_generation_config
from .gap_checks import SAMPLES, GapChecks
from .passes import LossInputs, ScoringPass, UnscoredBatchError
from .publishing import PublishesTraces
from .recorded_generation import RecordedGeneration
from .replayed_models import ReplayedModels
from .route_sessions import RouteSessions
from .trace_saving import TraceSaver

if TYPE_CHECKING:
    _TRLTrainer = Any  # one of several, whose methods differ
else:
    _TRLTrainer = object

SHARED_SEAM: dict[str, tuple[str, ...]] = {
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_prepare_inputs": ("generation_batch",),
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


class ReplayTrainer(RecordedGeneration, GapChecks, PublishesTraces, _TRLTrainer):
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
    eos_token_ids: list[int]

    _sampled_elsewhere = False  # by an older policy: a gap is no fault
    _pass: ScoringPass | None = None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        *more: Any,
        **kwargs: Any,
    ):
        kwargs = self._by_name(more, kwargs)
        check_supported()
        args = self._checked_args(model, args)
        if args.use_vllm and args.vllm_mode == "colocate":
            check_supported("vllm")
        if train_dataset is not None:
            check_dataset(train_dataset, "train_dataset")
        self.sampling_settings = check_contract(args, own_generation_config(model, args))
        check_single_requests(self.sampling_settings, kwargs)
        check_rollout = getattr(kwargs.get("rollout_func"), "check_settings", None)
        if check_rollout is not None:
            check_rollout(self.sampling_settings)
        check_tensor_parallel(model, args)
        self.replays_support = self.sampling_settings.truncates
        self.replays_routes = args.routed_experts_replay
        self._routes = RouteSessions()
        self._saver: TraceSaver | None = None
        self._rewards: list[float] = []  # weighted sum for each completion of this process's latest generation batch
        self._generated_at = -1  # optimizer step of the buffered completions
        self._unwrapped: tuple[Any, Any] | None = None  # the model, and its base model
        self._step_metrics = StepMetrics()
        growth = self.replays_support and args.support_growth
        self._growth = SupportGrowth(args.support_mass_floor) if growth else None
        if not (self.replays_support or self.replays_routes):
            check_traces(args, self._sampled_elsewhere)
            # Stock, but for how a server gets its weights.
            own = {"VLLMGeneration": engine_builder(self._session(), args)} if args.weight_sync == "filesystem" else {}
            with rebound(self._trl, **own):
                super().__init__(model, reward_funcs, args=args, train_dataset=train_dataset, **kwargs)
            return
        add_fused_lm_head = self._trl.add_fused_lm_head

        def add_heads(target: PreTrainedModel, *head_args: Any, **head_kwargs: Any) -> None:
            add_fused_lm_head(target, *head_args, **head_kwargs)
            add_replay_head(target, self._check_model_call)

        engine = {"VLLMGeneration": engine_builder(self._session(), args)} if args.use_vllm else {}
        with rebound(self._trl, add_fused_lm_head=add_heads, **engine):
            super().__init__(model, reward_funcs, args=args, train_dataset=train_dataset, **kwargs)
        self._groups = SampleGroups.of(self)
        if args.save_traces:
            with agreeing():
                self._saver = TraceSaver(args, self)
            self.add_callback(self._saver)
        half_precision = args.bf16 or args.fp16 or self.model.dtype != torch.float32
        if args.use_vllm:
            engine_dtype = self.vllm_generation.engine_dtype if args.vllm_mode == "server" else args.vllm_dtype
            half_precision |= engine_dtype not in ("auto", "float32")
        self._replay_check = ReplayCheck(not half_precision, args.replay_tolerance, self._groups.gather)
        self._entropy_scope = args.entropy_scope if self.replays_support else "full"
        if self.replays_support and args.entropy_scope == "auto":
            self._entropy_scope = "full" if self._entropy_in_loss() else "support"
        self._models = ReplayedModels(self)

    def _session(self) -> CaptureSession:
        """What the engine is told of this trainer; most of it exists only when the trainer is built."""
        return CaptureSession(
            settings=self.sampling_settings,
            model=lambda: self.model,
            recorder=lambda: self._recorder,
            routers=(lambda: self._routes.of(self.model)) if self.replays_routes else None,
            policy_step=lambda: self.state.global_step,
        )

    @classmethod
    def _by_name(cls, more: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments after `train_dataset` by name: trainers between this one and TRL's may take them by name only."""
        signature = inspect.signature(getattr(cls._trl, f"{cls._algorithm}Trainer"))
        own = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind_partial(*[None] * 4, *more, **own).arguments
        return kwargs | dict(list(bound.items())[4:])

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

    # ---------------------------------------------------------------------------------------------------- scoring

    @contextlib.contextmanager
    def _opened(self, scoring_pass: ScoringPass) -> Iterator[ScoringPass]:
        """Make `scoring_pass` the one that is running; the one before goes on afterwards."""
        outer, self._pass = self._pass, scoring_pass
        try:
            yield scoring_pass
        finally:
            self._pass = outer

    @contextlib.contextmanager
    def scoring(self, batch: dict[str, Any]) -> Iterator[None]:
        """Score `batch` inside the block: over its recorded supports, or over the vocabulary where it has none.

        For trainers with methods of their own. A loss needs no such block, since its batch is known.

        Args:
            batch: what `_generate_and_score_completions` returned, or an empty dictionary.
        """
        samples = SampleBatch.of(batch[SAMPLES]) if SAMPLES in batch else None
        with self._opened(ScoringPass("rescore", samples, batch)):
            yield

    def _loss_pass(self, inputs: dict[str, Any]) -> ScoringPass:
        # A copy: TRL gives the same dictionary again in the batch's next iteration.
        samples = SampleBatch.of(inputs[SAMPLES])
        return ScoringPass("loss", samples, LossInputs(inputs, self._entries_completed_by_the_loss()))

    def _entries_completed_by_the_loss(self) -> tuple[str, ...]:
        """Entries of a batch that `_scored` completes in a loss."""
        return ()

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or SAMPLES not in inputs:
            return inputs
        # In the batch that TRL keeps for its next iteration, so that layouts are kept too.
        inputs[SAMPLES] = SampleBatch.of(inputs[SAMPLES])
        # Open until the end of `training_step`: a subclass may compute its loss by any method.
        self._pass = self._loss_pass(inputs)
        return self._pass.inputs

    def _compute_loss(self, model, inputs):
        whole = self._pass
        whole_batch = whole is not None and inputs is whole.inputs and inputs.get(SAMPLES) is whole.samples
        if SAMPLES not in inputs or whole_batch:
            return super()._compute_loss(model, inputs)
        # A part of the batch, or a changed one, with the samples that it carries itself.
        if whole is not None and isinstance(whole.inputs, LossInputs):
            whole.inputs.check_part(inputs)
        with self._opened(self._loss_pass(inputs)) as part:
            loss = super()._compute_loss(model, part.inputs)
        part.check_scored(type(self).__name__)
        self._log_scores(part)
        if whole is not None:
            whole.logprobs = part.logprobs
            whole.unchecked += part.unchecked
        return loss

    def _check_model_call(self, input_ids: Any) -> None:
        if self._pass is not None:
            self._pass.check_model_call(input_ids)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        current = self._pass
        score = functools.partial(
            super()._get_per_token_logps_and_entropies,
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_to_keep=logits_to_keep,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            **kwargs,
        )
        if current is None and self.model.training and (self.replays_support or self.replays_routes):
            raise UnscoredBatchError(
                "Log-probs were asked for outside of generation and loss, so it is not known over which supports. "
                "Score inside `with self.scoring(batch):`, where `batch` is what _generate_and_score_completions "
                "returned."
            )
        if current is None or (current.samples is None and current.role == "rescore"):
            return score(model)
        samples = current.recorded(type(self).__name__)
        reference = self._is_reference_pass(model)
        policy = not reference and self._is_policy(model)
        if not (policy or reference):
            _check_has_head(model)  # a model of the subclass's own, such as a teacher
        # Without truncation the distribution that was sampled from is the whole vocabulary's.
        full = not self.replays_support or (self._full_kl and reference)
        caller = ReplayCaller(
            model,
            samples,
            logits_to_keep,
            temperature=current.temperature or self.temperature,
            log_probs="full_logprobs" if full else "logprobs",
            entropy=f"{self._entropy_scope}_entropy" if compute_entropy else None,
            extra=self._extra_scores(current, not policy) if self.replays_support else (),
        )
        # The reference may be the policy itself, with its adapters off.
        routed = self.model if policy or (reference and model is not self.ref_model) else model
        current.scoring = True
        try:
            if self.replays_routes and not current.live_routes and self._replays_routes_in(reference):
                num_samples, width = input_ids.shape
                self._routes.open(routed, samples, width, logits_to_keep, batch_size or num_samples)
            logps, entropies, aux_loss = score(caller)
            caller.finish()
        except BaseException:
            self._routes.discard()
            raise
        finally:
            current.scoring = False
        if not torch.is_grad_enabled():
            self._routes.close(routed)  # a pass with gradients stays open until its backward is done
        if policy or reference:
            logps = self._scored(current, logps, caller.collected(logits_to_keep), reference)
        return logps, entropies, aux_loss

    @property
    def _full_kl(self) -> bool:
        return self.replays_support and self.beta != 0.0 and self.args.kl_scope == "full"

    def _entropy_in_loss(self) -> bool:
        """Whether the loss depends on the entropy, and not only a metric."""
        return False

    def _extra_scores(self, current: ScoringPass, reference: bool) -> tuple[str, ...]:
        """Scores beside the log-probs that a pass is asked for under truncation."""
        extra: tuple[str, ...] = ()
        if current.role == "loss" and not reference:
            extra += ("support_entropy",)
            whole = self._full_kl or self._entropy_scope == "full" or self._growth is not None
            if whole and not self.sampling_settings.shifts:  # a shifted support is no part of the plain distribution
                extra += ("log_mass",)
        return extra

    def _scored(
        self, current: ScoringPass, logps: torch.Tensor, extra: dict[str, torch.Tensor], reference: bool
    ) -> torch.Tensor:
        """Hook after each scoring: keep what it found in the pass, return the `[B, T]` log-probs for TRL."""
        if not reference:
            current.logprobs, current.extra = logps.detach(), extra
        return logps

    def _replays_routes_in(self, reference: bool) -> bool:
        return not reference or self.args.routes_for_reference == "replay"

    def train(self, *args, **kwargs):
        if self.args.use_vllm and (self.replays_support or self.replays_routes):
            # TRL skips the sync when the number of the step is that of the latest one, and a second training begins at
            # step 0 with the weights of the first.
            self._last_loaded_step = -1
            self.vllm_generation.loaded_step = None
        return super().train(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        # Checkpointed layers run their routers again in backward, which is over only when this returns.
        try:
            loss = super().training_step(*args, **kwargs)
            done, self._pass = self._pass, None
            if done is not None:
                done.check_scored(type(self).__name__)
                self._log_scores(done)
            self._log_routes()
            # DeepSpeed steps at the end of its backward.
            same_weights = not (self.is_deepspeed_enabled and self.accelerator.sync_gradients)
            for replayed, batch in done.unchecked if done is not None else ():
                self._check_replay(replayed, batch, same_weights)
        finally:
            self._routes.discard()
            self._pass = None
        return loss

    def _is_reference_pass(self, model: Any) -> bool:
        if self.ref_model is not None:
            return model is self.ref_model
        if not hasattr(self._base_model(), "peft_config"):  # no adapters
            return False
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        return any(layer.disable_adapters or "ref" in layer.active_adapters for layer in layers)

    def _is_policy(self, model: Any) -> bool:
        # However it is wrapped, and whoever called it: it has the policy's parameters.
        first = next(self.model.parameters())
        return any(parameter is first for parameter in model.parameters())

    def _base_model(self) -> PreTrainedModel:
        # Kept: accelerate looks for DeepSpeed among the installed packages at each call, which takes milliseconds.
        if self._unwrapped is None or self._unwrapped[0] is not self.model:
            model = self.accelerator.unwrap_model(self.model)
            self._unwrapped = self.model, model.get_base_model() if is_peft_model(model) else model
        return self._unwrapped[1]


def _check_has_head(model: Any) -> None:
    inner = causal_model(model)
    if "replay" not in inspect.signature(inner.forward).parameters:
        raise UnscoredBatchError(
            f"{type(inner).__name__} is neither the policy nor the reference of this trainer, and cannot score over "
            "supports. Give it the head once, before it is wrapped: "
            "trl_support_replay.policy.replay_head.add_replay_head(model)."
        )
