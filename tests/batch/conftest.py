"""A trainer to lay batches out in."""

from tests.trainers.conftest import build as build
from tests.trainers.conftest import tiny_model_path as tiny_model_path
