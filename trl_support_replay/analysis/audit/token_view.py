"""The samples that the audit page shows token by token, as plain data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from .gaps import PARTS
from .report import TokenText, round_number
from .run import Audit

# Candidates shown of a support: the likeliest, and the sampled one wherever it ranks.
MOST_CANDIDATES = 8


def add_samples(report: dict[str, Any], audit: Audit, text_of: TokenText, *, max_samples: int, max_bytes: int) -> None:
    """Add `samples` and `texts` to a report: those of the largest mean gap, while the report stays below `max_bytes`.

    A sample's tokens are columns of equal length. `kind` is "sampled", "observation", or "unsupported" for an end of
    sequence that nobody sampled. Of each support the likeliest candidates are given, with their log-probs under the
    policy (`probs`) and, where the weights that sampled were given, under those (`rollout`); `size` counts all of them.
    `texts` maps ids to what they read as.

    Args:
        report: of the same audit; changed in place.
        audit: what was found.
        text_of: the text of a token id.
        max_samples: most samples.
        max_bytes: size of the JSON that the report may reach.
    """
    gaps = np.bincount(audit.tokens.trace, np.abs(audit.parts["total"]), minlength=len(audit.source.traces))
    counts = np.bincount(audit.tokens.trace, minlength=len(audit.source.traces))
    order = np.argsort(-gaps / np.maximum(counts, 1), kind="stable")[:max_samples]
    samples: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    size = len(json.dumps(report))
    for b in order:
        sample = _sample(audit, int(b))
        used = {*sample["prompt"], *sample["ids"], *(v for row in sample["candidates"] for v in row)}
        new = {str(v): text_of(v) for v in sorted(used) if str(v) not in texts}
        size += len(json.dumps(sample)) + len(json.dumps(new))
        if size > max_bytes:
            break
        samples.append(sample)
        texts |= new
    report |= {"samples": samples, "samples_left_out": len(audit.source.traces) - len(samples), "texts": texts}


def _sample(audit: Audit, b: int) -> dict[str, Any]:
    trace = audit.source.traces[b]
    num = len(trace.completion_ids)
    kind = np.where(trace.loss_mask, "unsupported", "observation").astype(object)
    rows = np.flatnonzero(audit.tokens.trace == b)
    columns: dict[str, list[Any]] = {name: [None] * num for name in ("recorded", "policy", *PARTS, "total")}
    columns |= {name: [[] for _ in range(num)] for name in ("candidates", "probs", "rollout")}
    columns["size"] = [0] * num
    for row in rows:
        t = int(audit.tokens.position[row])
        kind[t] = "sampled"
        columns["size"][t] = int(audit.tokens.supports.sizes[row])
        columns["recorded"][t] = round_number(audit.tokens.recorded[row])
        columns["policy"][t] = round_number(audit.scores.replayed.logprobs[row])
        for part in (*PARTS, "total"):
            columns[part][t] = round_number(audit.parts[part][row], 3)
        columns["candidates"][t], columns["probs"][t], columns["rollout"][t] = _support(audit, int(row), trace, t)
    return {
        "trace": b,
        "step": int(audit.source.steps[b]),
        "prompt": trace.prompt_ids.tolist(),
        "ids": trace.completion_ids.tolist(),
        "kind": kind.tolist(),
        **columns,
    }


def _support(audit: Audit, row: int, trace: Any, t: int) -> tuple[list[int], list[float | None], list[float | None]]:
    """Ids, log-probs under the policy and under the sampler of the candidates that are shown."""
    supports = audit.tokens.supports
    span = slice(int(supports.offsets[row]), int(supports.offsets[row + 1]))
    ids = supports.token_ids[span]
    policy = audit.scores.replayed.candidates[span]
    shown = np.argsort(-policy, kind="stable")
    sampled = int(np.flatnonzero(ids == trace.completion_ids[t])[0])
    if sampled not in shown[:MOST_CANDIDATES]:
        shown[MOST_CANDIDATES - 1] = sampled
    shown = shown[:MOST_CANDIDATES]
    sampler = audit.scores.sampler
    rollout = [] if sampler is None else [round_number(x, 4) for x in sampler.candidates[span][shown]]
    return ids[shown].tolist(), [round_number(x, 4) for x in policy[shown]], rollout
