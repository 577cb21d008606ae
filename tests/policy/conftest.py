"""The trainers' fixtures, for models that are tried in a trainer."""

from tests.trainers.conftest import build as build
