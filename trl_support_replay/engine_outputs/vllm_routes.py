"""Routed experts out of vLLM's `CompletionOutput` (`enable_return_routed_experts=True`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..traces.routes import RoutedExperts, RoutesError


def read_routed_experts(
    output: Any,
    completion: Any,
    *,
    layers: Sequence[int],
    num_experts: int,
    top_k: int,
    request: str,
    prompt_start: int = 0,
    missing: str = "error",
    trailing: bool = False,
) -> RoutedExperts:
    """Routes of a request's prompt and of one of its completions.

    vLLM reports `[P + T - 1 - prompt_start, hidden layers, k]`: prompt tokens first, then the generated ones except the
    last, which never enters the model. It has a column for every layer; those without experts hold zeros and are
    dropped by the global number of their layer.

    A short answer has lost rows (a preempted request, a generation that ended while a step was in flight), and does not
    say which. The prompt's rows come first and together, so those can still be placed.

    Args:
        output: vLLM's `RequestOutput`, with `P` prompt token ids.
        completion: one of its `CompletionOutput`s, with `T` token ids.
        layers: global numbers of the layers with experts, `L`.
        num_experts: `E` of these layers.
        top_k: experts per token.
        request: how to call the request in errors.
        prompt_start: the request's `routed_experts_prompt_start`: prompt tokens whose rows were not asked for.
        missing: what to do with a short answer. `"error"`, or `"live"`: keep the prompt's rows when they are all there,
            and leave the rest uncaptured, to the live router.
        trailing: accept rows after the last token (an engine may go on past a stop string) and drop them.

    Returns:
        Routes of `P + T` tokens. The last one is uncaptured, and so are the first `prompt_start`.

    Raises:
        RoutesError: no routes, wrong counts, a dense layer with routes, ids out of range, or one expert
            twice, naming the request and the numbers.
    """
    prompt_length, num_generated = len(output.prompt_token_ids), len(completion.token_ids)
    rows = completion.routed_experts
    if rows is None:
        raise RoutesError(
            f"{request}: the engine returned no routed experts. It has to be built with "
            "enable_return_routed_experts=True and a model with a mixture of experts."
        )
    rows = np.asarray(rows)
    expected = max(prompt_length + num_generated - 1 - prompt_start, 0)
    where = f"{request} ({prompt_length} prompt and {num_generated} generated tokens)"
    if len(rows) > expected and not trailing or len(rows) < expected and missing != "live":
        way_out = "" if len(rows) > expected else ". With routes_missing='live' the live router fills in"
        start = f" from prompt token {prompt_start} on" if prompt_start else ""
        raise RoutesError(f"{where}: {len(rows)} rows of routed experts{start}, expected {expected}{way_out}.")
    if len(rows) < expected:
        num_prompt = prompt_length - prompt_start
        rows = rows[: num_prompt if len(rows) >= num_prompt else 0]
    columns = _moe_columns(rows[:expected], layers, top_k, where)
    routes = RoutedExperts(columns, num_experts=num_experts, layers=layers, where=where)
    places = np.full(prompt_length + num_generated, -1, dtype=np.int64)
    places[prompt_start : prompt_start + len(routes)] = np.arange(len(routes))
    return routes.take(places)


def _moe_columns(rows: np.ndarray, layers: Sequence[int], top_k: int, where: str) -> np.ndarray:
    if rows.ndim != 3 or rows.shape[2] != top_k or rows.shape[1] <= max(layers):
        raise RoutesError(
            f"{where}: routed experts of shape {rows.shape} have no [tokens, layers, top_k={top_k}] with layers "
            f"{tuple(layers)}."
        )
    dense = [layer for layer in range(rows.shape[1]) if layer not in set(layers)]
    wrong = [layer for layer in dense if rows[:, layer].any()]
    if wrong:
        raise RoutesError(
            f"{where}: layer {wrong[0]} has routes in the engine, but no experts in the policy, whose layers with "
            f"experts are {tuple(layers)}."
        )
    return rows[:, list(layers)]
