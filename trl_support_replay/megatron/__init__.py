"""Bridge to megatron-core 0.16 to 0.19: recorded experts in its pipeline schedules."""

from .router_replay import MegatronRouterReplay

__all__ = ["MegatronRouterReplay"]
