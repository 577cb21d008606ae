"""Replay is compared bit by bit, and several threads add up in an order of their own."""

import pytest
import torch

from tests.routing.moe_families import build


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    """Layer 0 is dense, layers 1 and 2 have experts."""
    return build("qwen3_moe")
