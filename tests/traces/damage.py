"""Damages saved traces in many ways and reads them back by every path of this package.

    python -m tests.traces.damage --number 500      # prints a table; exits with 1 when damage passed in silence

Each copy of a folder of shards, or of a dataset written by `save_to_disk`, has one file damaged. It then goes through
the paths of its layout. An outcome is good when the path gives back what was saved, or raises an error of this package.
Errors of `datasets` count apart where a user calls it, as no code of ours is on the way.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
from transformers import AutoConfig

from trl_support_replay.cli.grpo_inputs.datasets import load_splits
from trl_support_replay.cli.main import main as command
from trl_support_replay.rollouts.offline import OfflineTraces
from trl_support_replay.traces.columns import Trace, TraceSchemaError, traces_to_table
from trl_support_replay.traces.reading import trace_tables, traces_of
from trl_support_replay.traces.routes import RoutedExperts
from trl_support_replay.traces.shards import ShardFolder
from trl_support_replay.traces.support import SupportRows
from trl_support_replay.traces.survey import survey_traces

VOCABULARY = 99
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": 3}
GOOD = ("identical", "our error", "error of datasets", "told: reward differs", "other columns differ")
OUTCOMES = (*GOOD, "SILENT", "BARE")


class RefusedByDatasets(Exception):
    """`datasets`, called as a user calls it, would not load the files."""


def make_traces(rng: np.random.Generator, routed: bool) -> list[Trace]:
    """Two groups of two completions, with a reward and columns of a dataset; most bytes are supports and log-probs."""
    traces = []
    for group in range(2):
        prompt = rng.integers(3, VOCABULARY, 6).astype(np.int32)
        for i in range(2):
            num = int(rng.integers(60, 120))
            rows = [rng.choice(VOCABULARY, int(rng.integers(1, 20)), replace=False) for _ in range(num)]
            ids = np.array([row[0] for row in rows], np.int32)
            routes = None
            if routed:
                experts = np.stack([[rng.permutation(8)[:2] for _ in range(2)] for _ in range(6 + num)])
                routes = RoutedExperts(experts, num_experts=8, layers=(1, 2))
            extra = {
                "prompt": [{"role": "user", "content": f"question {group}"}],
                "answer": f"answer {group}",
                "reward": float(rng.random()),
                "step": i,
            }
            logprobs = -rng.random(num, np.float32)
            rows = SupportRows.from_ragged(rows)
            traces.append(Trace(prompt, ids, np.ones(num, bool), logprobs, rows, routes, extra))
    return traces


def make_originals(folder: Path, model: str) -> dict[str, Path]:
    """Whole traces of each layout: `shards`, `routed` shards, `saved` (a dataset on disk), `captured`."""
    found = {name: folder / name for name in ("shards", "routed", "saved", "captured")}
    for name in ("shards", "routed"):
        shards = ShardFolder(found[name])
        for number in range(2):
            traces = make_traces(np.random.default_rng(number), name == "routed")
            engine = {"name": "transformers", "version": "5"}
            shards.write(traces_to_table(traces, model="m", sampling=SAMPLING, engine=engine), number)
    files = [str(path) for path in ShardFolder(found["shards"]).shards()]
    cache = str(folder / "cache")
    whole = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    whole.save_to_disk(str(found["saved"]), num_shards=2)
    (folder / "prompts.jsonl").write_text("\n".join(f'{{"prompt": "question {i}"}}' for i in range(4)))
    run("capture", *capture_options(folder / "prompts.jsonl", model, found["captured"]))
    return found


def capture_options(prompts: Path, model: str, output: Path) -> list[str]:
    sampling = ["--top_p", "0.9", "--max_tokens", "8", "--batch_size", "2", "--num_generations", "2"]
    return ["--model", model, "--dataset", str(prompts), "--output", str(output), *sampling]


# ------------------------------------------------------------------------------------------------------------- damage


def flip(rng: np.random.Generator, body: bytes) -> bytes:
    damaged = bytearray(body)
    damaged[int(rng.integers(len(body)))] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def flip_three(rng: np.random.Generator, body: bytes) -> bytes:
    return flip(rng, flip(rng, flip(rng, body)))


def cut(rng: np.random.Generator, body: bytes) -> bytes:
    return body[: int(rng.integers(len(body)))]


def zero(rng: np.random.Generator, body: bytes) -> bytes:
    start = int(rng.integers(len(body)))
    length = min(int(rng.integers(1, 600)), len(body) - start)
    return body[:start] + bytes(length) + body[start + length :]


def overwrite(rng: np.random.Generator, body: bytes) -> bytes:
    start = int(rng.integers(len(body)))
    length = min(int(rng.integers(1, 600)), len(body) - start)
    return body[:start] + rng.bytes(length) + body[start + length :]


KINDS: dict[str, Callable[[np.random.Generator, bytes], bytes] | None] = {
    "bit flip": flip,
    "three flips": flip_three,
    "cut off": cut,
    "zeroed": zero,
    "overwritten": overwrite,
    "swapped": None,
}


def damage(rng: np.random.Generator, folder: Path, kind: str) -> None:
    """Damage one data file of a folder, or its metadata, or swap two data files."""
    data = sorted(p for p in folder.iterdir() if p.suffix in (".parquet", ".arrow"))
    change = KINDS[kind]
    if change is None:
        first, second = (data[i].read_bytes() for i in rng.permutation(len(data))[:2])
        data[0].write_bytes(second if data[0].read_bytes() == first else first)
        data[1].write_bytes(first if data[1].read_bytes() == second else second)
        return
    files = sorted(p for p in folder.iterdir() if p.is_file()) if rng.random() < 0.3 else data
    target = files[int(rng.integers(len(files)))]
    target.write_bytes(change(rng, target.read_bytes()))


# -------------------------------------------------------------------------------------------------------------- paths


def content(trace: Trace) -> tuple:
    """What decides a trace's numbers, comparable."""
    routes = trace.routes
    return (
        trace.prompt_ids.tobytes(),
        trace.completion_ids.tobytes(),
        trace.loss_mask.tobytes(),
        trace.sampling_logprobs.tobytes(),
        trace.supports.offsets.tobytes(),
        trace.supports.token_ids.tobytes(),
        None if routes is None else (routes.experts.tobytes(), routes.captured.tobytes(), routes.layers),
    )


