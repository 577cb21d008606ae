"""The names of megatron-core that this room uses. Importing it refuses versions that were not tried."""

from __future__ import annotations

from ..libraries.environment import REQUIREMENTS, in_range

(_SUPPORTED,) = (package.specifier for package in REQUIREMENTS if package.name == "megatron-core")


def check_version(version: str) -> None:
    """Raise `ImportError` unless this version of megatron-core is one that routes and output layers were tried with."""
    if not in_range(version, _SUPPORTED):
        raise ImportError(
            f"megatron-core {version} is installed; trl_support_replay.megatron knows the routers and schedules of "
            f"{_SUPPORTED}. Install one of those: pip install 'trl-support-replay[megatron]'."
        )


try:
    from megatron.core import __version__ as megatron_version
except ImportError as error:
    raise ImportError(
        "trl_support_replay.megatron needs megatron-core: pip install 'trl-support-replay[megatron]'."
    ) from error

check_version(megatron_version)

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.moe.router import Router, TopKRouter  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

__all__ = [
    "ColumnParallelLinear",
    "PackedSeqParams",
    "Router",
    "RouterReplay",
    "TopKRouter",
    "TransformerConfig",
    "check_version",
    "gather_from_sequence_parallel_region",
    "megatron_version",
]
