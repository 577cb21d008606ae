"""`SupportReplayGRPOConfig`: TRL's `GRPOConfig` with the settings of support replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .contract import check_contract

_CHOICES = {
    "support_capture": ("auto", "native", "logprobs"),
    "synthetic_eos": ("full_vocab", "mask", "error"),
    "replay_check": ("raise", "warn", "off"),
    "entropy_scope": ("auto", "full", "support"),
    "kl_scope": ("support", "full"),
}


@dataclass
class SupportReplayGRPOConfig(GRPOConfig):
    """Configuration of [`SupportReplayGRPOTrainer`].

    Everything in `trl.GRPOConfig` keeps its meaning. Replay is on as soon as the sampling truncates: `top_k > 0`,
    `top_p < 1` or `min_p > 0`. With no truncation set, training is stock GRPO.

    Raises:
        UnreplayableSettingError: at construction, for sampling settings that cannot be replayed exactly.
        ValueError: for a value outside its choices.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    support_capture: str = field(
        default="auto",
        metadata={
            "help": "How vLLM reports the support of each token. 'native': the engine's own sampling mask (vLLM 0.28 "
            "or newer with Model Runner V2 on a GPU). 'logprobs': the finite entries of the top-k processed log-probs "
            "(any supported vLLM, also on a CPU). 'auto' takes the native mask where the engine has it. The choice is "
            "logged.",
            "choices": list(_CHOICES["support_capture"]),
        },
    )
    synthetic_eos: str = field(
        default="full_vocab",
        metadata={
            "help": "What an end-of-sequence token that was never sampled (appended by a rollout, at most one, at the "
            "end of a trajectory) contributes. 'full_vocab': its ordinary log-prob. 'mask': it leaves the loss. "
            "'error': refuse it.",
            "choices": list(_CHOICES["synthetic_eos"]),
        },
    )
    replay_check: str = field(
        default="raise",
        metadata={
            "help": "What to do when replayed log-probs differ from the recorded ones by more than `replay_tolerance` "
            "right after generation, while engine and policy hold the same weights. 'raise' stops and names the likely "
            "cause (stale weights, shifted rows, another temperature), 'warn' logs it, 'off' does not look.",
            "choices": list(_CHOICES["replay_check"]),
        },
    )
    replay_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "Largest accepted gap between replayed and recorded log-probs, in nats. Default: when policy and "
            "engine both compute in float32, 1e-4 for the largest gap over tokens. In half precision the largest gap "
            "is dominated by rounding, so there the mean gap is compared, with 0.12: three times the 0.04 measured "
            "between a bfloat16 engine and a float32 model without any truncation."
        },
    )
    entropy_scope: str = field(
        default="auto",
        metadata={
            "help": "Distribution whose entropy TRL's entropy bonus, entropy mask and `entropy` metric use. 'full': "
            "the whole vocabulary, as in stock TRL (costs a full projection). 'support': the renormalised support. "
            "'auto': 'full' where the loss depends on it (entropy_coef, use_adaptive_entropy, top_entropy_quantile < "
            "1), else 'support'.",
            "choices": list(_CHOICES["entropy_scope"]),
        },
    )
    kl_scope: str = field(
        default="support",
        metadata={
            "help": "Distributions that the KL penalty (beta > 0) compares. 'support': policy and reference, both "
            "renormalised over the recorded support. 'full': both over the whole vocabulary, as in stock TRL (costs a "
            "full projection).",
            "choices": list(_CHOICES["kl_scope"]),
        },
    )
    vllm_dtype: str = field(
        default="auto",
        metadata={
            "help": "Data type of the colocated engine. 'auto': the policy's own data type, unlike vLLM, which turns a "
            "float32 checkpoint into bfloat16. On a CPU only 'float32' is accepted: the weight sync of a bfloat16 "
            "engine has no effect there."
        },
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Further keyword arguments for `vllm.LLM` in colocate mode, for example "
            '\'{"enforce_eager": true, "max_num_batched_tokens": 512}\'.'
        },
    )

    def __post_init__(self):
        super().__post_init__()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")
        if self.replay_tolerance is not None and not self.replay_tolerance > 0:
            raise ValueError(
                f"replay_tolerance={self.replay_tolerance!r} must be positive (nats). To switch the check off, set "
                "replay_check='off'."
            )
        check_contract(self)
