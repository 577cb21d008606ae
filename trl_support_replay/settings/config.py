"""TRL's configurations with the settings of support replay."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from trl import GRPOConfig, RLOOConfig

from .contract import check_contract, spell_off_alike, warnings_of
from .neftune import refuse_neftune
from .urls import without_credentials

if TYPE_CHECKING:
    _TRLConfig = GRPOConfig
else:
    _TRLConfig = object

logger = logging.getLogger(__name__)

_CHOICES = {
    "support_capture": ("auto", "worker", "native", "logprobs"),
    "synthetic_eos": ("full_vocab", "mask", "error"),
    "replay_check": ("raise", "warn", "off"),
    "entropy_scope": ("auto", "full", "support"),
    "kl_scope": ("support", "full"),
    "routes_for_reference": ("live", "replay"),
    "routes_missing": ("error", "live"),
    "weight_sync": ("nccl", "filesystem"),
}
_NUMBERS = ("replay_tolerance", "support_mass_floor", "routes_gap_steps", "vllm_server_request_timeout")


@dataclass
class ReplayConfig(_TRLConfig):
    """What the configurations of all replaying trainers have beside TRL's own fields."""

    replays_shifts: ClassVar[bool] = True
    """These trainers score with the shifts that settings make to logits."""

    support_capture: str = field(
        default="auto",
        metadata={
            "help": "How vLLM reports the support of each token. 'worker': it is taken inside the engine, where the "
            "token is drawn (vLLM 0.28 or newer with Model Runner V1, also on a CPU; any truncation). 'native': the "
            "engine's own sampling mask (vLLM 0.28 or newer with Model Runner V2 on a GPU; any truncation). "
            "'logprobs': the finite entries of the top-k processed log-probs (any supported vLLM; needs a top_k). "
            "'auto' takes 'worker' or 'native', whichever the engine has, else 'logprobs'. The choice is logged.",
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
            "right after generation, while engine and policy hold the same weights. 'raise' stops and says what was "
            "tried to explain the gap (stale weights, shifted rows, another temperature, ...), 'warn' logs it, 'off' "
            "does not look.",
            "choices": list(_CHOICES["replay_check"]),
        },
    )
    replay_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "Accepted gap between replayed and recorded log-probs, in nats. When policy and engine both "
            "compute in float32 it is that of the largest gap over tokens, 1e-3 by default, and the mean gap may be a "
            "twentieth of it. In half precision it is that of the mean gap, over a batch and over each long "
            "completion, 0.12 by default: three times the 0.04 measured between a bfloat16 engine and a float32 model "
            "without any truncation. Faults that are smaller than rounding are found there by what has a direction, "
            "gathered over batches: mass that is lost, another temperature, a gap that grows. Another value scales the "
            "margins of those in proportion to 0.12."
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
    support_growth: bool = field(
        default=False,
        metadata={
            "help": "Measure in every pass how much of the policy's mass lies outside the recorded supports, and how "
            "much of it moved there since the batch was sampled (`support/outside_mass`, `..._growth`). Replay itself "
            "does not see that mass. Costs a full projection."
        },
    )
    support_mass_floor: float = field(
        default=0.5,
        metadata={
            "help": "With support_growth, the mean mass inside the recorded supports below which a warning says that "
            "replay hides how far the policy has moved. Between 0 (never) and 1."
        },
    )
    save_traces: str | None = field(
        default=None,
        metadata={
            "help": "Folder for the traces of every generation batch: one Parquet shard per batch and process, with "
            "tokens, supports, log-probs, routes, rewards and the dataset's columns. Train on them again by giving "
            "them as train_dataset."
        },
    )
    traces_hub_id: str | None = field(
        default=None,
        metadata={
            "help": "Dataset on the Hub, `user/name`, that push_to_hub publishes the traces of save_traces to, beside "
            "the model, whose card links to it."
        },
    )
    routed_experts_replay: bool = field(
        default=False,
        metadata={
            "help": "Record which experts of a mixture-of-experts model the engine routed each token to, and train "
            "through the same experts. Works with and without truncated sampling."
        },
    )
    routes_for_reference: str = field(
        default="live",
        metadata={
            "help": "Experts of the reference pass (beta > 0) under routed_experts_replay. 'live': the reference "
            "model's own router. 'replay': the recorded routes, as for the policy.",
            "choices": list(_CHOICES["routes_for_reference"]),
        },
    )
    routes_missing: str = field(
        default="error",
        metadata={
            "help": "What to do when an engine reports fewer routes than it has tokens (a preempted request). 'error' "
            "stops, naming request and counts. 'live': the positions without a route take the live router's choice and "
            "are counted in `routes/uncaptured`.",
            "choices": list(_CHOICES["routes_missing"]),
        },
    )
    routes_gap_steps: int = field(
        default=0,
        metadata={
            "help": "Every so many optimizer steps, score a generation batch once more with live routers and log the "
            "gap that replaying the routes removes (`routes/logprob_gap_live_mean`, `..._max`). 0: never. With "
            "DeepSpeed only where TRL scores the old policy, as it does by default with vLLM: elsewhere DeepSpeed has "
            "updated the weights by then."
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
            '\'{"enforce_eager": true, "max_num_batched_tokens": 512}\'. The data type is vllm_dtype.'
        },
    )
    vllm_server_urls: list[str] | None = field(
        default=None,
        metadata={
            "help": "Base URLs of several servers that generate together in server mode, for example "
            "'http://a:8000 http://b:8000'. A conversation stays with its server. Default: the one server of "
            "vllm_server_base_url, or of vllm_server_host and vllm_server_port. Needs weight_sync='filesystem'."
        },
    )
    vllm_server_request_timeout: float = field(
        default=1800.0,
        metadata={
            "help": "Seconds after which a request that a server has not answered counts as lost and is sent again. It "
            "must cover the generation of all completions of a prompt. How long failing requests are repeated "
            "altogether is vllm_server_timeout."
        },
    )
    weight_sync: str = field(
        default="nccl",
        metadata={
            "help": "How a server gets the policy's weights. 'nccl': TRL's own way, between GPUs. 'filesystem': "
            "safetensors in weight_sync_dir, a folder that trainer and servers share; works without NCCL, on a CPU and "
            "with several servers, and needs servers started by `trl-support-replay vllm-serve --weights-dir`.",
            "choices": list(_CHOICES["weight_sync"]),
        },
    )
    weight_sync_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for weight_sync='filesystem': the one given to the servers as --weights-dir, as this "
            "machine sees it. It holds one version of the weights, and a second one while it is written. The last "
            "version of a run is removed when the next run with this folder starts."
        },
    )

    def __post_init__(self):
        if isinstance(self.vllm_engine_kwargs, str):
            self.vllm_engine_kwargs = _mapping("vllm_engine_kwargs", self.vllm_engine_kwargs)
        super().__post_init__()
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise ValueError(f"{name}={value!r} is not a number.")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")
        if self.replay_tolerance is not None and not self.replay_tolerance > 0:
            raise ValueError(
                f"replay_tolerance={self.replay_tolerance!r} must be positive (nats). To switch the check off, set "
                "replay_check='off'."
            )
        if self.routes_gap_steps < 0:
            raise ValueError(f"routes_gap_steps={self.routes_gap_steps!r} is a number of optimizer steps; 0 is never.")
        if not 0 <= self.support_mass_floor <= 1:
            raise ValueError(f"support_mass_floor={self.support_mass_floor!r} is a mean mass, between 0 and 1.")
        if not self.vllm_server_request_timeout > 0:
            raise ValueError(
                f"vllm_server_request_timeout={self.vllm_server_request_timeout!r} must be positive (seconds)."
            )
        if self.traces_hub_id is not None and self.save_traces is None:
            raise ValueError(
                f"traces_hub_id={self.traces_hub_id!r} publishes what save_traces keeps, and save_traces is not set. "
                "Set save_traces to a folder."
            )
        if self.weight_sync == "filesystem":
            self._check_filesystem_sync()
        elif self.vllm_server_urls:
            urls = " ".join(map(without_credentials, self.vllm_server_urls))
            raise ValueError(
                f"vllm_server_urls={urls!r} with weight_sync={self.weight_sync!r}: over NCCL only the server of "
                "vllm_server_base_url gets the policy's weights. Set vllm_server_base_url instead, or "
                "weight_sync='filesystem' and weight_sync_dir."
            )
        engine = self.vllm_engine_kwargs
        if isinstance(engine, dict) and "dtype" in engine:
            dtype = engine["dtype"]
            raise ValueError(
                f"vllm_engine_kwargs['dtype']={dtype!r} would not be known to the weight sync and to replay_check, "
                f"which depend on the engine's data type. Set vllm_dtype={dtype!r} instead."
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if isinstance(engine, dict) and engine.get(name) not in (None, 1):
                raise ValueError(
                    f"vllm_engine_kwargs[{name!r}]={engine[name]!r}: TRL would not know that processes share an "
                    "engine, and each would give it other prompts. Set vllm_tensor_parallel_size instead."
                )
        settings = check_contract(self)
        spell_off_alike(self)
        for warning in warnings_of(self):
            logger.warning("%s", warning)
        if settings.truncates or self.routed_experts_replay:
            refuse_neftune(self)
        packed = settings.truncates or self.routed_experts_replay or self.weight_sync == "filesystem"
        if packed and self.use_vllm and self.vllm_mode == "server" and self.max_completion_length is None:
            raise ValueError(
                "max_completion_length=None with vllm_mode='server': a request to a server says how many tokens may be "
                "sampled. Set max_completion_length to a number of tokens."
            )

    def _check_filesystem_sync(self) -> None:
        if not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError(
                f"weight_sync='filesystem' is for servers, but use_vllm={self.use_vllm} and "
                f"vllm_mode={self.vllm_mode!r}. Set use_vllm=True and vllm_mode='server', or leave weight_sync out."
            )
        if not self.weight_sync_dir:
            raise ValueError(
                f"weight_sync='filesystem' with weight_sync_dir={self.weight_sync_dir!r}: set it to the folder that "
                "the servers were given as --weights-dir."
            )


def _mapping(name: str, text: str) -> dict[str, Any]:
    """The JSON object that a setting holds as text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={text!r} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name}={text!r} is not a JSON object, as '{{\"enforce_eager\": true}}' is one.")
    return value


@dataclass
class SupportReplayGRPOConfig(ReplayConfig, GRPOConfig):
    """Configuration of [`SupportReplayGRPOTrainer`].

    Everything in `trl.GRPOConfig` keeps its meaning. Replay is on as soon as a setting cuts tokens: by truncation
    (`top_k > 0`, `top_p < 1`, `min_p > 0`) or by a constraint (structured outputs, allowed ids, ...). Without one,
    training is stock GRPO. Penalties and biases are replayed beside such a setting with colocated vLLM. Settings that
    change the distribution in another way (a search), and penalties elsewhere, are refused: scoring does not repeat
    them.

    Raises:
        UnreplayableSettingError: at construction, for sampling settings that cannot be replayed exactly.
        ValueError: for a value outside its choices.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]


@dataclass
class SupportReplayRLOOConfig(ReplayConfig, RLOOConfig):
    """Configuration of [`SupportReplayRLOOTrainer`].

    Everything in `trl.RLOOConfig` keeps its meaning; see [`SupportReplayGRPOConfig`]. Completions come from
    transformers or from colocated vLLM.

    Raises:
        UnreplayableSettingError: at construction, for sampling settings that cannot be replayed exactly.
        ValueError: for a value outside its choices, or for server mode.
    """

    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    def __post_init__(self):
        super().__post_init__()
        if self.use_vllm and self.vllm_mode == "server":
            raise ValueError(
                "vllm_mode='server' is not supported by SupportReplayRLOOTrainer. Set vllm_mode='colocate', or train "
                "with GRPO."
            )
