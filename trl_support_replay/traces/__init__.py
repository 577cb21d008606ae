"""What was recorded beside the tokens: sampling supports, routed experts, and the trajectories that hold them."""

from .fields import ArrayField, Field, RoutesField, SupportField, TrajectoryError
from .finalized import Trajectory, TrajectoryBatch
from .routes import RoutedExperts, RoutesError
from .support import SupportError, SupportRows
from .trajectory import TrajectoryTrace

__all__ = [
    "ArrayField",
    "Field",
    "RoutedExperts",
    "RoutesError",
    "RoutesField",
    "SupportError",
    "SupportField",
    "SupportRows",
    "Trajectory",
    "TrajectoryBatch",
    "TrajectoryError",
    "TrajectoryTrace",
]
