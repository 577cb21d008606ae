"""Writes the section of a model card that says how its tokens were sampled and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import ModelCard

from .._version import __version__
from ..engines.choose import engine_used

TAGS = ("support-replay", "importance-sampling")
_HEADING = "## Sampling-support replay"
_ROUTES = "routed experts"
_BEFORE = "### Framework versions\n"
_CAPTURES = {
    "worker": "the engine's sampler, in its worker",
    "native": "the engine's sampling mask",
    "logprobs": "the engine's processed log-probs",
    "sampled": "not recorded: no token was cut",
    "scores": "the processed scores of each step",
}


def _mean_of_tokens(values: Sequence[float], tokens: Sequence[float]) -> float:
    """The mean over all tokens of a run, from the means of its logging steps and their numbers of tokens."""
    return fmean(values, tokens if any(tokens) else None)


# metric -> (label, how a run is summed up from its logging steps)
_SUMMARY: dict[str, tuple[str, Any]] = {
    "support/size_mean": ("support size, mean", _mean_of_tokens),
    "support/size_max": ("support size, largest", max),
    "support/singleton_fraction": ("supports of one token", _mean_of_tokens),
    "support/log_mass": ("log of the mass that truncation kept, mean", _mean_of_tokens),
    "support/logprob_gap_mean": ("gap of replayed to recorded log-probs, mean (nats)", _mean_of_tokens),
    "support/logprob_gap_max": ("gap of replayed to recorded log-probs, largest (nats)", max),
    "sampling/importance_sampling_ratio_raw/mean": ("sequence importance ratio right after generation, mean", fmean),
    "sampling/outside_10pct": ("sequences with a ratio outside 0.9 to 1.1", fmean),
    "support/repaired": ("supports repaired", sum),
    "support/synthetic_eos": ("completions ended by a token that was not sampled", sum),
    "routes/agreement": ("agreement of live routers with replayed experts", fmean),
}


def run_facts(trainer: Any) -> dict[str, str]:
    """The facts of a run, by label, from a replaying trainer during or after training."""
    engine, settings, traces = engine_used(trainer), trainer.sampling_settings, trainer.args.traces_hub_id
    facts = {
        "sampling": ", ".join(filter(None, [f"temperature={settings.temperature:g}", str(settings)])),
        "engine": f"{engine['name']} {engine['version']}",
        "supports from": " and ".join(sorted(_CAPTURES[capture] for capture in _captures(trainer))),
        _ROUTES: "replayed" if trainer.replays_routes else "",
        "optimizer steps": str(trainer.state.global_step),
        **{label: f"{value:.4g}" for label, value in summarize(trainer.state.log_history).items()},
        "traces": f"[{traces}](https://huggingface.co/datasets/{traces})" if traces else "",
    }
    return {label: fact for label, fact in facts.items() if fact}


def _captures(trainer: Any) -> set[str]:
    if not trainer.replays_support:
        return {"sampled"}
    if not trainer.use_vllm:
        return {"scores"}
    if trainer.vllm_mode == "server":
        return {server.capture for server in trainer.vllm_generation.pool.servers}
    return {trainer.vllm_generation.capture}


def summarize(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Label to figure, of the metrics that a run logged; those it never logged are left out."""
    found = {}
    for metric, (label, reduce) in _SUMMARY.items():
        logs = [log for log in history if log.get(metric) is not None]
        values = [float(log[metric]) for log in logs]
        if values and reduce is _mean_of_tokens:
            found[label] = reduce(values, [float(log.get("support/tokens") or 0) for log in logs])
        elif values:
            found[label] = reduce(values)
    return found


def section(facts: Mapping[str, str]) -> str:
    """The section, in Markdown."""
    table = "".join(f"| {label} | {fact} |\n" for label, fact in facts.items())
    return (
        f"{_HEADING}\n\nEach token was scored over the set of tokens that it was sampled from (trl-support-replay "
        f"{__version__}).\n\n| | |\n|---|---|\n{table}\n"
    )


def add_section(path: Path, facts: Mapping[str, str]) -> None:
    """Put section and tags into a model card; they replace an earlier section.

    Args:
        path: the card, as TRL wrote it.
        facts: see `run_facts`.
    """
    card = ModelCard.load(path)
    start = card.text.find(_HEADING)
    if start >= 0:
        end = card.text.find(_BEFORE, start)
        card.text = card.text[:start] + (card.text[end:] if end >= 0 else "")
    head, before, rest = card.text.partition(_BEFORE)
    card.text = f"{head}{section(facts)}{before}{rest}" if before else f"{card.text.rstrip()}\n\n{section(facts)}"
    card.data.tags = sorted({*(card.data.tags or []), *TAGS, *(["routed-experts-replay"] if _ROUTES in facts else [])})
    card.save(path)
