"""What recording supports costs a vLLM engine: tokens per second, plain and with each capture.

    python -m benchmarks.capture MODEL [--rounds 5]

One engine in this process samples the same prompts in turns: plainly (no log-probs), with supports taken in its worker,
and with flat log-probs of the top 24. The order changes from round to round. What is timed ends with supports on the
host, as `SupportRows`; but for log-probs with top_p alone, which do not hold the supports, so they are only asked for.
Time is that of the processor; on a GPU, of the clock. Each row of `data/capture.csv` is one turn. The script prints the
median of each capture relative to plain sampling in the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from .results import write_rows

FILE = Path(__file__).parent / "data" / "capture.csv"
FIELDS = ("sampling", "capture", "round", "tokens", "ids_mean", "seconds", "tokens_per_second", "of_plain")
SAMPLINGS: dict[str, dict[str, Any]] = {"top_k=20": {"top_k": 20}, "top_p=0.95": {"top_p": 0.95}}
CAPTURES = ("plain", "worker", "logprobs")
WORDS = (
    "Describe the sea, a rainy day, bread, a fox in the snow, the moon, an old house or a train ride in words".split()
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=12, help="sampled for each request")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    # Supports are taken in the worker of Model Runner V1.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

    import torch
    from vllm import LLM, SamplingParams

    from trl_support_replay.engine_outputs.vllm_capture import Capture
    from trl_support_replay.engines.vllm_captures import open_capture

    now = time.perf_counter if torch.cuda.is_available() else time.process_time
    worker = Capture("worker")
    llm = LLM(
        model=args.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=args.requests,
        logprobs_mode="processed_logprobs",
        max_logprobs=24,
        gpu_memory_utilization=0.2,
        enable_prefix_caching=False,
        **worker.engine_kwargs(0, "float32"),
    )
    open_capture(llm, worker)
    config, tokenizer = llm.llm_engine.model_config, llm.get_tokenizer()
    # The first words are few, so that time goes to sampling.
    prompts: Any = [
        {"prompt_token_ids": tokenizer(" ".join(WORDS[i % 12 : i % 12 + 6]))["input_ids"]} for i in range(args.requests)
    ]

    def turn(sampling: dict[str, Any], name: str, seed: int) -> dict[str, float]:
        capture, top_k = Capture(name), sampling.get("top_k", 0)
        # Where log-probs hold no support, as many are asked for as with a top_k of 20.
        asked = {} if name == "plain" else capture.request_kwargs(top_k or 20, config)
        params = [
            SamplingParams(
                # What is asked for must not change what is sampled.
                **{**asked, "top_k": top_k, **sampling},
                **{"max_tokens": args.tokens, "ignore_eos": True, "detokenize": False, "seed": seed + i},
            )
            for i in range(args.requests)
        ]
        start = now()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        held = name == "worker" or (name == "logprobs" and top_k > 0)
        rows = [capture.read(o.outputs[0], top_k, o.request_id)[1] for o in outputs] if held else []
        seconds = now() - start
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        return {
            "tokens": tokens,
            "ids_mean": round(sum(row.nnz for row in rows) / tokens, 1),
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 2),
        }

    turn({"top_k": 20}, "worker", 0)  # to warm up
    found: list[dict[str, Any]] = []
    for number in range(args.rounds):
        order = CAPTURES[number % 3 :] + CAPTURES[: number % 3]
        for sampling in SAMPLINGS:
            turns = {name: turn(SAMPLINGS[sampling], name, 1000 * number) for name in order}
            plain = turns["plain"]["tokens_per_second"]
            for name, one in turns.items():
                ratio = round(one["tokens_per_second"] / plain, 3)
                found.append({"sampling": sampling, "capture": name, "round": number, **one, "of_plain": ratio})
                print(found[-1], flush=True)
        write_rows(args.output, found, FIELDS)
    for sampling in SAMPLINGS:
        for name in CAPTURES[1:]:
            ratios = [row["of_plain"] for row in found if (row["sampling"], row["capture"]) == (sampling, name)]
            print(f"{sampling}, {name}: {statistics.median(ratios):.3f} of plain ({min(ratios)} to {max(ratios)})")


if __name__ == "__main__":
    main()
