"""Sample completions of a dataset's prompts and save their traces.

Prompts in, a traces dataset out: tokens, log-probs and the sampling support of every token. Stopped at any moment, it
goes on where it was, and ends with the same traces as a run that was not stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cli import CommandError

_ENGINES = ("transformers", "vllm", "vllm-server", "sglang")


def main(argv: Sequence[str]) -> int:
    """Write one shard of traces a batch of prompts."""
    parser = argparse.ArgumentParser(
        prog="trl-support-replay capture",
        description=__doc__,
        epilog="example: trl-support-replay capture --model Qwen/Qwen3-0.6B --dataset trl-lib/DeepMath-103K \\\n"
        "    --engine vllm --top_k 20 --top_p 0.95 --num_generations 8 --output runs/traces",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="model to sample from: a folder or a Hub name")
    parser.add_argument(
        "--dataset",
        required=True,
        help="prompts: a .jsonl, .json or .parquet file, a dataset saved to disk, or a Hub name; its `prompt` column "
        "holds text or messages",
    )
    parser.add_argument("--split", default="train", help="split of a Hub dataset (default: %(default)s)")
    parser.add_argument("--output", required=True, help="folder for the traces")
    parser.add_argument("--engine", choices=_ENGINES, default="transformers", help="(default: %(default)s)")
    parser.add_argument(
        "--server_url",
        nargs="+",
        default=[],
        metavar="URL",
        help="servers that are up, for --engine vllm-server and sglang; --model then names their tokenizer",
    )
    parser.add_argument("--num_generations", type=int, default=1, help="completions a prompt (default: %(default)s)")
    parser.add_argument("--max_tokens", type=int, default=256, help="longest completion (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 is off (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=0, help="0 is off; vLLM needs one (default: %(default)s)")
    parser.add_argument("--min_p", type=float, default=0.0, help="0 is off (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="prompts a shard (default: %(default)s)")
    parser.add_argument("--limit", type=int, help="only the first so many prompts")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="data type of the model (default: %(default)s)")
    parser.add_argument("--engine_kwargs", type=json.loads, default={}, help="JSON with further arguments of vllm.LLM")
    args = parser.parse_args(argv)
    if (args.engine in ("vllm-server", "sglang")) != bool(args.server_url):
        raise CommandError(
            f"--engine {args.engine} and --server_url {' '.join(args.server_url) or '(none)'} do not fit."
        )

    from dataclasses import replace

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers import AutoTokenizer

    from ..traces.columns import traces_to_table
    from ..traces.shards import ShardFolder

    settings = _settings(args)
    rows = _prompts(args)
    folder = ShardFolder(args.output)
    _same_capture(folder.path / "capture.json", args)
    folder.discard_from(1 + len(rows))  # only what a killed run left half done
    done = {int(path.name[7:15]) for path in folder.shards()}
    batches = [rows[start : start + args.batch_size] for start in range(0, len(rows), args.batch_size)]
    left = [i for i in range(len(batches)) if i not in done]
    if done:
        print(f"{len(done)} of {len(batches)} shards are there already")
    if not left:
        print(f"traces: {folder.path}")
        return 0
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    generator = _generator(args, settings)
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k,
                "min_p": settings.min_p, "seed": args.seed}  # fmt: skip
    bar = (TextColumn("capturing"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"), TimeRemainingColumn())
    with Progress(*bar) as progress:
        task = progress.add_task("", total=len(batches), completed=len(done))
        for i in left:
            traces = generator.generate([_ids(tokenizer, row["prompt"]) for row in batches[i]], i)
            sources = [row for row in batches[i] for _ in range(args.num_generations)]
            table = traces_to_table(
                [replace(trace, extra=row) for trace, row in zip(traces, sources, strict=True)],
                model=args.model,
                sampling=sampling,
                engine={"name": generator.name, "version": generator.version},
            )
            folder.write(table, i)
            progress.advance(task)
    print(f"traces: {folder.path}")
    return 0


def _settings(args: argparse.Namespace) -> Any:
    from types import SimpleNamespace

    from ..contract import check_contract

    settings = check_contract(
        SimpleNamespace(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=1.0,
            generation_kwargs=None,
            use_vllm=args.engine.startswith("vllm"),
            vllm_structured_outputs_regex=None,
            use_transformers_continuous_batching=False,
        )
    )
    if not settings.truncates:
        raise CommandError("Nothing is truncated, so there are no supports to record. Set --top_k, --top_p or --min_p.")
    return settings


def _prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    import datasets

    place = Path(args.dataset)
    try:
        if place.is_dir():
            data: Any = datasets.load_from_disk(str(place))
        elif place.suffix in (".jsonl", ".json", ".parquet"):
            kind = "parquet" if place.suffix == ".parquet" else "json"
            data = datasets.load_dataset(kind, data_files=str(place), split="train")
        else:
            data = datasets.load_dataset(args.dataset, split=args.split)
    except (OSError, ValueError) as error:
        raise CommandError(f"--dataset {args.dataset} cannot be read: {error}") from error
    if "prompt" not in data.column_names:
        raise CommandError(f"--dataset {args.dataset} has no `prompt` column; it has {', '.join(data.column_names)}.")
    rows = data.to_list()[: args.limit]
    if not rows:
        raise CommandError(f"--dataset {args.dataset} holds no prompts.")
    return rows


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)


def _generator(args: argparse.Namespace, settings: Any) -> Any:
    from ..capture.generators import CaptureRequest, TransformersGenerator, VLLMGenerator

    request = CaptureRequest(settings, args.num_generations, args.max_tokens, args.seed)
    if args.engine == "vllm":
        return VLLMGenerator(args.model, request, args.dtype, **args.engine_kwargs)
    if args.engine in ("vllm-server", "sglang"):
        from ..capture.server_generators import ServerGenerator

        return ServerGenerator(args.engine, args.server_url, request)
    return TransformersGenerator(args.model, request, args.dtype)


def _same_capture(path: Path, args: argparse.Namespace) -> None:
    """The folder belongs to one capture; another one's settings would mix into it."""
    asked = {key: value for key, value in vars(args).items() if key not in ("output", "engine_kwargs", "server_url")}
    if path.exists():
        found = json.loads(path.read_text())
        for key, value in asked.items():
            if found.get(key) != value:
                raise CommandError(
                    f"{path.parent} holds a capture with {key}={found.get(key)!r}, and this one has {key}={value!r}. "
                    "Take another --output, or the same settings."
                )
    else:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asked, indent=2))
        partial.replace(path)
