"""What runs inside each of vLLM's workers: loading a version of the weights from the shared folder, taking supports.

vLLM mixes this class into its own worker (`--worker-extension-cls`), so its methods can be called on every worker of
the engine. It is given file names by the server, which has checked them, and reads nothing but safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..libraries.vllm_cpu import repack_on_cpu

try:
    from ..engine_outputs.vllm_worker import CaptureWorkerExtension
except ImportError:  # an older vLLM, whose supports are read from log-probs

    class CaptureWorkerExtension:  # type: ignore[no-redef]
        """Nothing."""


class ReloadWorkerExtension(CaptureWorkerExtension):
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


def _tensors(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
