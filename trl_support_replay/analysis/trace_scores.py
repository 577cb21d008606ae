"""Models that saved traces are scored with: loaded, and checked to fit them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..traces.columns import Trace
from ..traces.multimodal import check_no_placeholders


class ScoringModelError(ValueError):
    """A model that cannot be loaded, or that traces cannot be scored with."""


def load_model(
    option: str, name: str, *, dtype: str, device: str | None = None, revision: str | None = None
) -> PreTrainedModel:
    """A causal language model to score with.

    Args:
        option: what the user named it with, for the error.
        name: a folder or a Hub name.
        dtype: name of a data type of torch.
        device: where to put it; `None` for the GPU when there is one, else the CPU.
        revision: of a Hub name.

    Raises:
        ScoringModelError: there is no such model, no such revision of it, or no such device.
    """
    if revision is not None and os.path.isdir(name):
        raise ScoringModelError(
            f"{option} {name} is a folder, and a revision ({revision}) belongs to a name on the Hub. Leave it "
            "out, or name the folder of the other weights."
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ScoringModelError(
            f"device={device!r} is not to be had here ({str(error).splitlines()[0]}). Name another one, as cpu."
        ) from error
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, revision=revision or "main", dtype=getattr(torch, dtype)
        )
    except (OSError, ValueError, SafetensorError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ScoringModelError(
            f"{option} {name}{at} cannot be loaded; give a folder with a causal language model or a Hub name. "
            f"{str(error).splitlines()[0]}"
        ) from error
    return model.to(device)


def check_fits(traces: Sequence[Trace], model: PreTrainedModel, option: str, revision: str | None = None) -> None:
    """Raise unless the model has every id of the traces, and these are of text only.

    Args:
        traces: what is going to be scored.
        model: what is going to score them, from `load_model`.
        option: what the user named the model with, for the error.
        revision: of the model.

    Raises:
        ScoringModelError: naming the largest id and the size of the model's vocabulary.
        MultimodalTraceError: prompts with ids that stand for images.
    """
    vocab_size = model.config.get_text_config().vocab_size
    arrays = [ids for t in traces for ids in (t.prompt_ids, t.completion_ids, t.supports.token_ids)]
    largest = max((int(ids.max(initial=-1)) for ids in arrays), default=-1)
    if largest >= vocab_size:
        raise ScoringModelError(
            f"{option} {model.name_or_path} has a vocabulary of {vocab_size} ids, and the traces hold the id "
            f"{largest}: they were sampled from a model with another vocabulary. Name one with the sampler's."
        )
    # As it was saved: of a model of images and text, only the part for text may have been loaded.
    check_no_placeholders(traces, AutoConfig.from_pretrained(str(model.name_or_path), revision=revision or "main"))
