"""What does replay do to training, against stock TRL with and without its importance correction?

    python -m benchmarks.learning train --model models/SmolLM2-135M-Instruct --steps 10 --seeds 0 1 2
    python -m benchmarks.learning report   # writes benchmarks/data/learning{,_sequences}.csv, docs/figures/learning.png

The same model, prompts, seeds and settings (`SETTINGS`) for three variants; only the scores differ:

- `replay`: SupportReplayGRPOTrainer.
- `stock`: TRL's GRPOTrainer as it comes, which weights a sequence by exp(its score over the vocabulary - recorded).
- `uncorrected`: the same with vllm_importance_sampling_correction=False.

`train` makes one run after the other, seed by seed, with one engine for all, and keeps each as a file when it is whole;
started again, it goes on with what is missing. The task: describe a subject in two sentences, with a reward for plain
words, which every completion has some of. Short completions earn less, or the best answer would be a single word.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import trl.generation.vllm_generation as trl_vllm
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer
from trl_support_replay.engines.vllm_engine import choose_capture, stock_engine_fixes
from trl_support_replay.libraries.rebind import rebound
from trl_support_replay.settings.contract import SamplingSettings

HERE = Path(__file__).parent
FIGURE = HERE.parent / "docs" / "figures" / "learning.png"
VARIANTS = {
    "replay": ("support replay", "#1b6ca8"),
    "stock": ("stock TRL", "#c8553d"),
    "uncorrected": ("stock TRL, no correction", "#7a7a7a"),
}
SETTINGS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 20,
    "top_p": 0.9,
    "max_completion_length": 80,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "beta": 0.0,
    "loss_type": "dr_grpo",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_vllm": True,
    "vllm_max_model_length": 160,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
SUBJECTS = [
    *("the sea", "a rainy day", "bread", "a fox in the snow", "the moon", "an old house", "a train ride", "winter"),
    *("a garden", "the desert", "a lost key", "the night sky", "a small town", "music", "a river", "the first snow"),
]
FEWEST_WORDS = 30
STEP_FIELDS = (
    "variant",
    "seed",
    "step",
    "reward",
    "reward_std",
    "ratio_mean",
    "entropy",
    "length",
    "ended",
    "grad_norm",
)
SEQUENCE_FIELDS = ("variant", "seed", "step", "tokens", "log_ratio", "reward")


def subjects() -> Dataset:
    system = {"role": "system", "content": "You write plainly."}
    asked = [{"role": "user", "content": f"Describe {subject} in two sentences."} for subject in SUBJECTS]
    prompts = [[system, message] for message in asked]
    return Dataset.from_dict({"prompt": prompts * 16})


def plain_words(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Words of at most four letters, as a share of all words or of `FEWEST_WORDS`, whichever is more."""
    rewards = []
    for completion in completions:
        words = completion[0]["content"].split()
        plain = sum(len(word.strip(".,;:!?\"'()")) <= 4 for word in words)
        rewards.append(plain / max(len(words), FEWEST_WORDS))
    return rewards


def watched(base: type) -> Any:
    """A subclass that notes each sequence's raw ratio and reward; the training is untouched."""

    class Watched(base):  # type: ignore[misc]
        sequences: list[tuple[int, float, float]]
        rewards: list[float]

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            found = super()._calculate_rewards(*args, **kwargs)
            self.rewards = found.nansum(dim=1).tolist()
            return found

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            mask = output["completion_mask"]
            # Without correction TRL does not score the old policy.
            recorded = output["sampling_per_token_logps"]
            old = output.get("old_per_token_logps", torch.full_like(recorded, float("nan")))
            log_ratios = ((old - recorded).double() * mask).sum(dim=1)
            self.sequences = list(zip(mask.sum(dim=1).tolist(), log_ratios.tolist(), self.rewards, strict=True))
            return output

    Watched.__name__ = base.__name__
    return Watched


class Rows(TrainerCallback):
    """Keeps what the report needs of each step."""

    def __init__(self, variant: str, seed: int):
        self.trainer: Any = None
        self.key = {"variant": variant, "seed": seed}
        self.steps: list[dict[str, Any]] = []
        self.sequences: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "reward" not in logs:
            return
        key = self.key | {"step": state.global_step}
        found = self.trainer.sequences
        step = {
            "reward": logs["reward"],
            "reward_std": logs["reward_std"],
            "ratio_mean": statistics.fmean(float(torch.tensor(log_ratio).exp()) for _, log_ratio, _ in found),
            "entropy": logs["entropy"],
            "length": logs["completions/mean_length"],
            "ended": 1 - logs["completions/clipped_ratio"],
            "grad_norm": logs["grad_norm"],
        }
        self.steps.append(key | {name: f"{float(value):.6g}" for name, value in step.items()})
        self.sequences += [
            key | {"tokens": int(n), "log_ratio": f"{ratio:.6g}", "reward": f"{reward:.6g}"}
            for n, ratio, reward in found
        ]
        print({**key, **{k: self.steps[-1][k] for k in ("reward", "ratio_mean", "entropy", "length")}}, flush=True)


