"""Routed-expert replay for Hugging Face mixture-of-experts models."""

from .batch import RouteBatch
from .discovery import Router, find_routers, has_experts
from .errors import RouterReplayError, UnreplayableRouterError
from .metrics import RouteMetrics
from .recording import Recording
from .replay import ReplayScope, RouterReplay

__all__ = [
    "Recording",
    "ReplayScope",
    "RouteBatch",
    "RouteMetrics",
    "Router",
    "RouterReplay",
    "RouterReplayError",
    "UnreplayableRouterError",
    "find_routers",
    "has_experts",
]
