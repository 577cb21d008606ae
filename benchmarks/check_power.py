"""How many batches `replay_check` needs to find a fault in half precision, with real rounding.

    python -m benchmarks.check_power      # 10 minutes on one core; writes data/check_power.csv and a table of docs/

SmolLM2-135M in bfloat16 samples (transformers' `generate`, with its cache, 64 sequences at once) and records. The
policy, in bfloat16 or in float32, then scores the same tokens without a cache in batches of 8 that are padded in
another way. One pool of sequences is sampled; batches of 8 are drawn from it with replacement and shown to the check as
a trainer shows them, so a long run sees the same sequences many times. Faults are put into the policy's scores:

- 5 % of mass lost: scores over more ids than were sampled from, of which the support holds 0.95 on average;
- no replay: scores over the vocabulary;
- temperature +2 %: the engine's is 1.02 times the trainer's;
- one stale step: the policy has made one more AdamW step than the engine, with gradients of a policy-gradient loss;
- records shifted by one.
"""

from __future__ import annotations

import argparse
import copy
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_support_replay.analysis.audit.temperature import logprobs_at_temperature
from trl_support_replay.analysis.audit.token_scores import RecordedTokens, TokenScorer
from trl_support_replay.batch.layout import padded_batch
from trl_support_replay.checks.replay_check import ReplayCheck
from trl_support_replay.cli.demo.model import fetch_smollm2
from trl_support_replay.cli.demo.task import sums
from trl_support_replay.engines.transformers_generate import ScoresRecorder, recording
from trl_support_replay.traces.columns import Trace

from .results import write_rows
from .scorer_report import with_table

DATA = Path(__file__).parent / "data" / "check_power.csv"
PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
START = "<!-- table: python -m benchmarks.check_power -->"
SEQUENCES, GROUP, TOKENS, BATCH = 128, 4, 64, 8
LEARNING_RATES = (1e-6, 1e-5, 3e-5)
HEALTHY_BATCHES, HEALTHY_RUNS, HISTORY = 1000, 5, 100
RUNS, MOST_BATCHES = 50, 100
POLICIES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def base_model(path: Path) -> torch.nn.Module:
    """The model with each weight moved by at most 0.2 %.

    The file is quantized to 4 bits. Many of its weights lie half-way between two bfloat16 numbers, so that the least
    step of training would round all of those differently. No trained weights are like that.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.002 * (2 * torch.rand_like(parameter) - 1))
    return model


def sample(model: torch.nn.Module, path: Path) -> tuple[list[Trace], list[str]]:
    """Completions of the engine, and their texts."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    prompts = [prompt for prompt in sums(SEQUENCES // GROUP)["prompt"] for _ in range(GROUP)]
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    engine, end, traces = copy.deepcopy(model).to(torch.bfloat16), tokenizer.eos_token_id, []
    for start in range(0, SEQUENCES, 64):
        inputs = tokenizer(texts[start : start + 64], return_tensors="pt", padding=True, add_special_tokens=False)
        scores = ScoresRecorder([end])
        with torch.no_grad(), recording(engine, scores):
            output = engine.generate(
                **inputs, do_sample=True, temperature=1.0, top_k=20, top_p=0.9, max_new_tokens=TOKENS
            )
        ids = [
            row[: row.index(end) + 1] if end in row else row for row in output[:, inputs.input_ids.shape[1] :].tolist()
        ]
        for b, (completion, (values, supports)) in enumerate(zip(ids, scores.collect(ids), strict=True)):
            prompt = inputs.input_ids[b][inputs.attention_mask[b].bool()].numpy().astype(np.int32)
            mask = np.ones(len(completion), dtype=bool)
            traces.append(Trace(prompt, np.array(completion, np.int32), mask, values.astype(np.float32), supports))
    return traces, tokenizer.batch_decode([trace.completion_ids for trace in traces])


