"""Generation in a trainer that replays: supports are recorded beside the tokens, and every batch carries them."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..batch.layout import SampleBatch
from ..checks.completion_columns import completion_columns, empty_columns
from ..checks.replay_metrics import support_metrics
from ..checks.support_growth import SupportGrowth
from ..engines.continuous_batching import BatchRecorder, recording_batches
from ..engines.transformers_generate import ScoresRecorder, recording
from ..parallel.processes import agreeing, agreeing_around, alone
from ..parallel.tensor_parallel import SampleGroups
from ..rollouts.recorder import SupportRecorder, TracedLogprob
from ..settings.shifted import as_arguments
from ..traces.columns import Trace
from ..traces.shifts import LogitShifts
from .gap_checks import SAMPLES
from .passes import ScoringPass
from .replayed_models import ReplayedModels
from .trace_saving import TraceSaver

if TYPE_CHECKING:
    from ..rollouts.collect import Collected

    _TRLTrainer = Any  # one of several, whose methods differ
else:
    _TRLTrainer = object


class RecordedGeneration(_TRLTrainer):
    """Mixed into a replaying trainer: how its completions are sampled, rewarded and kept."""

    _trl: Any
    _pass: ScoringPass | None
    _groups: SampleGroups
    _growth: SupportGrowth | None
    _saver: TraceSaver | None
    _models: ReplayedModels
    eos_token_ids: list[int]

    def _record_transformers(self, prompt_ids: list, generate: Any) -> tuple[list, list[list[TracedLogprob]]]:
        """Completions of `generate`, and their log-probs, which know their rows.

        Args:
            prompt_ids: the prompts.
            generate: calls the model's own `generate`, or its `generate_batch`, and returns the completions.
        """
        if self.args.use_transformers_continuous_batching:
            batches = BatchRecorder()
            with recording_batches(self._base_model(), batches, self.continuous_batching_config):
                completion_ids = generate()
            return completion_ids, self._read_scores(prompt_ids, completion_ids, batches, None)
        scores = ScoresRecorder(truncates=self.replays_support)

        def cut_there_too(stop_ids: list[int]) -> None:
            # TRL cuts completions at these, and takes those that end otherwise for truncated.
            self.eos_token_ids = stop_ids or self.eos_token_ids

        with contextlib.ExitStack() as stack:
            stack.enter_context(recording(self._base_model(), scores, cut_there_too))
            routing = stack.enter_context(self._routes.of(self.model).record()) if self.replays_routes else None
            completion_ids = scores.trim(generate())
        return completion_ids, self._read_scores(prompt_ids, completion_ids, scores, routing)

    @alone()
    def _read_scores(
        self, prompt_ids: list, completion_ids: list, scores: Any, routing: Any
    ) -> list[list[TracedLogprob]]:
        recorder = self._recorder
        assert recorder is not None
        routes: list[Any] = [None] * len(completion_ids)
        if routing is not None:
            lengths = [(len(p), len(c)) for p, c in zip(prompt_ids, completion_ids, strict=True)]
            padded = max(p for p, _ in lengths)
            multiple = int(self.pad_to_multiple_of or 1)
            padded = -(-padded // multiple) * multiple
            width = padded + scores.num_steps
            routes = routing.samples([padded - p for p, _ in lengths], [p + c for p, c in lengths], width)
        return [
            recorder.add(ids, values, rows, routes=route, prompt_ids=prompt)
            for prompt, ids, (values, rows), route in zip(
                prompt_ids, completion_ids, scores.collect(completion_ids), routes, strict=True
            )
        ]

    def _generate(self, prompts: list) -> Any:
        if self._recorder is None:
            return super()._generate(prompts)
        if self.replays_routes:
            self._routes.of(self.model)  # finding the routers takes all processes, which are on their own from here on
        seen = self.state.num_input_tokens_seen
        # Where processes meet in each turn of a conversation, one cannot tell the others between the turns.
        together = contextlib.nullcontext() if self._turns_meet() else agreeing_around(self.accelerator)
        with together:
            output = super()._generate(prompts)
        self.state.num_input_tokens_seen = self._groups.tokens_once(seen, self.state.num_input_tokens_seen)
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        return output

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[list[Trace]]:
        """Around the making of samples, which are put into the list; checked, and if it fails on one process, on all.

        What is wrong with one process's samples must not turn up in a pass that the processes make together.
        """
        samples: list[Trace] = []
        with agreeing():
            yield samples
            if self.replays_routes:
                self._routes.check(self.model, samples)
        self._groups.check_same(samples)

    def _turns_meet(self) -> bool:
        """Whether a turn of TRL's conversations with tools has collectives, of the engine or of the sharded policy."""
        if not getattr(self, "tools", None):
            return False
        if self.use_vllm:
            return self.vllm_mode == "colocate" and self.vllm_generation.tensor_parallel_size > 1
        return self.is_fsdp_enabled or self.is_deepspeed_enabled or not self._groups.single

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
            "shifts": LogitShifts(**as_arguments(shifts)) if (shifts := self.sampling_settings.shifts) else None,
        }

    def _keep_samples(self, collected: Collected) -> None:
        assert self._pass is not None and self._recorder is not None
        self._pass.samples = SampleBatch.of(collected.samples)
        self._log_completion_columns(completion_columns(collected.samples))
        self._log(support_metrics(collected.samples, self._recorder.repaired, collected.num_synthetic))

    def _log_completion_columns(self, columns: dict[str, list[float | None]]) -> None:
        if self.log_completions:
            for name, values in columns.items():
                self._log_completion_extra(name, values)

    def _generate_and_score_completions(self, inputs):
        if not (self.replays_support or self.replays_routes):
            return super()._generate_and_score_completions(inputs)
        if not self.model.training:
            self._log_completion_columns(empty_columns(len(inputs)))  # the table has a value a row in every column
            with self._groups.counted_once(self._trl):
                return super()._generate_and_score_completions(inputs)
        self._models.make_ready()
        generation = ScoringPass("generation", recorder=SupportRecorder())
        with self._opened(generation), self._groups.counted_once(self._trl):
            output = super()._generate_and_score_completions(inputs)
        samples = output[SAMPLES] = generation.recorded(type(self).__name__)
        self._generated_at = self.state.global_step
        if self._growth is not None:
            self._growth.start()
        if self._saver is not None:
            with agreeing():
                if self._groups.first:
                    self._saver.save(samples, inputs, self._rewards)
        self._check_generated(output, generation)
        return output

    @property
    def _recorder(self) -> SupportRecorder | None:
        """Records the completions that are being sampled; `None` when nothing is recorded (evaluation)."""
        return None if self._pass is None else self._pass.recorder

    @abstractmethod
    def _check_generated(self, output: dict[str, Any], generation: ScoringPass) -> None:
        """Run the replay check now if old log-probs were computed; otherwise it runs after the first loss."""

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if not (self.replays_support or self.replays_routes):
            return rewards
        rewards = self._groups.share_rewards(rewards)
        start = self.accelerator.process_index * len(prompts)
        weighted = rewards * self.reward_weights.to(rewards.device)
        # As TRL: a completion that no function could score has no reward, not one of 0.
        total = weighted.nansum(dim=1).masked_fill(weighted.isnan().all(dim=1), torch.nan)
        self._rewards = total[start : start + len(prompts)].tolist()
        return rewards
