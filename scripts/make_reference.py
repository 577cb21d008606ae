"""Write the pages that follow from the code: docs/settings.md and docs/refused.md.

python -m scripts.make_reference
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

from trl import GRPOConfig

from trl_support_replay.cli.grpo_inputs.arguments import ReplayScriptArguments
from trl_support_replay.routing.discovery import REFUSED_FAMILIES
from trl_support_replay.settings.config import SupportReplayGRPOConfig
from trl_support_replay.settings.sampling_table import Effect, Field, generate, sglang, trl, vllm

DOCS = Path(__file__).resolve().parent.parent / "docs"

_SETTINGS = """# Settings

`SupportReplayGRPOConfig` takes every setting of TRL's `GRPOConfig`, with its meaning, and those below. None of them has
to be set: replay is on as soon as a setting cuts tokens (`top_k`, `top_p`, `min_p`, a constraint). Each is also an
option of `trl-support-replay grpo`, and a key of its YAML files. `SupportReplayRLOOConfig` adds the same settings to
TRL's `RLOOConfig`.

"""
_COMMAND = """
## Of the command alone

Beside those of `trl grpo` and `accelerate launch`.

"""
_REFUSED = """# Refused on purpose

Scores are exact when the engine drew each token from `softmax(logits / temperature)`, restricted to the recorded
support where a setting cuts tokens, and nothing else. A setting that changes the distribution in another way is refused
when the configuration is made, before a model is loaded. The error, an `UnreplayableSettingError`, names setting, value
and the way out.

This holds where no token is cut as well: TRL scores over the whole vocabulary then, and a penalty or a second
temperature draws from another distribution. The tables say what is refused only while supports or experts are recorded.
A setting that nobody has looked at yet is refused by its name.

## Replayed