def step_of_training(model: torch.nn.Module, traces: list[Trace], texts: list[str]) -> list[torch.Tensor]:
    """By how much the third AdamW step at learning rate 1 moves each weight: more than the first, it is not its sign.

    Each step is taken on 8 completions, whose reward is the share of digits in them.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    rewards = np.array([sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]).reshape(-1, GROUP)
    spread = rewards.std(axis=1, keepdims=True)
    advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)).ravel()
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        chosen = range(step * BATCH, (step + 1) * BATCH)
        ids, attention, length = padded_batch([traces[b] for b in chosen])
        ids, attention = torch.from_numpy(ids).long(), torch.from_numpy(attention).long()
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, -length:, None])[..., 0]
        mask = attention[:, -length:]
        mean = (logprobs * mask).sum(dim=1) / mask.sum(dim=1)
        (-mean * torch.tensor(advantages[list(chosen)], dtype=torch.float32)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [(after.detach() - old) / 1e-6 for after, old in zip(model.parameters(), before, strict=True)]


def scores_with_faults(
    model: torch.nn.Module, tokens: RecordedTokens, step: list[torch.Tensor], dtype: torch.dtype
) -> dict[str, np.ndarray]:
    """`[N]` log-probs of the policy for each fault."""

    def score(learning_rate: float):
        policy = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, moved in zip(policy.parameters(), step, strict=True):
                parameter.add_(moved, alpha=learning_rate)
        return TokenScorer(policy.to(dtype), temperature=1.0, batch_size=BATCH).score(tokens)

    healthy = score(0.0)
    low, high = 0.0, 1.0
    for _ in range(40):  # the part of log_mass with which 0.95 is kept on average
        part = (low + high) / 2
        low, high = (part, high) if np.exp(part * healthy.log_mass).mean() > 0.95 else (low, part)
    return {
        "none": healthy.logprobs,
        "5 % of mass lost": healthy.logprobs + low * healthy.log_mass,
        f"no replay ({np.exp(healthy.log_mass).mean():.2f} of mass kept)": healthy.full_logprobs,
        "temperature +2 %": logprobs_at_temperature(tokens, healthy.candidates, 1.0, 1 / 1.02),
        **{f"one stale step at {rate:.0e}": score(rate).logprobs for rate in LEARNING_RATES},
        "records shifted by one": healthy.logprobs,
    }


class Pool:
    """Sequences with the scores of one policy under one fault, shown to a check in batches that are drawn from them."""

    def __init__(
        self, traces: list[Trace], tokens: RecordedTokens, replayed: np.ndarray, shift: bool = False, batch: int = BATCH
    ):
        self._traces, self._rows, self._batch = traces, [], batch
        self._width = max(len(trace.completion_ids) for trace in traces)
        for b, trace in enumerate(traces):
            recorded = np.roll(trace.sampling_logprobs, 1) if shift else trace.sampling_logprobs
            self._rows.append((replayed[tokens.trace == b], recorded))

    def show(self, check: ReplayCheck, rng: np.random.Generator) -> str | None:
        """Draw a batch and show it; what the check says is wrong."""
        chosen = rng.integers(len(self._traces), size=self._batch)
        padded = np.zeros((2, self._batch, self._width))
        mask = torch.zeros(self._batch, self._width, dtype=torch.bool)
        for row, b in enumerate(chosen):
            length = len(self._rows[b][0])
            padded[0, row, :length], padded[1, row, :length] = self._rows[b]
            mask[row, :length] = True
        replayed, recorded = torch.from_numpy(padded)
        return check.look(replayed, recorded, mask, [self._traces[b] for b in chosen]).fault


def new_check() -> ReplayCheck:
    return ReplayCheck(full_precision=False, value=None, gather=lambda tensor: tensor)


def after_history(healthy: Pool, seed: int) -> ReplayCheck:
    """A check that has seen healthy batches."""
    check, rng = new_check(), np.random.default_rng(1000 + seed)
    for _ in range(HISTORY):
        healthy.show(check, rng)
    return check


def batches_needed(faulty: Pool, checks: list[ReplayCheck]) -> list[float]:
    """Batches until the check stops, for each run; infinite where it does not."""
    needed = []
    for seed in range(RUNS):
        check, rng = copy.deepcopy(checks[seed % len(checks)]), np.random.default_rng(seed)
        shown = (batch for batch in range(1, MOST_BATCHES + 1) if faulty.show(check, rng))
        needed.append(next(shown, float("inf")))
    return needed


def measure(traces: list[Trace], tokens: RecordedTokens, scores: dict[str, dict[str, np.ndarray]]) -> list[dict]:
    """A row for each policy, fault and start."""
    rows = []
    for policy, by_fault in scores.items():
        pools = {
            fault: Pool(traces, tokens, replayed, shift="shifted" in fault) for fault, replayed in by_fault.items()
        }
        healthy = pools.pop("none")
        gap = by_fault["none"] - tokens.recorded
        common = {
            "policy": policy,
            "gap_mean": float(f"{np.abs(gap).mean():.3g}"),
            "gap_max": float(f"{np.abs(gap).max():.3g}"),
            "tokens_per_batch": round(len(tokens) * BATCH / len(traces)),
            "pool": len(traces),
            **{name: metadata.version(name) for name in ("torch", "transformers")},
        }
        stops = 0
        for seed in range(HEALTHY_RUNS):
            check, rng = new_check(), np.random.default_rng(seed)
            stops += sum(healthy.show(check, rng) is not None for _ in range(HEALTHY_BATCHES))
        rows.append(common | {"fault": "none", "start": "", "runs": HEALTHY_RUNS, "stops": stops})
        rows[-1] |= {"batches": HEALTHY_BATCHES, "median": "", "nine_of_ten": ""}
        print(f"{policy}: {stops} stops in {HEALTHY_RUNS} healthy runs of {HEALTHY_BATCHES} batches", flush=True)
        histories = [after_history(healthy, seed) for seed in range(HEALTHY_RUNS)]
        for fault, pool in pools.items():
            for start, checks in (("first batch", [new_check()]), (f"after {HISTORY} healthy batches", histories)):
                needed = batches_needed(pool, checks)
                found = {
                    "fault": fault,
                    "start": start,
                    "runs": RUNS,
                    "stops": int(np.isfinite(needed).sum()),
                    "batches": MOST_BATCHES,
                    "median": np.quantile(needed, 0.5, method="higher"),
                    "nine_of_ten": np.quantile(needed, 0.9, method="higher"),
                }
                rows.append(common | found)
                print(f"{policy}: {fault}, {start}: {found['stops']} of {RUNS} runs stop, median {found['median']:g}")
    return rows


def table(rows: list[dict]) -> str:
    """Markdown: for each fault the batches that half and nine in ten of the runs need."""
    policies = list(POLICIES)
    lines = [
        "| fault | from | " + " | ".join(f"{policy} policy" for policy in policies) + " |",
        "|---|---|" + "---|" * len(policies),
    ]
    by_case: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        by_case.setdefault((row["fault"].split(" (")[0], row["start"]), {})[row["policy"]] = row
    for (fault, start), of in by_case.items():
        if fault == "none":
            cells = [f"{of[p]['stops']} stops in {of[p]['runs']} × {int(of[p]['batches']):,}" for p in policies]
        else:
            cells = [_needed(of[policy]) for policy in policies]
        lines.append(f"| {fault} | {start} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _needed(row: dict) -> str:
    most = int(row["batches"])
    median, nine = (float(row[name]) for name in ("median", "nine_of_ten"))
    if median > most:
        return f"{row['stops']} of {row['runs']} runs stop within {most}"
    return f"{median:.0f} ({nine:.0f})" if nine <= most else f"{median:.0f} (more than {most})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument(
        "--keep", type=Path, help="file for the sampled and scored pool, which a later run takes from it"
    )
    args = parser.parse_args()
    if args.keep and args.keep.exists():
        traces, scores = torch.load(args.keep, weights_only=False)
        tokens = RecordedTokens.of(traces)
    else:
        path = fetch_smollm2(args.model)
        model = base_model(path)
        traces, texts = sample(model, path)
        tokens = RecordedTokens.of(traces)
        print(f"{len(tokens)} tokens sampled", flush=True)
        step = step_of_training(model, traces, texts)
        scores = {name: scores_with_faults(model, tokens, step, dtype) for name, dtype in POLICIES.items()}
        if args.keep:
            torch.save((traces, scores), args.keep)
    rows = measure(traces, tokens, scores)
    write_rows(DATA, rows, list(rows[-1]))
    PAGE.write_text(with_table(PAGE.read_text(), table(rows), START))
    print(f"written: {DATA}, {PAGE}")


if __name__ == "__main__":
    main()
