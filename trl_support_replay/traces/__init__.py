"""What was recorded beside the tokens: sampling supports and routed experts."""

from .routes import RoutedExperts, RoutesError
from .support import SupportError, SupportRows

__all__ = ["RoutedExperts", "RoutesError", "SupportError", "SupportRows"]