@contextmanager
def one_engine() -> Iterator[None]:
    """While the block runs, trainers share one engine; each loads its own weights into it before it samples.

    It has the arguments that replay needs, whichever variant comes first.
    """
    build, engines = trl_vllm.LLM, []
    replays: dict[str, Any] = {"max_logprobs": 64}
    if choose_capture("auto", SamplingSettings()) == "native":
        replays["return_sampling_mask"] = True

    def shared(**kwargs: Any) -> Any:
        if not engines:
            engines.append(build(**kwargs | replays))
        engines[0].reset_prefix_cache()
        return engines[0]

    with rebound(trl_vllm, LLM=shared):
        yield


def train(variant: str, seed: int, model: str, steps: int, output: Path) -> tuple[list, list]:
    """One run; rows of its steps and of its sequences."""
    common = SETTINGS | {
        "output_dir": str(output / "trainer"),
        "max_steps": steps,
        "seed": seed,
        "use_cpu": not torch.cuda.is_available(),
    }
    rows = Rows(variant, seed)
    if variant == "replay":
        # The entropy of the vocabulary, to compare with stock's.
        args: Any = SupportReplayGRPOConfig(**common, entropy_scope="full")
        base, engine = SupportReplayGRPOTrainer, nullcontext()
    else:
        args = GRPOConfig(**common, vllm_importance_sampling_correction=variant == "stock")
        base, engine = GRPOTrainer, stock_engine_fixes()
    with engine:
        trainer = watched(base)(model, plain_words, args, train_dataset=subjects(), callbacks=[rows])
    rows.trainer = trainer
    # The engine draws from this process's generator: with the same seed, all variants start with the same completions.
    transformers.set_seed(seed)
    trainer.train()
    return rows.steps, rows.sequences


def train_all(args: argparse.Namespace) -> None:
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    with one_engine():
        for seed in args.seeds:
            for variant in args.variants:
                targets = [folder / f"{kind}-{variant}-{seed}-{args.steps}.csv" for kind in ("steps", "sequences")]
                if all(target.exists() for target in targets):
                    continue
                started = time.perf_counter()
                steps, sequences = train(variant, seed, args.model, args.steps, folder)
                gc.collect()
                print(f"{variant}, seed {seed}: {time.perf_counter() - started:.0f} s", flush=True)
                write(targets[1], SEQUENCE_FIELDS, sequences)
                write(targets[0], STEP_FIELDS, steps)


def write(target: Path, fields: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Whole or not at all."""
    partial = target.with_suffix(".partial")
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, target)


def read(paths: list[Path]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in paths:
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                whole = {k: int(row[k]) for k in ("seed", "step", "tokens") if k in row}
                rows.append({k: v if k == "variant" else float(v) for k, v in row.items()} | whole)
    return rows


def report(args: argparse.Namespace) -> None:
    """Gather the whole runs of the seeds that every variant has; a table, data and a picture."""
    folder, machine = Path(args.output), machine_columns()
    seeds = [s for s in args.seeds if all((folder / f"steps-{v}-{s}-{args.steps}.csv").exists() for v in VARIANTS)]
    gathered = {}
    for kind, name in (("steps", "learning.csv"), ("sequences", "learning_sequences.csv")):
        rows = gathered[kind] = read([folder / f"{kind}-{v}-{s}-{args.steps}.csv" for s in seeds for v in VARIANTS])
        extra = machine if kind == "steps" else {}
        fields = STEP_FIELDS if kind == "steps" else SEQUENCE_FIELDS
        write(HERE / "data" / name, (*fields, *extra), [row | extra for row in rows])
    print_summary(gathered["steps"], gathered["sequences"])
    plot(gathered["steps"], gathered["sequences"])


def machine_columns() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "cpu": platform.machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
    }


def of(rows: list[dict[str, Any]], variant: str, last: int | None = None) -> list[dict[str, Any]]:
    """Rows of a variant; of its first (`last` below 0: its last) so many steps."""
    rows = [row for row in rows if row["variant"] == variant]
    if last is None or not rows:
        return rows
    most = max(row["step"] for row in rows)
    return [row for row in rows if (row["step"] <= last if last > 0 else row["step"] > most + last)]


def spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds; a dash for what was not scored."""
    if any(value != value for value in values):
        return "–"
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f}"


