"""Publishes a folder of traces as a dataset with a card."""

from __future__ import annotations

import glob
import json
from pathlib import Path

import numpy as np
from huggingface_hub import DatasetCard, DatasetCardData, HfApi

from .._version import __version__
from ..traces.columns import TraceSchemaError
from ..traces.survey import TraceSurvey, survey_traces

TAGS = ("trl", "support-replay", "grpo", "traces")
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def traces_card(found: TraceSurvey, repo_id: str) -> DatasetCard:
    """The card of a traces dataset."""
    num, routed = found.counts["traces"], "routed_experts" in found.schema.names
    size = next((name for limit, name in _SIZES if num < limit), "n>1M")
    # The path of a model on the machine that sampled is not published.
    models = {Path(name).name if Path(name).is_absolute() else name for name in found.origins["model"]}
    sizes = found.sizes if len(found.sizes) else np.zeros(1)
    data = DatasetCardData(
        pretty_name=f"Sampling traces: {repo_id.split('/')[-1]}",
        tags=[*TAGS, *(["routed-experts"] if routed else [])],
        size_categories=[size],
        configs=[{"config_name": "default", "data_files": "*.parquet"}],
    )
    columns = "".join(f"| `{field.name}` | `{field.type}` |\n" for field in found.schema)
    text = f"""# Sampling traces

{num:,} completions of {found.counts["completion tokens"]:,} tokens. Each token comes with its log-prob as the sampler
reported it and its sampling support, the ids that it was drawn from. Recorded by trl-support-replay {__version__}.

| | |
|---|---|
| model | {"; ".join(sorted(models))} |
| sampling | {"; ".join(sorted(found.origins["sampling"]))} |
| engine | {"; ".join(sorted(found.origins["engine"]))} |
| support size, mean | {sizes.mean():.2f} |
| supports of one token | {(sizes == 1).mean():.1%} |
| routed experts | {"recorded" if routed else "not recorded"} |

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
        TraceSchemaError: before anything is uploaded, for traces that are not whole, or not a folder of Parquet files.
    """
    shards = [path for path in Path(folder).glob("*.parquet") if not path.name.startswith(".")]
    if not shards:
        raise TraceSchemaError(
            f"{folder} is not a folder of Parquet files, which is what is published. A dataset that `datasets` saved "
            "to disk has a push_to_hub of its own."
        )
    found = survey_traces(folder)
    if found.problems:
        more = f" There are {len(found.problems)} problems; `trl-support-replay inspect` lists them."
        raise TraceSchemaError(found.problems[0] + (more if len(found.problems) > 1 else ""))
    api = HfApi(token=token)
    url = api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
    repo_id = url.repo_id
    card = str(traces_card(found, repo_id)).encode()
    api.upload_folder(
        repo_id=repo_id,
        repo_type="dataset",
        folder_path=folder,
        allow_patterns=[glob.escape(shard.name) for shard in shards],  # what was checked, and nothing below it
        revision=revision,
        commit_message=f"Add {found.counts['traces']:,} traces",
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