def read(folder: Path) -> list[Trace]:
    return [trace for name, table in trace_tables(folder) for trace in traces_of(name, table)]


def offline(dataset: Any, model: str) -> list[Trace]:
    """The traces that a trainer would train on."""
    args = SimpleNamespace(use_vllm=False, temperature=1.0, top_p=0.9, top_k=0, min_p=None, num_generations=2)
    groups = OfflineTraces(dataset, args, AutoConfig.from_pretrained(model)).groups
    return [trace for group in groups for trace in group]


def train_on_parquet(folder: Path, work: Path, model: str) -> list[Trace]:
    files = [str(p) for p in sorted(folder.glob("*.parquet"))]
    try:
        dataset = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(work / "cache"))
    except Exception as error:
        raise RefusedByDatasets from error
    return offline(dataset, model)


def train_on_saved(folder: Path, work: Path, model: str) -> list[Trace]:
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise RefusedByDatasets from error
    return offline(dataset, model)


def train_by_command(folder: Path, work: Path, model: str) -> list[Trace]:
    splits, _ = load_splits(SimpleNamespace(dataset_name=str(folder)), SimpleNamespace(datasets=None))
    return offline(splits["train"], model)


class CommandFailed(Exception):
    """A command that ended with a message of ours."""


def run(*argv: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = command([*argv])
    if code:
        raise CommandFailed


def inspect(folder: Path, work: Path, model: str) -> list[Trace]:
    run("inspect", "--traces", str(folder))
    return read(folder)


def score(folder: Path, work: Path, model: str) -> list[Trace]:
    run("score", "--traces", str(folder), "--model", model, "--output", str(work / "scored"))
    return read(work / "scored")


def score_again(folder: Path, work: Path, model: str) -> list[Trace]:
    """Damage in what was scored already, found when scoring goes on."""
    run("score", "--traces", str(folder), "--model", model, "--output", str(work / "scored"))
    scored = work / "scored"
    damage(np.random.default_rng(len(list(work.iterdir()))), scored, "bit flip")
    run("score", "--traces", str(folder), "--model", model, "--output", str(scored))
    return read(scored)


def audit(folder: Path, work: Path, model: str) -> list[Trace]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = command(["audit", "--traces", str(folder), "--model", model, "--output", str(work / "audit")])
    if code == 2:  # 1 is a finding, and random log-probs are one
        raise CommandFailed
    return read(folder)


def push(folder: Path, work: Path, model: str) -> list[Trace]:
    # All that `push` reads, before it uploads the files as they are.
    if problems := survey_traces(folder).problems:
        raise TraceSchemaError(problems[0])
    return read(folder)


def go_on_capturing(folder: Path, work: Path, model: str) -> list[Trace]:
    prompts = work / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"prompt": "question {i}"}}' for i in range(4)))
    # The record of a capture names its dataset.
    record = folder / "capture.json"
    if record.is_file():
        text = record.read_bytes().decode(errors="surrogateescape")
        where = str(folder.parent.parent / "originals" / "prompts.jsonl")
        record.write_bytes(text.replace(where, str(prompts)).encode(errors="surrogateescape"))
    run("capture", *capture_options(prompts, model, folder))
    return read(folder)


