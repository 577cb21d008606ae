"""Write the pages that follow from the code: docs/settings.md and docs/refused.md.

python -m scripts.make_reference
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

from trl import GRPOConfig

from trl_support_replay import contract
from trl_support_replay.config import SupportReplayGRPOConfig
from trl_support_replay.grpo_inputs.arguments import ReplayScriptArguments
from trl_support_replay.routing.discovery import REFUSED_FAMILIES

DOCS = Path(__file__).resolve().parent.parent / "docs"

_SETTINGS = """# Settings

`SupportReplayGRPOConfig` takes every setting of TRL's `GRPOConfig`, with its meaning, and those below. None of them has
to be set: replay is on as soon as `top_k`, `top_p` or `min_p` truncates. Each is also an option of
`trl-support-replay grpo`, and a key of its YAML files. `SupportReplayRLOOConfig` adds the same settings to TRL's
`RLOOConfig`.

"""
_COMMAND = """
## Of the command alone

Beside those of `trl grpo` and `accelerate launch`.

"""
_REFUSED = """# Refused on purpose

Replaying a support is exact when the engine drew each token from `softmax(logits / temperature)` restricted to the
recorded set, and nothing else. A setting that changes the distribution in another way is refused when the configuration
is made, before a model is loaded. The error, an `UnreplayableSettingError`, names setting, value and the way out.

With nothing truncated there is nothing to replay, and nothing of this is refused.

## In any case

| setting | why |
|---|---|
| `temperature` 0 | greedy decoding draws from a single token: every log-prob is 0, and nothing can be learned |
| `generation_kwargs["temperature"]` unlike `temperature` | the trainer would score at another temperature |
| `top_k` 1 | every support would hold the sampled token alone |
| `repetition_penalty` other than 1 | {shifts} |

## With vLLM

| setting | why |
|---|---|
| `top_p` or `min_p` without `top_k` | nothing bounds the support, and vLLM reports a bounded number of candidates |
| `vllm_structured_outputs_regex` | {forces} |
| `vllm_engine_kwargs` with `vllm_mode="server"` | they reach the colocated engine only |
| a half-precision engine on a CPU | vLLM's weight sync has no effect there |
{vllm}
## With transformers `generate`

The model's own `generation_config` counts as well, for whatever TRL does not set.

| setting | why |
|---|---|
| `use_transformers_continuous_batching` | it does not give the processed scores of each step |
{transformers}
`typical_p`, `epsilon_cutoff`, `eta_cutoff` and `top_h` only remove tokens, so they are replayed.

## With saved traces

| setting | why |
|---|---|
| `save_traces` with images in the dataset, or ids of images in prompts | traces carry [no images](traces.md#text-only) |
| a `train_dataset` of traces of such prompts | the same |
| a `train_dataset` with some of the columns of traces, or with some rows of prompts | it is neither |

## Families of mixture-of-experts models

{families}
What Megatron-Core's schedules and routers cannot replay is on [its page](megatron.md#what-is-refused-and-why).
"""


def settings_page() -> str:
    """A section for each setting that TRL does not have."""
    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    own = [field for field in dataclasses.fields(SupportReplayGRPOConfig) if field.name not in inherited]
    script = [f for f in dataclasses.fields(ReplayScriptArguments) if f.name in ReplayScriptArguments.__annotations__]
    return (
        _SETTINGS
        + "\n".join(_entry(field, SupportReplayGRPOConfig) for field in own)
        + _COMMAND
        + "\n".join(_entry(field, ReplayScriptArguments) for field in script)
    )


def _entry(field: dataclasses.Field[Any], owner: type) -> str:
    kind = get_type_hints(owner)[field.name]
    name = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    name = name.replace("typing.", "")
    return f"### `{field.name}`\n\n`{name}`, default `{field.default!r}`\n\n{field.metadata['help']}\n"


def refused_page() -> str:
    """The contract's tables."""
    return _REFUSED.format(
        shifts=contract._SHIFTS,
        forces=contract._FORCES,
        vllm=_rows("generation_kwargs", contract._VLLM_REFUSED)
        + _rows("vllm_engine_kwargs", contract._VLLM_ENGINE_REFUSED),
        transformers=_rows("generation_kwargs", contract._TRANSFORMERS_REFUSED),
        families="| `model_type` | why |\n|---|---|\n"
        + "".join(f"| `{name}` | {reason} |\n" for name, reason in REFUSED_FAMILIES.items()),
    )


def _rows(where: str, table: dict[str, tuple[tuple[Any, ...], str]]) -> str:
    lines = []
    for name, (harmless, reason) in table.items():
        but = f", other than {' or '.join(map(repr, harmless))}" if harmless else ""
        lines.append(f"| `{where}[{name!r}]`{but} | {reason} |\n")
    return "".join(lines)


PAGES = {"settings.md": settings_page, "refused.md": refused_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"docs/{name}")
