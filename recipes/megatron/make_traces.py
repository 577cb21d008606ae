"""Sample traces from a tiny mixture-of-experts GPT: tokens, supports, log-probs, routed experts and rewards.

    python recipes/megatron/make_traces.py --folder runs/megatron

writes `runs/megatron/checkpoint` and `runs/megatron/traces`, which `train.py` starts from. An engine would do the same
faster; this needs none. One process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tiny_moe
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

from trl_support_replay.traces import RoutedExperts, SupportRows
from trl_support_replay.traces.columns import Trace, traces_to_table
from trl_support_replay.traces.shards import ShardFolder

SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": None, "seed": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/megatron"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=4, help="per prompt")
    parser.add_argument("--longest", type=int, default=24, help="completion tokens")
    tiny_moe.add_split_arguments(parser)
    args = parser.parse_args()
    device = tiny_moe.initialize(args)
    (model,) = tiny_moe.build_chunks(tiny_moe.build_config(args), device)
    model.eval()
    tiny_moe.save([model], args.folder / "checkpoint")

    generator = torch.Generator().manual_seed(SAMPLING["seed"])
    traces = []
    for _ in range(args.prompts):
        length = int(torch.randint(4, 9, (), generator=generator))
        prompt = torch.randint(2, tiny_moe.VOCAB, (length,), generator=generator)
        traces += [sample(model, prompt, args.longest, generator, device) for _ in range(args.completions)]
    engine = {"name": "megatron-core", "version": "recipes/megatron"}
    table = traces_to_table(traces, model="tiny-moe", sampling=SAMPLING, engine=engine)
    path = ShardFolder(args.folder / "traces").write(table, 0)
    mean = np.mean([len(trace.completion_ids) for trace in traces])
    print(f"{len(traces)} traces of {mean:.1f} tokens on average: {path}")
    torch.distributed.destroy_process_group()


@torch.no_grad()
def sample(
    model: GPTModel, prompt: torch.Tensor, longest: int, generator: torch.Generator, device: torch.device
) -> Trace:
    """One completion, token by token, without a cache: the routes of the last forward are those of every one."""
    ids = prompt.clone()
    supports, logprobs = [], []
    routes: dict[int, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda router, _, out: routes.update(
                {router.layer_number - 1: out[1].nonzero()[:, 1].view(-1, router.topk)}
            )
        )
        for module in model.modules()
        if isinstance(module, TopKRouter)
    ]
    while len(ids) < len(prompt) + longest and (len(ids) == len(prompt) or ids[-1] != tiny_moe.EOS):
        width = len(ids)
        mask = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)[None, None]
        logits = model(ids[None].to(device), torch.arange(width, device=device)[None], mask)[0, -1].float().cpu()
        support = kept(logits / SAMPLING["temperature"])
        inside = torch.log_softmax(logits[support] / SAMPLING["temperature"], dim=0)
        choice = torch.multinomial(inside.exp(), 1, generator=generator)
        ids = torch.cat([ids, support[choice]])
        supports.append(support.int().numpy())
        logprobs.append(inside[choice].item())
    for hook in hooks:
        hook.remove()
    completion = ids[len(prompt) :].int().numpy()
    experts = torch.stack([routes[layer] for layer in sorted(routes)], dim=1).cpu().numpy()
    return Trace(
        prompt_ids=prompt.int().numpy(),
        completion_ids=completion,
        loss_mask=np.ones(len(completion), dtype=bool),
        sampling_logprobs=np.array(logprobs, dtype=np.float32),
        supports=SupportRows.from_ragged(supports),
        # The last token never entered the model.
        routes=RoutedExperts.from_prefix(experts, len(ids), num_experts=tiny_moe.EXPERTS),
        extra={"reward": float(np.mean(completion % 2 == 0))},
    )


def kept(logits: torch.Tensor) -> torch.Tensor:
    """Ids that top-k and top-p leave, most probable first."""
    probs, ids = torch.softmax(logits, dim=0).topk(SAMPLING["top_k"])
    probs = probs / probs.sum()
    return ids[probs.cumsum(0) - probs < SAMPLING["top_p"]]


if __name__ == "__main__":
    main()
