"""Every family of mixture-of-experts models: replayed exactly, or refused with a reason."""

import pytest
import torch
from moe_checks import check_family
from moe_families import FAMILIES, REFUSED, build

from trl_support_replay.routing import RouterReplay, UnreplayableRouterError


@pytest.mark.parametrize("model_type", FAMILIES)
def test_replay_is_exact(model_type):
    assert check_family(model_type).failures() == []


@pytest.mark.parametrize("model_type", FAMILIES)
def test_replay_is_exact_in_bfloat16(model_type):
    assert check_family(model_type, dtype=torch.bfloat16).failures() == []


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name_with_a_reason(model_type):
    with pytest.raises(UnreplayableRouterError, match=f"'{model_type}' model cannot be replayed: (its|each) ") as error:
        RouterReplay(build(model_type))
    assert error.value.model_type == model_type
