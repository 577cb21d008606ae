"""The same weights and traces in a Hugging Face model and in a Megatron one: the same scores."""

import re

import torch
from megatron.core.models.gpt import GPTModel
from transformers import MixtralConfig, MixtralForCausalLM

from tests.megatron import recorded, tiny_gpt
from tests.megatron.scoring_parity import OUTPUTS, TEMPERATURE
from tests.megatron.tiny_gpt import EXPERTS, HIDDEN, TOP_K, VOCAB
from trl_support_replay.megatron import MegatronRouterReplay, MicroBatch, split_scores, support_forward
from trl_support_replay.routing import RouterReplay
from trl_support_replay.scoring import SupportCSR, score_support_from_logits

LAYERS, HEADS, GROUPS = 2, 4, 2


def hugging_face_model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=HIDDEN // HEADS,
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            attn_implementation="eager",
            experts_implementation="eager",
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0, 0.1) if "norm" in name else parameter.normal_(0.0, 0.15)
    return model.eval()


def megatron_model(source: MixtralForCausalLM) -> GPTModel:
    cfg = tiny_gpt.config(num_layers=LAYERS, num_query_groups=GROUPS)
    (model,) = tiny_gpt.build_chunks(cfg)
    weights = source.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(converted(name, weights))
    return model.eval()


def converted(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """A Megatron parameter from the Hugging Face ones."""
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in whole:
        return weights[whole[name]]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    assert match is not None, name
    layer, rest = f"model.layers.{match[1]}.", match[2]
    if rest == "self_attention.linear_qkv.weight":
        q, k, v = (weights[f"{layer}self_attn.{x}_proj.weight"].view(GROUPS, -1, HIDDEN) for x in ("q", "k", "v"))
        return torch.cat([q, k, v], dim=1).flatten(0, 1)
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight", rest)
    if expert is not None:
        kind = {"1": "gate_up_proj", "2": "down_proj"}[expert[2]]
        return weights[f"{layer}mlp.experts.{kind}"][int(expert[1])]
    return weights[
        layer
        + {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "mlp.router.weight": "mlp.gate.weight",
        }[rest]
    ]


def supports(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Bool `[N, V]`, what a sampler with these settings draws from."""
    probs, ids = torch.softmax(logits / TEMPERATURE, dim=-1).sort(descending=True)
    kept = probs.cumsum(-1) - probs < top_p
    kept[:, top_k:] = False
    return torch.zeros_like(kept).scatter(1, ids, kept)


def test_scores_and_supports_agree() -> None:
    traces = [recorded.random_trace(i, vocab=VOCAB, num_layers=LAYERS, synthetic_eos=i == 1) for i in range(4)]
    batch = MicroBatch.from_traces(traces)
    tokens, routes = batch.tokens, batch.routes
    assert routes is not None
    source = hugging_face_model()
    target = megatron_model(source)

    with torch.no_grad():
        replay = RouterReplay(source, probe=lambda: source(input_ids=tokens.input_ids[:1]))
        with replay.scope(routes):
            logits = source(input_ids=tokens.input_ids).logits
        live_logits = source(input_ids=tokens.input_ids).logits
        with MegatronRouterReplay(target).schedule(
            lambda _, model: (
                support_forward(model, tokens, batch.attention_mask(), temperature=TEMPERATURE, outputs=OUTPUTS),
                None,
            ),
            lambda i: routes,
            forward_only=True,
        ) as step:
            scores, _ = step(None, target)
        with MegatronRouterReplay(target).schedule(
            lambda _, model: (model(tokens.input_ids, tokens.position_ids, batch.attention_mask()), None),
            lambda i: routes,
            forward_only=True,
        ) as step:
            target_logits, _ = step(None, target)

    mask = tokens.loss_mask
    rows = tokens.support.take(mask.flatten().nonzero().squeeze(1).numpy())
    want = score_support_from_logits(
        logits[mask],
        tokens.target_ids[mask],
        SupportCSR.from_numpy(rows.token_ids, rows.offsets),
        temperature=TEMPERATURE,
        outputs=OUTPUTS,
        empty_rows="full",
    )
    have = split_scores(scores, OUTPUTS)
    assert int(mask.sum()) > 20
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(have, name)[mask], getattr(want, name), rtol=0, atol=1e-5)
    real = ~routes.padding
    torch.testing.assert_close(target_logits[real], logits[real], rtol=0, atol=1e-5)
    for top_k, top_p in ((20, 0.9), (5, 1.0), (VOCAB, 0.7)):
        assert torch.equal(supports(target_logits[real], top_k, top_p), supports(logits[real], top_k, top_p))
    # Random routes are not the live router's, so without replay the models would not agree by themselves.
    assert (live_logits - logits).abs().max() > 0.1
