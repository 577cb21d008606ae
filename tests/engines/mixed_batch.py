"""One batch of everything, on a real vLLM engine: captured supports beside the engine's log-probs of all tokens.

    python -m tests.engines.mixed_batch MODEL [NAME=VALUE of vllm.LLM ...]

Prints one line of JSON: what was found, over all tokens. A process of its own, since engines share none well.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

VOCAB, NEW_TOKENS = 2000, 48
# Settings, how many requests have them, and completions of each.
REQUESTS = (
    ({"top_p": 0.95}, 5, 1),
    ({"min_p": 0.05, "temperature": 1.3}, 5, 1),
    (
        {
            "top_p": 0.8,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "temperature": 0.9,
        },
        5,
        1,
    ),
    ({"top_k": 20}, 5, 1),
    ({"top_p": 0.9, "top_k": 300}, 5, 1),
    ({"top_p": 0.99, "temperature": 0.8}, 5, 3),
)


def save_model(path) -> str:
    """A Llama with 2 layers, 2000 tokens and sharpened logits; it has no tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(path)
    return str(path)


def run(model: str, engine: dict) -> dict:
    """The batch on an engine with these arguments of `vllm.LLM`."""
    from vllm import LLM, SamplingParams

    from trl_support_replay.engines.vllm_captures import choose_capture, open_capture
    from trl_support_replay.settings.built_engine import check_engine
    from trl_support_replay.settings.contract import SamplingSettings

    kwargs = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # for the comparison only
        "max_model_len": 256,
        "block_size": 32,
        "num_gpu_blocks_override": 30,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": False,
        "seed": 0,
        **engine,
    }
    capture = choose_capture("auto", SamplingSettings(top_p=0.95), kwargs)
    llm = LLM(**{**kwargs, **capture.engine_kwargs(0, "float32")})
    check_engine(llm.llm_engine.vllm_config)
    open_capture(llm, capture)
    open_capture(llm, capture)  # the second time, nothing happens

    rng = np.random.default_rng(0)
    prefix = rng.integers(3, VOCAB, 64).tolist()
    prompts, params = [], []
    for sampling, count, n in REQUESTS:
        for i in range(count):
            # All but one begin alike, and some are longer than a chunk of prefill.
            prompts.append((prefix if i else []) + rng.integers(3, VOCAB, int(rng.integers(5, 90))).tolist())
            asked = {"n": n, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False, **sampling}
            asked |= capture.request_kwargs(sampling.get("top_k", 0), llm.llm_engine.model_config)
            params.append(SamplingParams(**asked | {"logprobs": -1, "flat_logprobs": True}))
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    # A request that is not marked is sampled beside those that are, and brings no supports.
    needed = capture.any_request_kwargs(0, llm.llm_engine.model_config)
    unmarked = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, top_p=0.9, **needed)
    llm.generate([{"prompt_token_ids": prefix}], unmarked, use_tqdm=False)
    *outputs, plain = llm.generate([*inputs, inputs[0]], [*params, unmarked], use_tqdm=False)
    unmarked_mask = plain.outputs[0].sampling_mask
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    found = {
        "capture": capture.name,
        "preemptions": metrics["vllm:num_preemptions"],
        "chunked": sum(len(prompt) > kwargs["max_num_batched_tokens"] for prompt in prompts),
        "cached": sum(output.num_cached_tokens > 0 for output in outputs),
        "unmarked": 0 if unmarked_mask is None else sum(map(len, unmarked_mask.token_ids)),
        **{"rows": 0, "equal": 0, "arrays": 0, "largest": 0, "gap": 0.0},
    }
    policy = policy_logits(model)
    for (sampling, _, _), output in zip([r for r in REQUESTS for _ in range(r[1])], outputs, strict=True):
        for completion in output.outputs:
            flat = completion.logprobs
            width = flat.end_indices[0]
            ids = np.asarray(flat.token_ids, np.int32).reshape(NEW_TOKENS, width)
            values = np.asarray(flat.logprobs, np.float64).reshape(NEW_TOKENS, width)
            logits = policy(list(output.prompt_token_ids), completion.token_ids) / sampling.get("temperature", 1.0)
            masks = completion.sampling_mask.token_ids
            for t, (row, token) in enumerate(zip(masks, completion.token_ids, strict=True)):
                # The sampled token comes first and again at its rank.
                finite = np.sort(ids[t][1:][np.isfinite(values[t][1:])])
                found["rows"] += 1
                found["equal"] += np.array_equal(np.sort(row), finite)
                found["arrays"] += isinstance(row, np.ndarray) and row.dtype == np.int32
                found["largest"] = max(found["largest"], len(row))
                if "repetition_penalty" not in sampling:
                    gap = logits[t, token] - torch.logsumexp(logits[t, np.array(row, np.int64)], 0)
                    found["gap"] = max(found["gap"], abs(float(gap) - values[t, 0]))
    logprobs, rows, repaired = capture.read(completion, 0, "the last request")
    assert repaired == 0 and rows.to_lists() == [row.tolist() for row in map(np.array, masks)]
    np.testing.assert_array_equal(logprobs, values[:, 0])
    return found


def policy_logits(model: str):
    """A function from prompt and completion to the completion's logits, `[T, V]`, of the same model in transformers."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits(prompt, completion):
        with torch.no_grad():
            whole = policy(torch.tensor([[*prompt, *completion]])).logits[0]
        return whole[len(prompt) - 1 : -1]

    return logits


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    engine = {name: int(value) if value.isdigit() else value for name, value in given.items()}
    print("FOUND " + json.dumps(run(sys.argv[1], engine)), flush=True)
