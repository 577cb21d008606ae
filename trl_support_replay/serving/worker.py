"""What runs inside each of vLLM's workers: loading a version of the weights from the shared folder.

vLLM mixes this class into its own worker (`--worker-extension-cls`), so its methods can be called on every worker of
the engine. It is given file names by the server, which has checked them, and reads nothing but safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class ReloadWorkerExtension:
    """Methods that `vllm-serve` adds to vLLM's workers."""

    def support_replay_reload(self, files: list[str]) -> None:
        """Replace the model's weights.

        Args:
            files: paths of the safetensors files that together hold every parameter, under the names of the
                Hugging Face checkpoint.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.reload_weights(weights_iterator=_tensors(files))
        repack_on_cpu(runner.get_model())


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


def _tensors(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
