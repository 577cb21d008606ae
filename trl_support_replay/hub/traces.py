"""Publishes a folder of traces as a dataset with a card."""

from __future__ import annotations

import glob
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from huggingface_hub import DatasetCard, DatasetCardData, HfApi

from .._version import __version__
from ..traces.columns import TraceSchemaError
from ..traces.reading import trace_tables, traces_of

TAGS = ("trl", "support-replay", "grpo", "traces")
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


@dataclass(frozen=True)
class TraceFacts:
    """What a card says of a folder of traces.

    Attributes:
        traces, tokens: number of completions, and of completion tokens.
        size_mean, singletons: mean support size, and the fraction of supports of one token.
        models, sampling, engines: every one that occurs.
        columns: name to type.
        routed: whether routed experts are recorded.
    """

    traces: int
    tokens: int
    size_mean: float
    singletons: float
    models: tuple[str, ...]
    sampling: tuple[str, ...]
    engines: tuple[str, ...]
    columns: dict[str, str]
    routed: bool

    @classmethod
    def of(cls, folder: str | Path) -> TraceFacts:
        """Read a folder; every trace is checked on the way.

        Raises:
            TraceSchemaError, SupportError, RoutesError: what is found there is not whole.
        """
        counts: Counter[str] = Counter()
        origins: dict[str, set[str]] = {"model": set(), "sampling": set(), "engine": set()}
        schema: pa.Schema | None = None
        for name, table in trace_tables(folder):
            schema = schema or table.schema
            for i, trace in enumerate(traces_of(name, table)):
                trace.check(f"{name}, row {i}")
                sizes = trace.supports.sizes[trace.supports.sizes > 0]
                counts.update(traces=1, tokens=len(trace.completion_ids), rows=len(sizes))
                counts.update(candidates=int(sizes.sum()), singletons=int(np.count_nonzero(sizes == 1)))
            for column, values in origins.items():
                if column in table.column_names:
                    values |= {_shown(value) for value in table[column].to_pylist()}
        assert schema is not None  # trace_tables raises for an empty folder
        rows = max(counts["rows"], 1)
        return cls(
            traces=counts["traces"],
            tokens=counts["tokens"],
            size_mean=counts["candidates"] / rows,
            singletons=counts["singletons"] / rows,
            models=tuple(sorted(origins["model"])),
            sampling=tuple(sorted(origins["sampling"])),
            engines=tuple(sorted(origins["engine"])),
            columns={field.name: str(field.type) for field in schema},
            routed="routed_experts" in schema.names,
        )


def _shown(value: Any) -> str:
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name  # where a model lies on the machine that sampled is nobody's business
    if isinstance(value, dict):
        return ", ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in value.items())
    return str(value)


def traces_card(facts: TraceFacts, repo_id: str) -> DatasetCard:
    """The card of a traces dataset."""
    size = next((name for limit, name in _SIZES if facts.traces < limit), "n>1M")
    data = DatasetCardData(
        pretty_name=f"Sampling traces: {repo_id.split('/')[-1]}",
        tags=[*TAGS, *(["routed-experts"] if facts.routed else [])],
        size_categories=[size],
        configs=[{"config_name": "default", "data_files": "*.parquet"}],
    )
    columns = "".join(f"| `{name}` | `{kind}` |\n" for name, kind in facts.columns.items())
    text = f"""# Sampling traces

{facts.traces:,} completions of {facts.tokens:,} tokens. Each token comes with its log-prob as the sampler reported it
and its sampling support, the ids that it was drawn from. Recorded by trl-support-replay {__version__}.

| | |
|---|---|
| model | {"; ".join(facts.models)} |
| sampling | {"; ".join(facts.sampling)} |
| engine | {"; ".join(facts.engines)} |
| support size, mean | {facts.size_mean:.2f} |
| supports of one token | {facts.singletons:.1%} |
| routed experts | {"recorded" if facts.routed else "not recorded"} |

## Use

```python
from datasets import load_dataset

traces = load_dataset({json.dumps(repo_id)}, split="train")
```

They are a `train_dataset` of `trl_support_replay.SupportReplayGRPOTrainer` as they are, at the temperature above.
`trl-support-replay inspect` and `trl-support-replay score` read them from a folder.

## Columns

| column | type |
|---|---|
{columns}"""
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def push_traces(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Upload a folder of traces, with a card.

    Args:
        folder: of Parquet shards, as `save_traces` and `capture` write them.
        repo_id: `user/name` of the dataset; made if it is not there.
        token: of the Hub; `None` takes the one that `huggingface_hub` knows.
        private: whether a new repository is private; `None` leaves it to the account's setting.
        revision: branch to commit to; `None` for the main one.

    Returns:
        Address of the dataset.

    Raises:
        TraceSchemaError, SupportError, RoutesError: before anything is uploaded, for traces that are not whole, or not
            a folder of Parquet files.
    """
    shards = [path for path in Path(folder).glob("*.parquet") if not path.name.startswith(".")]
    if not shards:
        raise TraceSchemaError(
            f"{folder} is not a folder of Parquet files, which is what is published. A dataset that `datasets` saved "
            "to disk has a push_to_hub of its own."
        )
    facts = TraceFacts.of(folder)
    api = HfApi(token=token)
    url = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    repo_id = url.repo_id
    card = str(traces_card(facts, repo_id)).encode()
    api.upload_folder(
        repo_id=repo_id,
        repo_type="dataset",
        folder_path=folder,
        allow_patterns=[glob.escape(shard.name) for shard in shards],  # what was checked, and nothing below it
        revision=revision,
        commit_message=f"Add {facts.traces:,} traces",
    )
    api.upload_file(
        path_or_fileobj=card,
        path_in_repo="README.md",
        repo_id=repo_id,
        repo_type="dataset",
        revision=revision,
        commit_message="Describe the traces",
    )
    return str(url)
