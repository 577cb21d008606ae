"""Score saved traces with a model, and add the scores as columns.

For each token: `replayed_logprobs` over its recorded support, `full_logprobs` over the vocabulary, `log_mass` of the
support under the model, `support_entropy`, and `reference_logprobs` when a second model is given. Works shard by shard,
so memory does not grow with the traces, and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def main(argv: Sequence[str]) -> int:
    """Write a scored shard for each shard, and report how far the scores are from the recorded ones."""
    parser = argparse.ArgumentParser(
        prog="trl-support-replay score",
        description=__doc__,
        epilog="example: trl-support-replay score --traces runs/traces --model Qwen/Qwen3-0.6B --output runs/scored",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", required=True, help="folder of shards, Parquet file, or dataset saved to disk")
    parser.add_argument("--model", required=True, help="model to score with: a folder or a Hub name")
    parser.add_argument("--reference", help="second model, for reference_logprobs over the same supports")
    parser.add_argument("--output", required=True, help="folder for the scored shards")
    parser.add_argument("--batch_size", type=int, default=8, help="traces a forward (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="data type of the models (default: %(default)s)")
    parser.add_argument("--device", help="device of the models (default: the GPU when there is one, else the CPU)")
    args = parser.parse_args(argv)

    import pyarrow as pa
    import pyarrow.parquet as pq
    from rich.progress import Progress

    from ..trace_scores import TraceScorer
    from ..traces.columns import table_to_traces
    from ..traces.reading import trace_tables
    from ..traces.shards import write_whole

    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    scorers: dict[float, tuple[Any, Any]] = {}
    models = [_load(name, args) for name in (args.model, args.reference) if name]
    gaps: list[np.ndarray] = []
    with Progress() as progress:
        task = progress.add_task("scoring", total=None)
        for name, table in trace_tables(args.traces):
            target = output / (name if name.endswith(".parquet") else f"{name}.parquet")
            traces = table_to_traces(table)
            for i, trace in enumerate(traces):
                trace.check(f"{name}, row {i}")
            if not target.exists():
                temperature = _temperature(table)
                if temperature not in scorers:
                    made = [TraceScorer(model, temperature, args.batch_size) for model in models]
                    scorers[temperature] = (made[0], made[1] if len(made) > 1 else None)
                policy, reference = scorers[temperature]
                scores = policy.score(traces)
                columns = {"replayed_logprobs": scores["logprobs"]}
                columns |= {key: scores[key] for key in ("full_logprobs", "log_mass", "support_entropy")}
                if reference is not None:
                    columns["reference_logprobs"] = reference.score(traces)["logprobs"]
                for column, values in columns.items():
                    table = table.append_column(column, pa.array(values, pa.list_(pa.float32())))
                write_whole(table, target)
            replayed = pq.read_table(target, columns=["replayed_logprobs"])["replayed_logprobs"].to_pylist()
            for trace, values in zip(traces, replayed, strict=True):
                recorded = trace.supports.sizes > 0
                gaps.append((np.array(values, np.float64) - trace.sampling_logprobs)[recorded])
            progress.advance(task, 1)
    gap = np.abs(np.concatenate(gaps)) if gaps else np.zeros(0)
    if len(gap):
        print(f"{len(gap):,} tokens: replayed minus recorded log-prob: mean {gap.mean():.2e}, largest {gap.max():.2e}")
        if gap.max() > 1e-3:
            print("The model that scored is not the one that sampled, or not in the same precision.")
    print(f"scored traces: {output}")
    return 0


def _load(name: str, args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype))
    return model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _temperature(table: Any) -> float:
    from ..traces.columns import TraceSchemaError

    if "sampling" not in table.column_names:
        raise TraceSchemaError("The traces have no `sampling` column, so their temperature is unknown.")
    found = {float(row["temperature"]) for row in table["sampling"].to_pylist()}
    if len(found) != 1:
        raise TraceSchemaError(f"A shard mixes the temperatures {sorted(found)}; score them apart.")
    return found.pop()
