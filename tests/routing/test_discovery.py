"""Finding routers: what one watched forward sees, what it leaves alone, and what is refused."""

import types

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.routing.moe_checks import attributes, random_routes, tokens
from tests.routing.moe_families import REFUSED, build
from trl_support_replay.routing import RouteBatch, RouterReplay, RouterReplayError, UnreplayableRouterError, discovery


def replace_forward(module, forward):
    """Give one instance another forward, and keep the class's."""
    vars(module)["forward"] = types.MethodType(forward, module)


def test_routers_by_layer():
    replay = RouterReplay(build("qwen3_moe"))
    assert [r.name for r in replay.routers] == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    assert (replay.layers, replay.num_experts, replay.top_k) == ((1, 2), 8, 2)


def test_a_single_group_makes_two_topk_calls_over_the_experts():
    """GLM-4.5 has one group: its first top-k over all experts scores the group, its last chooses."""
    assert {r.num_calls for r in RouterReplay(build("glm4_moe", n_group=1)).routers} == {2}
    assert {r.num_calls for r in RouterReplay(build("glm4_moe", n_group=2)).routers} == {1}


def test_the_probe_leaves_the_model_and_the_random_state_alone():
    model = build("qwen3_moe")
    model.model.layers[1].eval()
    before, state = attributes(model), torch.get_rng_state()
    modes = []
    hook = model.register_forward_pre_hook(lambda m, a: modes.append((m.training, torch.is_grad_enabled())))
    RouterReplay(model)
    hook.remove()
    assert modes == [(False, False)]
    assert attributes(model) == before and torch.equal(torch.get_rng_state(), state)


def test_a_failing_probe_leaves_the_model_alone():
    model = build("qwen3_moe")
    before = attributes(model)
    with pytest.raises(ZeroDivisionError):
        RouterReplay(model, probe=lambda: 1 / 0)
    assert attributes(model) == before


def test_a_probe_of_the_callers_own():
    model = build("qwen3_moe")
    shapes = []
    hook = model.model.embed_tokens.register_forward_hook(lambda m, a, out: shapes.append(tuple(out.shape)))
    assert RouterReplay(model, probe=lambda: model(input_ids=tokens(2, 3))).layers == (1, 2)
    hook.remove()
    assert shapes == [(2, 3, 32)]


# Zaya does make one top-k; the experts of Doge do not run in transformers 5.17.
@pytest.mark.parametrize("model_type", [t for t in REFUSED if t not in ("doge", "zaya")])
def test_refused_families_are_also_seen_for_what_they_do(model_type, monkeypatch):
    """Without the list of names, the watched forward itself leads to a refusal."""
    monkeypatch.setattr(discovery, "REFUSED_FAMILIES", {})
    with pytest.raises(UnreplayableRouterError, match="no top-k over|has 2 routers"):
        RouterReplay(build(model_type))


def test_a_dense_model_is_refused():
    config = Qwen3Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    with pytest.raises(UnreplayableRouterError, match="'qwen3' .* names no number of experts"):
        RouterReplay(AutoModelForCausalLM.from_config(config))


def test_a_layer_that_routes_without_topk_is_refused():
    model = build("qwen3_moe")

    def by_hash(self, hidden_states):
        rows = hidden_states.reshape(-1, self.hidden_dim)
        experts = torch.arange(self.top_k).expand(len(rows), -1)
        return rows @ self.weight.T, torch.ones(experts.shape), experts

    replace_forward(model.model.layers[1].mlp.gate, by_hash)
    with pytest.raises(UnreplayableRouterError, match=r"layers \[1\] have experts, but their forward makes no top-k"):
        RouterReplay(model)


def test_layers_that_share_a_router_are_refused():
    model = build("qwen3_moe")
    model.model.layers[2].mlp = model.model.layers[1].mlp
    with pytest.raises(UnreplayableRouterError, match="calls the router 'model.layers.1.mlp.gate' 2 times"):
        RouterReplay(model)


def test_layers_that_choose_differently_are_refused():
    model = build("qwen3_moe")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(UnreplayableRouterError, match=r"\(experts, top_k\) is one of \[\(8, 2\), \(8, 3\)\]"):
        RouterReplay(model)


@pytest.mark.parametrize(("times", "seen"), [(0, 0), (2, 2)])
def test_a_router_that_chooses_other_than_once_is_an_error(times, seen):
    """The forward is watched at every call, not only when the routers were found."""
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    gate = model.model.layers[2].mlp.gate

    def forward(self, hidden_states):
        if times == 0:
            experts = torch.arange(self.top_k).expand(hidden_states.shape[0], -1)
            return hidden_states @ self.weight.T, torch.ones(experts.shape), experts
        type(self).forward(self, hidden_states)
        return type(self).forward(self, hidden_states)

    replace_forward(gate, forward)
    message = f"layers.2.mlp.gate called top-k over 8 experts {seen} times, expected 1|called for forward 2"
    with pytest.raises(RouterReplayError, match=message), replay.scope(RouteBatch(random_routes(replay))):
        model(input_ids=tokens())
    with pytest.raises(RouterReplayError, match=f"{seen} times, expected 1"), replay.record():
        model(input_ids=tokens())
    assert vars(gate)["forward"].__func__ is forward


def test_a_router_that_changes_its_top_k_is_an_error():
    model = build("qwen3_moe")
    replay = RouterReplay(model)
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(RouterReplayError, match="chooses 3 experts, but chose 2 before"), replay.record():
        model(input_ids=tokens())
