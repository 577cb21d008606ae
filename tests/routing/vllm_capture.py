"""Generate with the real vLLM, in a process of its own, and keep what it routed: `python vllm_capture.py job.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def main(job: dict) -> None:
    """Run the requests of `job` and write, for each completion `i`, the arrays `<i>/<name>` of its results."""
    from vllm import LLM, SamplingParams

    from trl_support_replay.engine_outputs.vllm_outputs import read_flat_logprobs
    from trl_support_replay.engine_outputs.vllm_routes import read_routed_experts

    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        **job["engine"],
    )
    results: dict[str, np.ndarray] = {}
    number = 0
    for batch in job["batches"]:
        start = batch.get("prompt_start", 0)
        sampling = SamplingParams(
            **{"temperature": 1.0, "detokenize": False, "flat_logprobs": True} | batch["sampling"],
            routed_experts_prompt_start=start,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            for completion in output.outputs:
                routes = read_routed_experts(
                    output, completion, **job["routers"], request=f"request {output.request_id}", prompt_start=start
                )
                values, supports, repaired = read_flat_logprobs(completion, batch["sampling"]["top_k"], "request")
                assert repaired == 0
                found = {
                    "prompt": np.asarray(output.prompt_token_ids),
                    "tokens": np.asarray(completion.token_ids),
                    "rows": np.asarray(completion.routed_experts),
                    "experts": routes.experts,
                    "captured": routes.captured,
                    "logprobs": values,
                    "support_ids": supports.token_ids,
                    "support_offsets": supports.offsets,
                    "cached": np.asarray(output.num_cached_tokens),
                }
                results |= {f"{number}/{name}": array for name, array in found.items()}
                number += 1
    np.savez(job["results"], **results)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
