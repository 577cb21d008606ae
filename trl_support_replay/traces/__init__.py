"""What was recorded beside the tokens: sampling supports, routed experts, and the trajectories that hold them."""

from .routes import RoutedExperts, RoutesError
from .support import SupportError, SupportRows

__all__ = ["RoutedExperts", "RoutesError", "SupportError", "SupportRows"]
