"""The memory formulas against what real models, optimizers and traces take."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from trl_support_replay.cli.planning.launch import Launch
from trl_support_replay.cli.planning.memory import Batch, batch_items, model_items, traces_item
from trl_support_replay.cli.planning.shapes import ModelShapes, read_shapes
from trl_support_replay.traces.routes import RoutedExperts
from trl_support_replay.traces.support import SupportRows

SIZES = {"vocab_size": 64, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}


def family(name, layers=3):
    if name == "llama":
        return LlamaConfig(**SIZES, intermediate_size=160, num_hidden_layers=layers, pad_token_id=0)
    if name == "qwen3":
        return Qwen3Config(**SIZES, intermediate_size=160, num_hidden_layers=layers, tie_word_embeddings=True)
    return Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, num_hidden_layers=layers
    )


@pytest.fixture(params=["llama", "qwen3", "qwen3_moe"])
def config(request):
    return family(request.param)


@pytest.fixture
def shapes(config, tmp_path):
    config.save_pretrained(tmp_path)
    return read_shapes(str(tmp_path), None, False)


def test_shapes_are_those_of_the_real_model(config, shapes):
    model = AutoModelForCausalLM.from_config(config)
    assert shapes.parameters == shapes.trainable == sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert shapes.largest_unit == max(layer, 64 * 96)
    assert (shapes.layers, shapes.hidden, shapes.kv_width) == (3, 96, 128)
    moe = config.model_type == "qwen3_moe"
    assert (shapes.moe_layers, shapes.experts, shapes.experts_per_token) == ((3, 8, 3) if moe else (0, 0, 0))


@pytest.mark.needs("peft")
def test_adapters_are_counted_as_peft_makes_them(config, tmp_path):
    from peft import LoraConfig, get_peft_model

    config.save_pretrained(tmp_path)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"])
    found = read_shapes(str(tmp_path), None, False, lora)
    real = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    assert found.trainable == sum(p.numel() for p in real.parameters() if p.requires_grad)


def kept_bytes(config, dtype, tokens):
    """Bytes that one forward of the decoder keeps for its backward, parameters aside."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.model(input_ids=torch.ones(2, tokens // 2, dtype=torch.long))
    del output
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_layers_keep_what_the_formula_says(config, shapes, dtype, width):
    deeper = type(config)(**{**config.to_dict(), "num_hidden_layers": 4, "layer_types": None})
    one_layer = kept_bytes(deeper, dtype, 128) - kept_bytes(config, dtype, 128)
    batch = Batch(micro=2, generation=2, prompt=60, completion=4, support=5)
    activations, _ = batch_items(shapes, batch, width, checkpointing=False)
    assert 0.88 < activations.bytes / (3 * one_layer) < 1.42


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradients_and_states_are_those_of_a_real_step(shapes, config, dtype):
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    trained = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    trained.step()
    items = {item.name: item.bytes for item in model_items(shapes, Launch(), dtype, "no")}
    parameters = list(model.parameters())
    assert items["weights"] == sum(p.nbytes for p in parameters)
    with_gradient = [p for p in parameters if p.grad is not None]  # an expert that no token chose has none
    assert items["gradients"] == pytest.approx(sum(p.grad.nbytes for p in with_gradient))
    states = [s for p in parameters for s in trained.state[p].values() if torch.is_tensor(s) and s.shape == p.shape]
    assert items["optimizer"] == sum(s.nbytes for s in states)


def test_precision_follows_the_launch():
    def bytes_of(launch, *precision, **more):
        found = {item.name: item.bytes for item in model_items(SHAPES, launch, *precision, **more)}
        return [found.get(name, 0) / 10**9 for name in ("weights", "gradients", "optimizer", "autocast copies")]

    assert bytes_of(Launch(1, "ZeRO-3"), "float32", "bf16") == bytes_of(Launch(1, "ZeRO-3"), "bfloat16", "bf16")
    assert bytes_of(Launch(1, "ZeRO-3"), "bfloat16", "bf16") == [2, 2, 12, 0]
    assert bytes_of(Launch(1, "FSDP2"), "bfloat16", "bf16") == [4, 4, 8, 0]
    assert bytes_of(Launch(), "float32", "bf16") == [4, 4, 8, 2]
    assert bytes_of(Launch(), "bfloat16", "bf16") == [2, 2, 4, 0]
    adapter = dataclasses.replace(SHAPES, trainable=10**6)
    (weights, *_) = model_items(adapter, Launch(), "bfloat16", "no", frozen_bits=4)
    assert weights.bytes == 10**9 / 2 + 2 * 10**6


SHAPES = ModelShapes(10**9, 10**9, 10**8, 24, 2048, 32_000, kv_width=1024, kept_per_layer=20_000)


@given(st.integers(2, 512))
def test_sharding_shares_out_and_nothing_else(processes):
    def total(optimizer, gradients, weights):
        launch = Launch(processes, "FSDP2", optimizer, gradients, weights)
        items = model_items(SHAPES, launch, "bfloat16", "no")
        return sum(i.bytes for i in items if i.name != "gathered weights")

    whole = total(False, False, False)
    assert total(True, True, True) == pytest.approx(whole / processes)
    assert whole > total(True, False, False) > total(True, True, False) > total(True, True, True)


@pytest.mark.parametrize("experts", [256, 257])
def test_traces_take_what_the_formula_says(experts):
    batch = Batch(micro=2, generation=3, prompt=5, completion=7, support=11)
    moe = dataclasses.replace(SHAPES, moe_layers=4, experts=experts, experts_per_token=2)
    tokens = batch.generation * batch.completion
    rows = SupportRows.from_ragged([list(range(batch.support))] * tokens)
    arrays = [rows.token_ids, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, bool)]
    support = sum(a.nbytes for a in arrays) + rows.offsets[1:].nbytes
    assert traces_item(moe, batch, True, False).bytes == support
    chosen = np.tile(np.arange(2), (batch.width, 4, 1))
    one = RoutedExperts(chosen, num_experts=experts, layers=range(4))
    routes = batch.generation * one.experts.nbytes
    assert traces_item(moe, batch, True, True).bytes == support + routes


@given(st.integers(2, 8))
def test_tensor_parallel_ranks_hold_a_part_each(size):
    def bytes_of(launch):
        return [i.bytes for i in model_items(SHAPES, launch, "bfloat16", "no", reference=True)]

    parts, whole = bytes_of(Launch(size, "tensor parallel", tensor_parallel=size)), bytes_of(Launch())
    assert parts == pytest.approx([value / size for value in whole])