def by_seed(rows: list[dict[str, Any]], name: str) -> list[float]:
    seeds = sorted({row["seed"] for row in rows})
    return [statistics.fmean(row[name] for row in rows if row["seed"] == seed) for seed in seeds]


def effective(sequences: list[dict[str, Any]], variant: str) -> float:
    """Sequences of a batch that count, (sum w)^2 / sum w^2 of their ratios; mean over batches."""
    batches: dict[tuple, list[float]] = {}
    for row in of(sequences, variant):
        batches.setdefault((row["seed"], row["step"]), []).append(math.exp(row["log_ratio"]))
    return statistics.fmean(sum(w) ** 2 / sum(x * x for x in w) for w in batches.values())


def with_length(sequences: list[dict[str, Any]], variant: str) -> float:
    """Correlation of a sequence's log ratio with its length."""
    rows = of(sequences, variant)
    ratios = [row["log_ratio"] for row in rows]
    if any(ratio != ratio for ratio in ratios):
        return math.nan
    return statistics.correlation([row["tokens"] for row in rows], ratios)


def figure(value: float) -> str:
    return "–" if value != value else f"{value:.2f}"


def print_summary(steps: list[dict[str, Any]], sequences: list[dict[str, Any]]) -> None:
    """Mean over steps, then mean ± standard deviation over seeds; Markdown."""
    quarter = max(1, int(max(row["step"] for row in steps)) // 4)
    columns = [
        ("reward, first steps", lambda v: spread(by_seed(of(steps, v, quarter), "reward"))),
        ("reward, last steps", lambda v: spread(by_seed(of(steps, v, -quarter), "reward"))),
        ("entropy, first steps", lambda v: spread(by_seed(of(steps, v, quarter), "entropy"))),
        ("entropy, last steps", lambda v: spread(by_seed(of(steps, v, -quarter), "entropy"))),
        ("length, last steps", lambda v: spread(by_seed(of(steps, v, -quarter), "length"))),
        ("ratio", lambda v: spread(by_seed(of(steps, v), "ratio_mean"))),
        ("median log ratio", lambda v: figure(statistics.median(row["log_ratio"] for row in of(sequences, v)))),
        ("sequences that count", lambda v: figure(effective(sequences, v))),
        ("log ratio with length", lambda v: figure(with_length(sequences, v))),
        ("gradient norm", lambda v: f"{statistics.median(row['grad_norm'] for row in of(steps, v)):.2g}"),
    ]
    print("| variant | seeds | " + " | ".join(name for name, _ in columns) + " |")
    print("| --- | --- | " + " | ".join("---" for _ in columns) + " |")
    for variant in VARIANTS:
        if rows := of(steps, variant):
            seeds = len({row["seed"] for row in rows})
            print(f"| {variant} | {seeds} | " + " | ".join(cell(variant) for _, cell in columns) + " |")


def plot(steps: list[dict[str, Any]], sequences: list[dict[str, Any]]) -> None:
    """Reward, ratio, entropy and length over steps (mean and range over seeds), and each sequence's ratio by length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [("reward", "reward"), ("ratio_mean", "mean importance ratio"), ("entropy", "entropy (nats)")]
    panels += [("length", "mean completion length")]
    figure, axes = plt.subplots(1, 5, figsize=(19, 3.8), layout="constrained")
    for axis, (name, title) in zip(axes, panels, strict=False):
        for variant, (label, colour) in VARIANTS.items():
            rows = of(steps, variant)
            at = sorted({row["step"] for row in rows})
            values = [[row[name] for row in rows if row["step"] == step] for step in at]
            if any(value != value for at_step in values for value in at_step):
                continue  # not scored
            axis.plot(at, [statistics.fmean(v) for v in values], color=colour, label=label)
            axis.fill_between(at, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0)
        axis.set_title(title, fontsize=10)
        axis.set_yscale("log" if name == "ratio_mean" else "linear")
        axis.set_xlabel("optimizer step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False, fontsize=8)
    for variant in ("stock", "replay"):
        label, colour = VARIANTS[variant]
        rows = of(sequences, variant)
        axes[4].scatter([r["tokens"] for r in rows], [r["log_ratio"] for r in rows], s=7, color=colour, alpha=0.5)
    axes[4].set_title("log ratio of each sequence", fontsize=10)
    axes[4].set_xlabel("sampled tokens")
    for axis in axes:
        axis.grid(alpha=0.3)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "report"])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", default="runs/learning", help="folder of the runs (default: %(default)s)")
    args = parser.parse_args()
    {"train": train_all, "report": report}[args.command](args)


if __name__ == "__main__":
    main()
