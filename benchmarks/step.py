"""How long does a whole training step take with replay, beside TRL's own?

    python -m benchmarks.step                     # about ten minutes; writes data/step.csv
    python -m benchmarks.step --cases chars       # one case
    python -m benchmarks.step --device cuda --bf16

Both trainers live in one process and take steps in turns, so that whatever else the machine does meets both alike. A
step is all that TRL's `train` does for one: generation by transformers, rewards, the log-probs of the old policy, loss,
backward, and the optimizer. The scoring is TRL's default: `beta=0`, and old log-probs wherever supports are recorded.
The ratio is that of one pair of steps, replay over stock. The table has its median and quartiles, of the processor time
of all threads; on a GPU, of the time until the device has finished. `train_ratio` is the same without the time of
generation, which takes most of a step on a CPU: what an engine with its own way of recording leaves.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

DATA = Path(__file__).parent / "data" / "step.csv"
PROMPTS, GENERATIONS = 2, 4


@dataclass(frozen=True)
class Case:
    """A model and how its tokens are sampled.

    Attributes:
        sampling: settings that cut the distribution.
        spread: standard deviation of the logits of the first step, about; 0.5 is nearly flat.
        tokens: length of each completion.
    """

    vocab: int
    sampling: dict[str, Any] = field(hash=False)
    spread: float
    tokens: int = 64
    hidden: int = 256
    layers: int = 4


CASES = {
    "chars": Case(99, {"top_p": 0.9}, spread=2.0),
    "top_k 50": Case(49_152, {"top_k": 50}, spread=2.0),
    "wide": Case(49_152, {"top_k": 16_000}, spread=0.5, tokens=32),
}


def save_model(case: Case, folder: Path) -> str:
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(case.vocab - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=4 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=case.spread / case.hidden**0.5)
    model.save_pretrained(folder)
    return str(folder)


def even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


class Stepper:
    """A trainer whose steps are taken one by one."""

    def __init__(self, trainer_class: Any, config_class: Any, model: str, case: Case, folder: Path, **how: Any):
        args = config_class(
            output_dir=str(folder),
            **how,
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=case.tokens,
            generation_kwargs={"min_new_tokens": case.tokens},
            learning_rate=1e-6,
            max_steps=1000,
            gradient_checkpointing=False,
            **case.sampling,
        )
        rows = Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(64)]})
        self._trainer = trainer_class(model, even_ids, args, train_dataset=rows)
        self._batches = iter(self._trainer.get_train_dataloader())
        self._trainer.create_optimizer_and_scheduler(1000)
        self._trainer.current_gradient_accumulation_steps = 1
        self._trainer.model_wrapped = self._trainer.accelerator.prepare(self._trainer.model)
        self._trainer.model.train()
        self._generating, generate = 0.0, self._trainer._generate
        self._on_cpu = how["use_cpu"]

        def timed_generate(*args: Any) -> Any:
            start = self._now()
            try:
                return generate(*args)
            finally:
                self._generating += self._now() - start

        self._trainer._generate = timed_generate

    def _now(self) -> float:
        if self._on_cpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> tuple[float, float]:
        """Seconds of a whole step, and of what comes after generation."""
        trainer, batch = self._trainer, next(self._batches)
        start, self._generating = self._now(), 0.0
        trainer.training_step(trainer.model_wrapped, batch, None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        trainer.state.global_step += 1
        whole = self._now() - start
        return whole, whole - self._generating


def measure(case: Case, steps: int, name: str, device: str, bf16: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        model = save_model(case, Path(temporary) / "model")
        variants = {
            "replay": (SupportReplayGRPOTrainer, SupportReplayGRPOConfig),
            "stock": (GRPOTrainer, GRPOConfig),
        }
        steppers = {
            key: Stepper(*classes, model, case, Path(temporary) / key, use_cpu=device == "cpu", bf16=bf16)
            for key, classes in variants.items()
        }
        times: dict[str, list[tuple[float, float]]] = {key: [] for key in steppers}
        for i in track(range(steps + 2), description=name, transient=True):
            for key in sorted(steppers, reverse=i % 2 == 0):
                times[key].append(steppers[key].step())
    pairs = list(zip(times["replay"][2:], times["stock"][2:], strict=True))
    ratios = {key: statistics.quantiles([a[i] / b[i] for a, b in pairs], n=4) for i, key in enumerate(("", "train_"))}
    seconds = {key: statistics.median(x[0] for x in values[2:]) for key, values in times.items()}
    return {
        "case": name,
        "vocabulary": case.vocab,
        "sampling": " ".join(f"{key}={value}" for key, value in case.sampling.items()),
        "tokens": PROMPTS * GENERATIONS * case.tokens,
        "steps": steps,
        **{
            f"{key}{name}": f"{value:.3f}"
            for key, values in ratios.items()
            for name, value in zip(("ratio_q1", "ratio", "ratio_q3"), values, strict=True)
        },
        "replay_s": f"{seconds['replay']:.3f}",
        "stock_s": f"{seconds['stock']:.3f}",
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "bf16": bf16,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=24, help="steps of each trainer that count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16, as TRL does by default")
    parser.add_argument("--output", type=Path, default=DATA)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.cases:
        rows.append(measure(CASES[name], args.steps, name, args.device, args.bf16))
        print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
