"""The trainers' fixtures, for models that are tried in a trainer."""

from tests.trainers.conftest import build as build
from tests.trainers.conftest import tiny_model_path as tiny_model_path
