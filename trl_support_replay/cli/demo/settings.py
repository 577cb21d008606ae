"""What both variants of the demo train with."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 20,
    "top_p": 0.9,
    "max_completion_length": 40,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "learning_rate": 1e-5,
    "gradient_checkpointing": False,
    "seed": 1,
}
