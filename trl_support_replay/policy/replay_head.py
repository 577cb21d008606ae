"""The model's forward with support scores in place of vocabulary log-probs.

`add_replay_head` gives a causal language model one more keyword argument, `replay`: a `ReplayBatch` that says which
positions are to be scored over which supports. The head then runs inside the model's own forward, so that the hooks of
DDP, FSDP and ZeRO-3 are armed when it reads its weight.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..batch.layout import BatchLayout, SampleBatch
from ..scoring import lm_head_from_model, score_support

_VIRTUAL_TOKENS = "Adapters that add virtual tokens (prompt tuning, prefix tuning) cannot be replayed."


@dataclass
class ReplayBatch:
    """What one model call with `input_ids` of shape `[B, S]` is to score.

    Attributes:
        layout: the scored tokens and their supports.
        temperature: softmax temperature of the sampler.
        log_probs, entropy: names of the scores that fill these fields of the output; `None` for no entropy.
        extra: names of further scores.
    """

    layout: BatchLayout
    temperature: float
    log_probs: str
    entropy: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([self.log_probs, *([self.entropy] if self.entropy else []), *self.extra]))


@dataclass
class ReplayOutput(ModelOutput):
    """Scores of one model call; every per-token field is `[B, S - 1]` and zero where nothing was scored.

    Attributes:
        log_probs: log-prob of each scored token, over its support (or over the vocabulary, if asked for).
        entropy: entropy of the distribution that `ReplayBatch.entropy` names.
        extra: further scores, in the order of `ReplayBatch.extra`.
        aux_loss: load-balancing loss of a mixture-of-experts model, when router logits are asked for.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    extra: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None


def add_replay_head(model: PreTrainedModel, check: Callable[[Any], None] | None = None) -> None:
    """Let `model(..., replay=batch)` return a `ReplayOutput`; without `replay` the forward is the one it had.

    Args:
        model: a causal language model, before it is wrapped by PEFT, DDP, FSDP or DeepSpeed.
        check: is given the input ids of every call without `replay`, and raises where that call may not be.
    """
    original = model.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: PreTrainedModel, *args: Any, replay: ReplayBatch | None = None, **kwargs: Any) -> Any:
        if replay is None:
            if check is not None:
                check(args[0] if args else kwargs.get("input_ids"))
            return original(*args, **kwargs)
        kwargs |= dict(zip(signature.parameters, args, strict=False))
        # The caller's fused-head arguments: here the batch says what is scored.
        for name in ("labels", "fused_lm_head"):
            kwargs.pop(name, None)
        return _score(self, replay, kwargs)

    # `generate` and PEFT look at the signature: that of a method is what its function has after the first parameter.
    forward.__signature__ = _with_replay(signature)  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def _with_replay(signature: inspect.Signature) -> inspect.Signature:
    """A function's signature: `self`, what a bound method's `signature` has, and `replay`."""
    parameters = {"self": inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), **signature.parameters}
    parameters["replay"] = inspect.Parameter("replay", inspect.Parameter.KEYWORD_ONLY, default=None)
    return signature.replace(parameters=sorted(parameters.values(), key=lambda parameter: parameter.kind))


def _score(model: PreTrainedModel, replay: ReplayBatch, kwargs: dict[str, Any]) -> ReplayOutput:
    input_ids = kwargs.get("input_ids")
    if input_ids is None:
        raise ValueError(f"The model was called without input_ids. {_VIRTUAL_TOKENS}")
    kwargs["use_cache"] = False
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    # Looked up at each call: FSDP and PEFT replace modules after the head was added.
    backbone = model.base_model(**kwargs)
    hidden = backbone.last_hidden_state  # [B, S, H]
    layout, positions = replay.layout, replay.layout.positions
    if hidden.shape[:2] != layout.shape:
        raise ValueError(
            f"The model returned hidden states for {tuple(hidden.shape[:2])} positions where {layout.shape} were "
            f"expected. {_VIRTUAL_TOKENS}"
        )
    targets = input_ids.flatten()[positions.states + 1]
    torch._assert_async(
        (targets == positions.sampled_ids).all(),
        "The supports belong to other tokens than the batch's: whoever reorders or cuts a batch has to do the same to "
        "its support_samples.",
    )
    # The scorer chooses its own precision; under autocast its products would fall back to half.
    with torch.autocast(hidden.device.type, enabled=False):
        scores = score_support(
            hidden.flatten(0, 1)[positions.states],  # [N, H]
            lm_head_from_model(model),
            positions.sampled_ids,
            layout.support,
            temperature=replay.temperature,
            outputs=replay.outputs,
            empty_rows="full",
        )
    return ReplayOutput(
        log_probs=layout.spread(getattr(scores, replay.log_probs)),
        entropy=layout.spread(getattr(scores, replay.entropy)) if replay.entropy else None,
        extra=tuple(layout.spread(getattr(scores, name)) for name in replay.extra) or None,
        aux_loss=_load_balancing_loss(config, backbone, kwargs) if kwargs.get("output_router_logits") else None,
    )


def _load_balancing_loss(config: Any, backbone: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss = load_balancing_loss_func(
        backbone.router_logits, config.num_experts, config.num_experts_per_tok, kwargs.get("attention_mask")
    )
    assert isinstance(loss, torch.Tensor)  # 0 only for a model without router logits, which TRL does not ask
    return loss


class ReplayCaller:
    """Stands in for the model while TRL scores a batch in chunks, and tells each call which supports are its own."""

    def __init__(self, model: Any, samples: SampleBatch, completion_length: int, **scores: Any):
        self._model = model
        self._samples = samples
        self._completion_length = completion_length
        self._scores = scores
        self._cursor = 0
        self._extra: list[tuple[torch.Tensor, ...] | None] = []

    def __call__(self, **kwargs: Any) -> Any:
        input_ids = kwargs["input_ids"]
        start, self._cursor = self._cursor, self._cursor + input_ids.shape[0]
        shape = (input_ids.shape[0], input_ids.shape[1])
        layout = self._samples.layout(start, shape, self._completion_length, input_ids.device)
        output = self._model(**kwargs, replay=ReplayBatch(layout, **self._scores))
        self._extra.append(output.extra)
        return output

    def finish(self) -> None:
        if self._cursor != len(self._samples):
            raise RuntimeError(f"{self._cursor} rows were scored, but {len(self._samples)} samples were recorded.")

    def collected(self, completion_length: int) -> dict[str, torch.Tensor]:
        """The `extra` scores of all calls, `[B, completion_length]` each."""
        names = self._scores["extra"]
        return {
            name: torch.cat([extra[i] for extra in self._extra if extra is not None])[:, -completion_length:]
            for i, name in enumerate(names)
        }
