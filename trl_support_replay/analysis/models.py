"""Loads the models that saved traces are scored with, and checks that they fit the traces."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import find_adapter_config_file

from ..traces.columns import Trace
from ..traces.multimodal import check_no_placeholders


class ScoringModelError(ValueError):
    """A model that cannot be loaded, or that traces cannot be scored with."""


def load_model(
    option: str, name: str, *, dtype: str, device: str | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """A causal language model to score with, and its configuration as it was saved.

    Of a model of images and text, only the part for text may have been loaded.

    Args:
        option: the option that named it, for the error.
        name: a folder or a Hub name.
        dtype: name of a data type of torch.
        device: where to put it; `None` for the GPU when there is one, else the CPU.
        revision: of a Hub name. The base of an adapter has the revision that the adapter's configuration names.

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
            f"device={device!r} is not available here ({str(error).splitlines()[0]}). Name another, for example cpu."
        ) from error
    base, base_revision = name, revision
    try:
        adapter = find_adapter_config_file(name, revision=revision or "main")
        if adapter is not None and not os.path.exists(os.path.join(name, "config.json")):
            saved = json.loads(Path(adapter).read_text(encoding="utf-8"))
            base, base_revision = saved["base_model_name_or_path"], saved.get("revision")
        config = AutoConfig.from_pretrained(base, revision=base_revision or "main")
        model: Any = AutoModelForCausalLM.from_pretrained(
            base, revision=base_revision or "main", dtype=getattr(torch, dtype)
        )
        if base != name:
            model.load_adapter(name, adapter_kwargs={"revision": revision or "main"})
    except (OSError, ValueError, LookupError, ImportError, SafetensorError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ScoringModelError(
            f"{option} {name}{at} cannot be loaded; give a folder with a causal language model or a Hub name. "
            f"{str(error).splitlines()[0]}"
        ) from error
    return model.to(device), config


def check_fits(traces: Sequence[Trace], model: PreTrainedModel, config: Any, option: str) -> None:
    """Raise unless the model has every id of the traces, and these are of text only.

    Args:
        traces: what is going to be scored.
        model, config: what is going to score them, from `load_model`.
        option: the option that named the model, for the error.

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
    check_no_placeholders(traces, config)
