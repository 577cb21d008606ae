"""Every family of mixture-of-experts models: replayed exactly, or refused with a reason."""

import re
from pathlib import Path

import pytest
import torch

from tests.routing.family_table import table
from tests.routing.moe_checks import check_family
from tests.routing.moe_families import FAMILIES, REFUSED, build
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


def test_the_documented_table_lists_these_families():
    page = (Path(__file__).parents[2] / "docs" / "routing_families.md").read_text()
    replayed, _, refused = page.partition("## Refused")
    assert re.findall(r"^\| `(\w+)` \| \w+ \| float32, bfloat16 \| both \|", replayed, re.M) == list(FAMILIES)
    assert re.findall(r"^\| `(\w+)` \|", refused, re.M) == ["model_type", *REFUSED]


@pytest.mark.slow
def test_the_documented_table_is_what_the_checks_say():
    page = (Path(__file__).parents[2] / "docs" / "routing_families.md").read_text()
    assert page == table()
