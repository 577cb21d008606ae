"""Repacks weights that vLLM's CPU backend does not repack after a reload."""

from __future__ import annotations

from typing import Any


def repack_on_cpu(model: Any) -> None:
    """After a reload, pack again what vLLM's CPU backend packs only when it first loads a model.

    A head that is tied to the embedding shares its storage but keeps a packed copy of its own, which a reload leaves as
    it was. Experts are computed from packed weights, and a reload leaves plain ones in their place.

    Args:
        model: vLLM's model. Nothing happens on other platforms.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
