"""`lm_head_from_model`: the `LMHead` of a transformers model."""

from __future__ import annotations

from typing import Any

from .lm_head import LMHead


def lm_head_from_model(model: Any) -> LMHead:
    """The output head of a causal language model, with the scale and softcap of its family.

    Args:
        model: a transformers causal language model, not a wrapper of one. Call this in its forward.

    Raises:
        ValueError: a head that is not one linear projection.
    """
    module = model.get_output_embeddings()
    if module is None or getattr(module, "weight", None) is None:
        raise ValueError(f"{type(model).__name__} has no linear output head that could score tokens.")
    config = model.config.get_text_config()
    return LMHead(
        weight=module.weight,
        bias=getattr(module, "bias", None),
        logit_scale=_logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _logit_scale(config: Any) -> float:
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)
