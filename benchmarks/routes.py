"""What does replaying routed experts cost: per training step, and per token on the wire and on disk?

    python -m benchmarks.routes            # prints both tables, writes benchmarks/data/routes_{step,bytes}.csv

Step: forward and backward of a Qwen3-MoE with its own routing, and with the same routes replayed (agreement is counted
as in training, every position captured). Both do the same products, since the experts are the same. Steps alternate;
times are CPU times on one thread, so that other work on the machine counts little.

Bytes: routes drawn at random, which nothing compresses, for the shapes of real models. Each container is compared with
itself holding int32 nested lists (tokens of layers of experts); on the wire, as int32 arrays and as JSON lists.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trl_support_replay.routing import RouteBatch, RouterReplay
from trl_support_replay.traces.columns import Trace, traces_to_table
from trl_support_replay.traces.routes import RoutedExperts
from trl_support_replay.traces.support import SupportRows
from trl_support_replay.wire.arrays import Array

from .results import write_rows

DATA = Path(__file__).parent / "data"
# name: layers with experts, experts, top-k
SHAPES = {"Qwen3-30B-A3B": (48, 128, 8), "DeepSeek-V3": (58, 256, 8), "Qwen3-Next-80B-A3B": (48, 512, 10)}


def build_model(experts: str, checkpointing: bool) -> Qwen3MoeForCausalLM:
    """4 layers, hidden size 256, 32 experts of which 4 are used; sharp routers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
    )
    config._experts_implementation = experts
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def step_times(experts: str, checkpointing: bool, batch: int, width: int, repeats: int) -> dict[str, Any]:
    """Median CPU milliseconds of a step, native and replayed, and the overhead's percentiles over pairs of steps."""
    model = build_model(experts, checkpointing)
    ids = torch.randint(0, 2048, (batch, width), generator=torch.Generator().manual_seed(1))
    replay = RouterReplay(model)
    with replay.record() as recording, torch.no_grad():
        model(input_ids=ids)
    rows = recording.experts(batch).numpy()
    samples = [RoutedExperts(row, num_experts=replay.num_experts, layers=replay.layers) for row in rows]

    def native() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    def replayed() -> None:
        # Making the batch from the samples' routes is part of the price.
        with replay.scope(RouteBatch.from_samples(samples, [0] * batch, width)):
            native()

    def milliseconds(run: Callable[[], None]) -> float:
        start = time.process_time()
        run()
        return 1e3 * (time.process_time() - start)

    native(), replayed()
    pairs = []
    for i in range(repeats):
        order = (native, replayed) if i % 2 else (replayed, native)
        spent = {run: milliseconds(run) for run in order}
        pairs.append((spent[native], spent[replayed]))
    times = np.array(pairs)
    ratios = times[:, 1] / times[:, 0] - 1
    return {
        "experts": experts,
        "checkpointing": checkpointing,
        "tokens": batch * width,
        "native_cpu_ms_median": round(float(np.median(times[:, 0])), 1),
        "replayed_cpu_ms_median": round(float(np.median(times[:, 1])), 1),
        "pairs": repeats,
        "overhead_percent_p20": round(100 * float(np.percentile(ratios, 20)), 2),
        "overhead_percent_median": round(100 * float(np.median(ratios)), 2),
        "overhead_percent_p80": round(100 * float(np.percentile(ratios, 80)), 2),
        "overhead_percent_standard_error": round(100 * _standard_error_of_median(ratios), 2),
    }


def _standard_error_of_median(values: np.ndarray) -> float:
    """For normal errors, whose spread is taken from the quartiles."""
    q25, q75 = np.percentile(values, [25, 75])
    return float(1.253 * (q75 - q25) / 1.349 / np.sqrt(len(values)))


def draw_routes(rng: np.random.Generator, num_tokens: int, shape: tuple[int, int, int]) -> RoutedExperts:
    """Routes of a generation: all tokens but the last are captured."""
    num_layers, num_experts, top_k = shape
    scores = rng.random((num_tokens - 1, num_layers, num_experts), dtype=np.float32)
    experts = np.argpartition(scores, top_k, axis=-1)[..., :top_k]
    return RoutedExperts.from_prefix(experts, num_tokens, num_experts=num_experts)


def bytes_per_token(name: str, num_tokens: int) -> list[dict[str, Any]]:
    """One row per container: bytes a token of the routes as this package keeps them, and as int32 nested lists."""
    routes = draw_routes(np.random.default_rng(0), num_tokens, SHAPES[name])
    nested = routes.experts.astype(np.int32)
    as_json, encode = len(msgspec.json.encode(nested.tolist())), msgspec.msgpack.encode
    lists = pa.table({"routed_experts": pa.array([nested.tolist()], pa.list_(pa.list_(pa.list_(pa.int32()))))})
    columns = _route_columns(routes)
    sizes = {
        "memory": (routes.nbytes, nested.nbytes),
        "wire": (len(encode(Array.of(routes.experts))), len(encode(Array.of(nested)))),
        "Arrow": (_arrow_bytes(columns), _arrow_bytes(lists)),
        "Parquet": (_parquet_bytes(columns), _parquet_bytes(lists)),
    }
    return [
        {
            "shape_of": name,
            "layers": SHAPES[name][0],
            "num_experts": SHAPES[name][1],
            "top_k": SHAPES[name][2],
            "dtype": str(routes.experts.dtype),
            "kept_as": kept_as,
            "bytes_per_token": round(ours / num_tokens, 1),
            "int32_nested_lists": round(theirs / num_tokens, 1),
            "ratio": round(ours / theirs, 3),
            "json_lists": round(as_json / num_tokens, 1) if kept_as == "wire" else None,
        }
        for kept_as, (ours, theirs) in sizes.items()
    ]


def _route_columns(routes: RoutedExperts) -> pa.Table:
    prompt_length = len(routes) // 2
    num_sampled = len(routes) - prompt_length
    trace = Trace(
        prompt_ids=np.zeros(prompt_length, np.int32),
        completion_ids=np.zeros(num_sampled, np.int32),
        loss_mask=np.ones(num_sampled, bool),
        sampling_logprobs=np.zeros(num_sampled, np.float32),
        supports=SupportRows.from_ragged([[0]] * num_sampled),
        routes=routes,
    )
    table = traces_to_table([trace], model="", sampling={}, engine={})
    return table.select([name for name in table.column_names if name.startswith("routed_experts")])


def _arrow_bytes(table: pa.Table) -> int:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().size


def _parquet_bytes(table: pa.Table) -> int:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().size


def _write(path: Path, rows: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    write_rows(path, [row | machine for row in rows])
    print(f"wrote {path}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=120, help="pairs of steps that are timed")
    parser.add_argument("--output", type=Path, default=DATA, help="folder for the CSV files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    machine = {
        "cpus": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    bytes_rows = [row for name in SHAPES for row in bytes_per_token(name, num_tokens=1024)]
    _write(args.output / "routes_bytes.csv", bytes_rows, machine | {"pyarrow": pa.__version__})
    steps = [
        step_times(experts, checkpointing, batch=2, width=256, repeats=args.repeats)
        for experts in ("eager", "grouped_mm")
        for checkpointing in (False, True)
    ]
    _write(args.output / "routes_step.csv", steps, machine)


if __name__ == "__main__":
    main()
