"""A trainer to lay batches out in."""

from tests.trainers.conftest import build as build
