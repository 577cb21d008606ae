"""Training on saved traces: a traces dataset takes the place of generation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset

from ..parallel.processes import alone
from ..parallel.tensor_parallel import tensor_parallel_size
from ..settings.contract import SamplingSettings
from ..traces.columns import OWN_COLUMNS, Trace, TraceSchemaError, table_to_traces
from ..traces.multimodal import check_no_placeholders
from ..traces.reading import dataset_table
from ..traces.rollout_keys import ROLLOUT_KEY, ROUTES_KEY
from ..traces.sampling import sampling_temperatures

logger = logging.getLogger(__name__)

GROUP_COLUMN = "trace_group"
_ROUNDING = 1e-4  # nats by which the log-prob of an only candidate may differ from 0


class OfflineTraces:
    """Groups of completions of the same prompt, handed out in place of generation.

    Args:
        dataset: a traces dataset with at least `num_generations` completions of each prompt. Further columns reach the
            reward functions; a `reward` column can stand in for them.
        args: the training configuration; its temperature must be the one that the traces were sampled with.
        config: of the model that is trained.

    Raises:
        TraceSchemaError: a streamed dataset, too few completions of every prompt, another temperature or several,
            damaged files, or traces of prompts with images.
    """

    def __init__(self, dataset: Any, args: Any, config: Any):
        if isinstance(dataset, IterableDataset):
            raise TraceSchemaError("Traces to train on must be a map-style dataset; load it with streaming=False.")
        if args.use_vllm:
            raise TraceSchemaError(
                "use_vllm=True with a traces dataset: nothing is generated, so no engine is needed. Set use_vllm=False."
            )
        table = dataset_table(dataset)
        traces = table_to_traces(table)
        _check_temperature(table, args.temperature)
        check_no_placeholders(traces, config)
        for i, trace in enumerate(traces):
            trace.check(f"row {i}")
        self._cut = _cut(traces)
        traces = _with_decoded_columns(traces, dataset)
        by_prompt: dict[bytes, list[Trace]] = {}
        for trace in traces:
            by_prompt.setdefault(trace.prompt_ids.tobytes(), []).append(trace)
        size = args.num_generations
        self.groups = [
            group[start : start + size]
            for group in by_prompt.values()
            for start in range(0, len(group) - size + 1, size)
        ]
        self._size = size
        self._chosen: list[int] = []
        used = size * len(self.groups)
        if not used:
            most = max(map(len, by_prompt.values()), default=0)
            raise TraceSchemaError(
                f"num_generations={size}, but no prompt of the {len(by_prompt)} in the traces has more than {most} "
                "completions. Lower num_generations or capture more completions a prompt."
            )
        if used < len(traces):
            logger.warning(
                "%d of %d traces are left out: their prompts have no further %d completions to make a group.",
                len(traces) - used,
                len(traces),
                size,
            )

    def prompts(self) -> Dataset:
        """One row a group, for the sampler; with the prompt as the traces know it."""
        rows = [{"prompt": group[0].extra.get("prompt", ""), GROUP_COLUMN: i} for i, group in enumerate(self.groups)]
        return Dataset.from_list(rows)

    def reward_func(self) -> Any:
        """A reward function that returns the `reward` column.

        Raises:
            TraceSchemaError: there is none.
        """
        if "reward" not in self.groups[0][0].extra:
            raise TraceSchemaError(
                "The traces have no `reward` column and no reward_funcs are given; one of them is needed."
            )

        def trace_reward(completions: list, reward: list[float], **_: Any) -> list[float]:
            return reward

        return trace_reward

    def choose(self, groups: Sequence[int]) -> None:
        """Set the groups of the process's next batch, one entry a completion."""
        self._chosen = list(groups)

    def check_settings(self, settings: SamplingSettings) -> None:
        """Refuse settings with which the traces would not be scored over what they were drawn from.

        Raises:
            TraceSchemaError: the traces have supports and the settings cut no tokens, or the other way round.
        """
        if self._cut and not settings.truncates:
            raise TraceSchemaError(
                "The traces were drawn from recorded supports, and the configuration cuts no tokens, so they would be "
                "scored over the whole vocabulary. Set top_k, top_p or min_p; recorded supports count, whatever the "
                "value."
            )
        if settings.truncates and not self._cut:
            raise TraceSchemaError(
                f"The traces were drawn from the whole vocabulary, and the configuration has {settings}. Leave it out, "
                "and set routed_experts_replay=True to replay their routes."
            )

    @alone()
    def __call__(self, prompts: list, trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: the saved completions of the chosen groups."""
        # Processes are given consecutive rows, and a group's rows are consecutive.
        start = trainer.accelerator.process_index // tensor_parallel_size(trainer.model) * len(prompts)
        traces = [self.groups[g][(start + i) % self._size] for i, g in enumerate(self._chosen)]
        output: dict[str, Any] = {
            "prompt_ids": [t.prompt_ids.tolist() for t in traces],
            "completion_ids": [t.completion_ids.tolist() for t in traces],
            "logprobs": [np.where(np.isnan(t.sampling_logprobs), 0.0, t.sampling_logprobs).tolist() for t in traces],
            "env_mask": [t.loss_mask.astype(int).tolist() for t in traces],
            ROLLOUT_KEY: [t.supports.take(np.where(t.loss_mask, np.arange(len(t.loss_mask)), -1)) for t in traces],
        }
        if traces[0].routes is not None:
            output[ROUTES_KEY] = [t.routes for t in traces]
        for name in traces[0].extra:
            if name != "prompt":
                output[name] = [t.extra[name] for t in traces]
        return output


def _with_decoded_columns(traces: list[Trace], dataset: Dataset) -> list[Trace]:
    """Traces whose further columns are as the dataset gives its rows out, as reward functions get them online."""
    names = [name for name in dataset.column_names if name not in OWN_COLUMNS]
    columns = dataset.with_format(None).select_columns(names)[:] if names else {}
    return [replace(trace, extra={name: columns[name][i] for name in names}) for i, trace in enumerate(traces)]


def _check_temperature(table: pa.Table, temperature: float) -> None:
    """A recorded support says what was cut, whatever cut it; the temperature is not in it, and is one for a batch."""
    found = sampling_temperatures(table, "The traces")
    if found == {float(temperature)}:
        return
    drawn = ", ".join(f"temperature={value:g}" for value in sorted(found))
    remedy = f"set {drawn}"
    if len(found) > 1:
        remedy = (
            "take those of one temperature, dataset.filter(lambda row: row['sampling']['temperature'] == "
            f"{min(found):g}), and set it"
        )
    raise TraceSchemaError(
        f"The traces were sampled with {drawn}, and the configuration has temperature={temperature:g}. Scoring them as "
        f"they were drawn needs the same: {remedy}."
    )


def _cut(traces: Sequence[Trace]) -> bool:
    """Whether log-probs run over supports, and not over the vocabulary; then a support is the sampled token alone.

    Raises:
        TraceSchemaError: for traces of both kinds.
    """
    over_vocabulary = [
        i for i, t in enumerate(traces) if (t.sampling_logprobs[t.supports.sizes == 1] < -_ROUNDING).any()
    ]
    over_supports = [i for i, t in enumerate(traces) if (t.supports.sizes > 1).any()]
    if over_vocabulary and over_supports:
        raise TraceSchemaError(
            f"Tokens of row {over_supports[0]} were drawn from recorded supports, and those of row "
            f"{over_vocabulary[0]} from the whole vocabulary: its supports hold the sampled token alone, whose "
            "log-prob is not 0. They are not trained on together; drop the rows of one kind."
        )
    return not over_vocabulary
