"""Saves the traces of a training run: for each generation batch, one shard per process with samples of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import TrainerCallback

from ..engines.choose import engine_used
from ..parallel.processes import agreeing
from ..traces.columns import Trace, TraceSchemaError, check_column_names, traces_to_table
from ..traces.dataset_columns import DatasetColumns
from ..traces.multimodal import IMAGE_COLUMNS, MultimodalTraceError, check_no_placeholders
from ..traces.record import FolderRecord
from ..traces.shards import ShardFolder

_OWN = ("reward", "step")


class TraceSaver(TrainerCallback):
    """Writes each generation batch to `args.save_traces`.

    A resumed run replaces what it makes anew; one that begins anew sets the shards of the earlier one aside.

    Args:
        args: the training configuration.
        trainer: whose settings are recorded beside the tokens.

    Raises:
        OSError: the folder cannot be written.
        TraceSchemaError: dataset columns with the names of a trace's own, or of images.
    """

    def __init__(self, args: Any, trainer: Any):
        names = getattr(trainer.train_dataset, "column_names", None)
        what = f"save_traces={args.save_traces!r}: the training dataset"
        images = [name for name in names or () if name in IMAGE_COLUMNS]
        if images:
            raise MultimodalTraceError(
                f"{what} has the columns {images}, and traces carry no images: training on them would score other "
                "prompts than those that were sampled from. Leave save_traces out."
            )
        if not args.remove_unused_columns:  # a streamed dataset may not know its columns: `save` checks them too
            check_column_names(names or (), what)
            # Saved traces that are trained on have them from their own training.
            own = [] if trainer._sampled_elsewhere else [name for name in names or () if name in _OWN]
            if own:
                raise TraceSchemaError(
                    f"{what} has the columns {own}, which saved traces have for the reward and the step of training. "
                    "Rename them, dataset.rename_column(old, new)."
                )
        self._folder = ShardFolder(args.save_traces, "save_traces")
        self._trainer = trainer
        self._columns = DatasetColumns(getattr(trainer.train_dataset, "features", None))
        self._batch_of_step = (-1, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        accelerator = self._trainer.accelerator
        with agreeing():  # none goes on before the main process is done
            self._claim(args)
            if state.global_step == 0 and accelerator.is_main_process:
                self._folder.set_aside()
        with agreeing():
            self._folder.discard_from(state.global_step, accelerator.process_index, accelerator.num_processes)

    def _claim(self, args: Any) -> None:
        """Only the run that made the shards of a folder may replace them: one with the same output_dir and sampling.

        Raises:
            FolderRecordError: the folder holds other traces.
        """
        run = {
            "output_dir": os.path.abspath(args.output_dir),
            "sampling": str(self._trainer.sampling_settings),
            "trains_on_saved_traces": self._trainer._sampled_elsewhere,
        }
        record = FolderRecord(self._folder.path / "run.json", "training run", run, "Set save_traces to another folder.")
        record.check()
        if self._trainer.accelerator.is_main_process:
            record.write()

    def save(self, traces: Sequence[Trace], inputs: Sequence[Mapping[str, Any]], rewards: Sequence[float]) -> None:
        """Write one generation batch.

        Args:
            traces: `B` completions.
            inputs: their `B` dataset rows.
            rewards: their `B` rewards.

        Raises:
            MultimodalTraceError: a prompt with images, or ids that stand for some.
            ShardFolderError: the shard cannot be written.
        """
        trainer = self._trainer
        step = trainer.state.global_step
        seen, batch = self._batch_of_step
        self._batch_of_step = (step, batch + 1 if seen == step else 0)
        check_no_placeholders(traces, trainer._base_model().config, "Completion")
        rows = []
        for trace, row, reward in zip(traces, self._columns.encoded(inputs), rewards, strict=True):
            rows.append(replace(trace, extra=row | {"reward": float(reward), "step": step}))
        settings = trainer.sampling_settings
        # Of saved traces only the temperature is known to be that of the configuration.
        cutting = {} if trainer._sampled_elsewhere else {n: getattr(settings, n) for n in ("top_p", "top_k", "min_p")}
        table = traces_to_table(
            rows,
            model=trainer.model.name_or_path,
            sampling={"temperature": settings.temperature, **cutting, "seed": trainer.args.seed},
            engine=engine_used(trainer),
            types=self._columns.types,
            metadata=self._columns.metadata,
        )
        process = trainer.accelerator.process_index
        table = self._columns.settle(table, self._folder, process, trainer.accelerator.num_processes)
        self._folder.write(table, step, process, self._batch_of_step[1])