ON_SHARDS = {
    "trace_tables": lambda folder, work, model: read(folder),
    "trainer, load_dataset": train_on_parquet,
    "grpo --dataset_name": train_by_command,
    "inspect": inspect,
    "push": push,
}
ON_SAVED = {
    "trace_tables": ON_SHARDS["trace_tables"],
    "trainer, load_from_disk": train_on_saved,
    "grpo --dataset_name": train_by_command,
    "inspect": inspect,
}
WITH_A_MODEL = {"score": score, "audit": audit, "score, gone on": score_again}
PATHS: dict[str, dict[str, Callable[[Path, Path, str], list[Trace]]]] = {
    "shards": ON_SHARDS | WITH_A_MODEL,
    "routed": ON_SHARDS,
    "saved": ON_SAVED | {"score": score, "audit": audit},
    "captured": {"capture, gone on": go_on_capturing},
}


@contextlib.contextmanager
def rewards_told() -> Iterator[list[str]]:
    """Warnings of rewards that differ from their digest."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trl_support_replay.traces.digest")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def outcome(path: Callable, folder: Path, work: Path, model: str, original: list[Trace]) -> tuple[str, str]:
    """What a path made of a damaged folder, and the error it raised."""
    with rewards_told() as told:
        try:
            found = path(folder, work, model)
        except RefusedByDatasets as error:
            return "error of datasets", repr(error.__cause__)
        except CommandFailed:
            return "our error", ""
        except Exception as error:
            ours = type(error).__module__.startswith("trl_support_replay.")
            return "our error" if ours else "BARE", f"{type(error).__name__}: {error}"
    if Counter(map(content, found)) != Counter(map(content, original)):
        return "SILENT", "tokens, log-probs, supports or routes"
    rewards = [Counter(repr(t.extra.get("reward")) for t in traces) for traces in (found, original)]
    if rewards[0] != rewards[1]:
        return ("told: reward differs" if any("reward" in t for t in told) else "SILENT"), "reward"
    names = original[0].extra
    others = [Counter(repr([t.extra.get(name) for name in names]) for t in traces) for traces in (found, original)]
    return ("identical", "") if others[0] == others[1] else ("other columns differ", "")


def fuzz(number: int, seed: int, model: str, folder: Path, models_every: int = 5) -> list[dict[str, str]]:
    """One row for each path that each of `number` damaged folders was read by.

    Args:
        number: damaged folders.
        seed: decides all of them.
        model: folder of a causal language model with `VOCABULARY` tokens.
        folder: an empty one to work in.
        models_every: how often the paths that load a model are taken.
    """
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    originals = make_originals(folder / "originals", model)
    whole = {layout: read(place) for layout, place in originals.items()}
    rng = np.random.default_rng(seed)
    layouts = ["shards", "saved", "shards", "saved", "routed", "captured"]
    rows = []
    for i in range(number):
        layout = layouts[i % len(layouts)]
        kind = list(KINDS)[i // len(layouts) % len(KINDS)]
        damaged = folder / str(i) / "traces"
        shutil.copytree(originals[layout], damaged)
        damage(rng, damaged, kind)
        for name, path in PATHS[layout].items():
            if name in WITH_A_MODEL and (i // len(layouts) + len(name)) % models_every:
                continue
            work = folder / str(i) / name.replace(" ", "_")
            work.mkdir()
            found, error = outcome(path, damaged, work, model, whole[layout])
            rows.append({"layout": layout, "kind": kind, "path": name, "outcome": found, "error": error})
        shutil.rmtree(folder / str(i))
    return rows


def table(rows: list[dict[str, str]]) -> str:
    """Counts of outcomes by layout and path, and by kind of damage."""
    lines = [f"{'':34}" + "".join(f"{name:>22}" for name in OUTCOMES)]
    for keys in (("layout", "path"), ("kind",)):
        for group in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
            counts = Counter(row["outcome"] for row in rows if tuple(row[key] for key in keys) == group)
            lines.append(f"{', '.join(group):34}" + "".join(f"{counts[name]:22d}" for name in OUTCOMES))
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", required=True, help=f"folder of a language model with {VOCABULARY} tokens")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = fuzz(args.number, args.seed, args.model, Path(folder))
    print(table(rows))
    bad = [row for row in rows if row["outcome"] not in GOOD]
    for row in bad:
        print(row)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