Each of these switches replay on, beside others or alone; with SGLang, the trainer's own settings do. The
[largest gaps](compatibility.md#settings) that tests measured are on a page of their own.

| what it does | vLLM | transformers `generate` | SGLang |
|---|---|---|---|
{replayed}
A `logit_bias` or `sequence_bias` that is -inf for all its tokens removes them, and is replayed.

## In any case

| setting | why |
|---|---|
| `temperature` 0 | greedy decoding draws from a single token: every log-prob is 0, and nothing can be learned |
| `temperature` below 0.01 with vLLM | vLLM samples at 0.01 instead |
| `generation_kwargs["temperature"]` unlike `temperature` | the trainer would score at another temperature |
| `top_k` 1 | every support would hold the sampled token alone |
| a setting that is unknown here | so is what it does to the tokens that are drawn |
| `neftune_noise_alpha` | it adds noise to the embeddings while the policy is scored; the engine samples without |
| `peft_config` with virtual tokens (prompt tuning, prefix tuning) | they are positions that the batch does not have |
{always}
## Models

Before the first generation the trainer runs policy and reference four times, on 24 tokens. What fails is refused with
an `UnreplayableModelError` that names the model's class and the difference.

| model | why |
|---|---|
| scores from hidden states and head unlike `log_softmax` of the model's own logits | something happens between last \
hidden state and logits that is not known here: Inkling divides the states, other models have a prediction head |
| logits for fewer ids than the head has rows, or ids masked after the head (Chameleon) | scores over the vocabulary \
would count what the model leaves out |
| random numbers in training mode | the engine samples without noise. Dropout, layer drop and router jitter that \
modules hold are [switched off](troubleshooting.md#dropout-and-other-noise-of-training-mode-is-off); what a model \
reads from its configuration at each call (Falcon, GPT-J, GPT-Neo) has to be set to 0 there |
| other logits in training mode than in evaluation mode | the engine samples in evaluation mode |

In float32 no token may differ by more than 1e-4 of the largest logit. In half precision the logits themselves are
rounded, and the median token may differ by `eps / 2` of the largest one: for bfloat16 and a largest logit of 30, 0.12
nats. The commands `score` and `audit` compare the scores in the same way.

## With vLLM

| setting | why |
|---|---|
| `top_p`, `min_p` or a constraint (but for `allowed_token_ids` and a choice) without `top_k`, with \
`support_capture="logprobs"` or a vLLM older than 0.28 | nothing bounds the support, and vLLM reports a bounded number \
of log-probs |
| `generation_kwargs["logit_bias"]` with `vllm_mode="server"` | -inf does not travel to a server |
| `vllm_engine_kwargs` with `vllm_mode="server"` | they reach the colocated engine only |
| `vllm_engine_kwargs['tensor_parallel_size']` or `['pipeline_parallel_size']`, other than 1 | TRL would not know that \
processes share an engine; `vllm_tensor_parallel_size` is its setting |
| a half-precision engine on a CPU | vLLM's weight sync has no effect there |
| a package with an entry point in `vllm.logits_processors` | vLLM loads it into each engine, without any setting |
{vllm}
Once an engine is built, its own configuration is read as well, since a model can bring drafts along, for example.
`vllm-serve` refuses the same settings as flags, however they are spelled, and in a `--config` file. A server that is up
tells trainers which settings of its engine break replay, and they refuse them at their construction.

A fixed `seed` in `generation_kwargs` or `vllm_engine_kwargs` of a colocated engine is accepted with a warning: the
completions of a prompt come out alike.

## With transformers `generate`

The model's own `generation_config.json` counts as well, for whatever TRL does not set. Where a model has none, such
settings in its `config.json` count.

| setting | why |
|---|---|
{transformers}
## With SGLang

| setting | why |
|---|---|
| no `top_k`, with a server that does not tell its `sampling_mask_max_tokens` | it wants a `top_k` with each mask |
| a server with `--speculative-algorithm` | {drafts} |
| a server with `--dllm-algorithm` | {diffusion} |
| a server whose `--preferred-sampling-params` hold one of those below | it adds them to every request |
{sglang}
## With saved traces

| setting | why |
|---|---|
| `save_traces` with images in the dataset, or ids of images in prompts | traces carry \
[no images](traces.md#text-only) |
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
    """What the tables of settings refuse."""
    return _REFUSED.format(
        replayed=_replayed(),
        always=_rows("{}", trl.ALWAYS),
        vllm=_rows("{}", trl.WITH_VLLM)
        + _rows("generation_kwargs[{!r}]", vllm.REQUEST)
        + _rows("vllm_engine_kwargs[{!r}]", vllm.ENGINE),
        transformers=_rows("{}", trl.WITHOUT_VLLM) + _rows("generation_kwargs[{!r}]", generate.CONFIG),
        drafts=vllm.ENGINE["speculative_config"].reason,
        diffusion=vllm.ENGINE["diffusion_config"].reason,
        sglang=_rows("sampling_params[{!r}]", sglang.REQUEST),
        families="| `model_type` | why |\n|---|---|\n"
        + "".join(f"| `{name}` | {reason} |\n" for name, reason in REFUSED_FAMILIES.items()),
    )


def _replayed() -> str:
    """A row for each class that leaves a support, with the settings of each engine."""
    lines = []
    for effect in (Effect.TRUNCATES, Effect.REMOVES, Effect.FIXES):
        cells = []
        for tables in ((vllm.REQUEST, trl.WITH_VLLM), (generate.CONFIG,), (sglang.REQUEST,)):
            names = [name for table in tables for name, field in table.items() if field.effect is effect]
            cells.append(", ".join(f"`{name}`" for name in names) or "-")
        lines.append(f"| {effect.value} | {' | '.join(cells)} |\n")
    return "".join(lines)


def _rows(spelling: str, table: dict[str, Field]) -> str:
    lines = []
    for name, field in table.items():
        refused = None if name.startswith("_") else field.refused(_ANY)
        if refused is not None:
            but = f", other than {' or '.join(map(repr, field.off))}" if field.off else ""
            only = " (only while something is recorded)" if field.effect is Effect.REPORTS else ""
            lines.append(f"| `{spelling.format(name)}`{but} | {refused.reason}{only} |\n")
    return "".join(lines)


_ANY = object()  # a value that no setting has for "off"


PAGES = {"settings.md": settings_page, "refused.md": refused_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
        print(f"docs/{name}")
