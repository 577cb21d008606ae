"""Sample completions of a dataset's prompts and save their traces.

Prompts in, a traces dataset out: tokens, log-probs and the sampling support of every token. Stopped at any moment, it
goes on where it was, and ends with the same traces as a run that was not stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import CommandError, told
from ...settings.urls import without_credentials
from ._arguments import above_zero, below_one, dtype_option, json_object, mass, option, positive, read_options

_EXAMPLE = """\
trl-support-replay capture trl-lib/DeepMath-103K --model Qwen/Qwen3-0.6B \\
    --engine vllm --top_k 20 --top_p 0.95 --num_generations 8 --output runs/traces"""
_ENGINES = ("transformers", "vllm", "vllm-server", "sglang")


@dataclass(kw_only=True)
class Options:
    dataset: str = option(
        "prompts: a .jsonl, .json or .parquet file, a dataset saved to disk, or a Hub name; its `prompt` column holds "
        "text or messages",
        main=True,
    )
    model: str = option("model to sample from: a folder or a Hub name")
    split: str = option("split of a Hub dataset", "train")
    output: str = option("folder for the traces")
    engine: str = option("what samples", "transformers", choices=_ENGINES)
    server_url: Sequence[str] = option(
        "servers that are up, for --engine vllm-server and sglang; --model then names their tokenizer",
        (),
        nargs="+",
        metavar="URL",
    )
    num_generations: int = option("completions per prompt", 1, positive)
    max_tokens: int = option("longest completion", 256, positive)
    temperature: float = option("1 leaves the model's probabilities as they are", 1.0, above_zero)
    top_p: float = option("1 is off", 1.0, mass)
    top_k: int = option("0 is off; older vLLM needs one", 0, int)
    min_p: float = option("0 is off", 0.0, below_one)
    generation_kwargs: dict[str, Any] = option(
        'JSON with further engine settings, for example \'{"structured_outputs": {"regex": "[a-z]+"}}\' (vLLM) or '
        "'{\"suppress_tokens\": [5]}' (transformers)",
        {},
        json_object,
    )
    batch_size: int = option("prompts per shard", 8, positive)
    limit: int | None = option("only the first so many prompts", None, positive)
    seed: int = option("the same seed gives the same traces", 0, int)
    dtype: str = dtype_option()
    engine_kwargs: dict[str, Any] = option("JSON with further arguments of vllm.LLM", {}, json_object)


def main(argv: Sequence[str]) -> int:
    """Write one shard of traces per batch of prompts."""
    args = read_options(Options, argv, "capture", __doc__, _EXAMPLE)
    if (args.engine in ("vllm-server", "sglang")) != bool(args.server_url):
        shown = " ".join(map(without_credentials, args.server_url))
        raise CommandError(f"--engine {args.engine} and --server_url {shown or '(none)'} do not fit.")
    if args.engine == "sglang" and args.generation_kwargs:
        raise CommandError("--generation_kwargs reaches transformers and vLLM. Leave it out with --engine sglang.")
    for name in ("model", "dtype"):
        if name in args.engine_kwargs:
            raise CommandError(f"--engine_kwargs holds {name}={args.engine_kwargs[name]!r}. Give it as --{name}.")

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ...traces.columns import traces_to_table
    from ...traces.record import FolderRecord, fingerprint
    from ...traces.shards import ShardFolder

    settings = _settings(args)
    rows, types, metadata = _prompts(args)
    folder = ShardFolder(args.output, "--output")
    decisive = {key: value for key, value in vars(args).items() if key not in ("output", "server_url")}
    # The name of a file says nothing of what is in it.
    decisive |= _contents(rows) | {"model_files": fingerprint(args.model)}
    record = FolderRecord(folder.path / "capture.json", "capture", decisive)
    record.check()
    folder.discard_from(1 + len(rows))  # only what a killed run left half done
    sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k,
                "min_p": settings.min_p, "seed": args.seed}  # fmt: skip
    batches = [range(len(rows))[start : start + args.batch_size] for start in range(0, len(rows), args.batch_size)]
    sources = [[rows[n] for n in batch for _ in range(args.num_generations)] for batch in batches]
    done = _whole_shards(folder.shards(), sources, sampling)
    left = [i for i in range(len(batches)) if i not in done]
    if done:
        print(f"{len(done)} of {len(batches)} shards are there already")
    if not left:
        print(f"traces: {folder.path}")
        return 0
    prompts = _prompt_ids(args, rows)
    generator = _generator(args, settings)
    if args.server_url:
        record = FolderRecord(folder.path / "capture.json", "capture", decisive | {"weights": generator.weights})
        record.check()
    record.write()
    bar = (TextColumn("capturing"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"), TimeRemainingColumn())
    with Progress(*bar) as progress:
        task = progress.add_task("", total=len(batches), completed=len(done))
        for i in left:
            traces = generator.generate([prompts[n] for n in batches[i]], i)
            table = traces_to_table(
                [replace(trace, extra=row) for trace, row in zip(traces, sources[i], strict=True)],
                model=args.model,
                sampling=sampling,
                engine={"name": generator.name, "version": generator.version},
                types=types,
                metadata=metadata,
            )
            folder.write(table, i)
            progress.advance(task)
    print(f"traces: {folder.path}")
    if generator.repaired:
        print(f"{generator.repaired} supports were repaired or may lack members; the warnings above say which.")
    return 0


def _whole_shards(
    shards: Sequence[Path], sources: Sequence[Sequence[Mapping[str, Any]]], sampling: Mapping[str, Any]
) -> set[int]:
    """Numbers of the shards that need not be sampled again.

    Args:
        shards: those that are there.
        sources: the dataset's rows for each shard, one a trace.
        sampling: what traces are sampled with.

    Raises:
        CommandError: a shard of other prompts, or that was sampled in another way. A damaged one is only told.
    """
    from ...traces.columns import TraceSchemaError
    from ...traces.reading import read_parquet, traces_of
    from ...traces.routes import RoutesError
    from ...traces.support import SupportError

    whole = set()
    for shard in shards:
        number = int(shard.name[7:15])
        try:
            table = read_parquet(shard)
            traces = traces_of(shard.name, table)
        except (TraceSchemaError, SupportError, RoutesError) as error:
            print(f"sampled anew: {error}")
            continue
        prompts = [row["prompt"] for row in sources[number]] if number < len(sources) else None
        alike = all(row == sampling for row in table["sampling"].to_pylist())
        if [trace.extra.get("prompt") for trace in traces] != prompts or not alike:
            raise CommandError(
                f"{shard} holds traces of other prompts or sampling settings than this capture's shard {number}. "
                "Take another --output, or remove the file to sample the shard anew."
            )
        whole.add(number)
    return whole


def _settings(args: Options) -> Any:
    from types import SimpleNamespace

    from ...settings.contract import check_contract
    from ...settings.preflight import generation_defaults

    # `generate` takes what is not stated from the model's own defaults.
    inherited = generation_defaults(args.model) if args.engine == "transformers" else None
    settings = check_contract(
        SimpleNamespace(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=1.0,
            generation_kwargs=args.generation_kwargs,
            use_vllm=args.engine.startswith("vllm"),
            vllm_mode="server" if args.server_url else "colocate",
            vllm_engine_kwargs=args.engine_kwargs if args.engine == "vllm" else None,
        ),
        inherited,
    )
    if not settings.truncates:
        raise CommandError("Nothing cuts tokens, so there are no supports to record. Set --top_k, --top_p or --min_p.")
    return settings


def _prompts(args: Options) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """The rows to sample from, the Arrow type of each of their columns, and what `datasets` knows of them beyond."""
    import datasets
    import pyarrow as pa

    from ...traces.columns import check_column_names
    from ...traces.multimodal import check_text_row
    from ..grpo_inputs.datasets import reading

    place = Path(args.dataset)
    with reading(f"--dataset {args.dataset}"):
        if place.is_dir():
            data: Any = datasets.load_from_disk(str(place))
        elif place.suffix in (".jsonl", ".json", ".parquet"):
            kind = "parquet" if place.suffix == ".parquet" else "json"
            data = datasets.load_dataset(kind, data_files=str(place), split="train")
        else:
            data = datasets.load_dataset(args.dataset, split=args.split)
    if isinstance(data, datasets.DatasetDict):
        raise CommandError(
            f"--dataset {args.dataset} holds the splits {', '.join(data)}; name the folder of one of them."
        )
    if "prompt" not in data.column_names:
        raise CommandError(f"--dataset {args.dataset} has no `prompt` column; it has {', '.join(data.column_names)}.")
    check_column_names(data.column_names, f"--dataset {args.dataset}")
    with reading(f"--dataset {args.dataset}"):
        data.data.validate(full=True)
        rows = data.to_list()[: args.limit]
    if not rows:
        raise CommandError(f"--dataset {args.dataset} holds no prompts.")
    types = {}
    for name in data.column_names:
        try:
            # Over all rows: each shard alone might find another type, and no reader takes both.
            types[name] = pa.array([row[name] for row in rows]).type
        except pa.ArrowException as error:
            raise CommandError(
                f"--dataset {args.dataset}: column {name!r} mixes values that no one type holds ({error}). Make "
                "them alike, or drop the column."
            ) from error
    for i, row in enumerate(rows):
        check_text_row(row, f"--dataset {args.dataset}, row {i}")
    return rows, types, data.features.arrow_schema.metadata


def _contents(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many rows there are, and a digest of all their columns, since all of them go into the traces."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
    return {"dataset_rows": len(rows), "dataset_sha256": digest.hexdigest()}


def _prompt_ids(args: Options, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Token ids of every prompt, all before the first is sampled from: a capture must not stop at a row half-way."""
    from jinja2 import TemplateError
    from transformers import AutoConfig, AutoTokenizer

    from ...traces.multimodal import check_ids

    with _loading(f"--model {args.model} has no tokenizer that can be loaded; give a folder or a Hub name"):
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    prompts = []
    for i, row in enumerate(rows):
        where, prompt = f"--dataset {args.dataset}, row {i}", row["prompt"]
        if isinstance(prompt, str):
            ids = tokenizer(prompt).input_ids
        elif isinstance(prompt, list) and prompt and all(isinstance(m, dict) and m.get("role") for m in prompt):
            try:
                ids = tokenizer.apply_chat_template(
                    prompt, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            except (ValueError, TypeError, LookupError, TemplateError) as error:
                raise CommandError(f"{where}: the chat template of {args.model} refuses the prompt: {error}") from error
        else:
            raise CommandError(f"{where}: prompt={prompt!r} is neither text nor messages with a role. Drop the row.")
        if not ids:
            raise CommandError(f"{where}: prompt={prompt!r} has no tokens, so nothing can be sampled. Drop the row.")
        prompts.append(ids)
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError):
        return prompts  # the tokenizer alone, of a server's model
    check_ids(prompts, config, f"--dataset {args.dataset}, row", "prompt")
    return prompts


def _generator(args: Options, settings: Any) -> Any:
    from ...engines.generators import CaptureRequest, TransformersGenerator, VLLMGenerator

    request = CaptureRequest(settings, args.num_generations, args.max_tokens, args.seed, args.generation_kwargs)
    if args.engine in ("vllm-server", "sglang"):
        from ...engines.server_generators import ServerGenerator

        return ServerGenerator(args.engine, args.server_url, request)
    # Of an engine that does not start, the traceback says more than a line.
    kinds = OSError if args.engine == "vllm" else Exception
    with _loading(f"--model {args.model} cannot be loaded; give a folder with weights or a Hub name", kinds):
        if args.engine == "vllm":
            return VLLMGenerator(args.model, request, args.dtype, **args.engine_kwargs)
        return TransformersGenerator(args.model, request, args.dtype)


def _loading(failure: str, kinds: type[Exception] = Exception) -> contextlib.AbstractContextManager[None]:
    """What damaged files make a library raise becomes one message."""

    def say(error: Exception) -> str:
        return f"{failure}. {type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"

    return told(say, kinds)
