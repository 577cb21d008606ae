"""Estimates the memory of one device, term by term: roughly, to tell what fits from what does not.

With P parameters of which P_t are trained, n processes, b completions a micro-batch, s tokens in each (prompt and
completion), hidden size h, L layers, a vocabulary of V, and e bytes for an activation:

    weights      w P            / n with ZeRO-3 or FSDP, and then two gathered units of e bytes per parameter besides
    gradients    g P_t          / n from ZeRO-2 on, and with FSDP
    optimizer    o P_t          / n from ZeRO-1 on, and with FSDP; as Adam keeps it, which is the most
    reference    w P            when beta > 0 and there is no adapter, / n as the weights
    activations  b s e h L      with gradient checkpointing, and one layer's e a b s; without it, L of those
    scoring      b s h 8        the hidden states and their gradient in float32, and
                 4 h min(V, b c K)   the gradient of the candidates' rows, c tokens a completion with supports of K
    engine       a colocated vLLM takes the part of the device that it is given; nothing in server mode
    traces       4 K + 17 bytes per token of a generation batch on the host (ids, offset, log-prob, loss mask),
                 and L_moe k bytes (2 L_moe k above 256 experts) for its routes

Tensor parallelism over t processes divides the first four by t where they are not divided by n already.

DeepSpeed keeps w = g = 2 bytes and o = 12, of master weights and Adam moments; elsewhere weights, gradients and the two
moments have the type the weights were loaded in, float32 with FSDP under mixed precision, and autocast holds 2-byte
copies of float32 weights. A layer keeps a = 8 h + 4 q + 2 kv + 4 I values per token for its backward, with q and kv
the widths of queries, and of keys and values together, and I the inner width; k (2 h + 4 I) in the place of 4 I for k
experts. With the layers of transformers and SDPA attention that is between a tenth too little and two fifths too much.
Buffers of communication and fragmentation come on top: leave a tenth of the device free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .launch import Launch
from .shapes import ModelShapes

GIB = 2**30
# Assumed size of a support when nothing bounds it.
UNBOUNDED_SUPPORT = 100
_CANDIDATE_BYTES = 4
_TOKEN_BYTES = 8 + 4 + 4 + 1  # offset, id, log-prob, loss mask


@dataclass(frozen=True)
class Batch:
    """Sizes of what is trained on.

    Attributes:
        micro: completions a device scores at a time.
        generation: completions a device generates at a time.
        prompt, completion: longest, in tokens.
        support: candidates per token, at most.
    """

    micro: int
    generation: int
    prompt: int
    completion: int
    support: int

    @property
    def width(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True)
class Item:
    """One term.

    Attributes:
        name: what it is.
        bytes: how much.
        note: where the figure comes from.
        on_host: in host memory rather than the device's.
    """

    name: str
    bytes: float
    note: str
    on_host: bool = False


def compute_bytes(dtype: str, mixed: str) -> int:
    """Bytes of an activation, for weights loaded as `dtype` ("auto" and `None` stand for float32, TRL's default)."""
    return 2 if mixed != "no" or dtype in ("bfloat16", "float16") else 4


def model_items(
    shapes: ModelShapes, launch: Launch, dtype: str, mixed: str, frozen_bits: int | None = None, reference: bool = False
) -> Iterator[Item]:
    """Weights, gradients, optimizer and reference model.

    Args:
        shapes: of the model.
        launch: what shards it.
        dtype: type that the weights are loaded in.
        mixed: "no", "bf16" or "fp16".
        frozen_bits: 4 or 8 when the weights that are not trained are quantized.
        reference: whether a second model is held.
    """
    width, fsdp = compute_bytes(dtype, "no"), launch.method.startswith("FSDP")
    if launch.is_deepspeed and mixed != "no":
        weight, state = 2, 12
    else:
        weight = 4 if fsdp and mixed != "no" else width
        state = 2 * weight
    tensor, n = launch.tensor_parallel, launch.processes
    frozen = 0 if shapes.trainable == shapes.parameters else shapes.parameters  # an adapter comes beside the model
    whole = shapes.trainable * weight + frozen * (frozen_bits / 8 if frozen_bits else weight)
    weights = Item(
        "weights",
        whole / (n if launch.shards_weights else tensor),
        f"{shapes.parameters:,} parameters",
        launch.offloads_weights,
    )
    yield weights
    gradients = shapes.trainable * weight / (n if launch.shards_gradients else tensor)
    yield Item("gradients", gradients, f"{shapes.trainable:,} trained", launch.offloads_weights)
    optimizer = shapes.trainable * state / (n if launch.shards_optimizer else tensor)
    yield Item("optimizer", optimizer, f"Adam: {state} bytes per trained parameter", launch.offloads_optimizer)
    if launch.shards_weights:
        gathered = 2 * shapes.largest_unit * compute_bytes(dtype, mixed)
        yield Item("gathered weights", gathered, "two units: one in use, the next on its way")
    if mixed != "no" and weight == 4 and not fsdp:
        copies = 2 * shapes.parameters / tensor
        yield Item("autocast copies", copies, "of float32 weights, in 2 bytes; none with --dtype bfloat16")
    if reference:
        yield Item("reference model", weights.bytes, "beta > 0 and no adapter", launch.offloads_weights)


def batch_items(shapes: ModelShapes, batch: Batch, compute: int, checkpointing: bool) -> Iterator[Item]:
    """Activations and scoring of one micro-batch; `compute` is the bytes of an activation."""
    tokens = batch.micro * batch.width
    one_layer = tokens * compute * shapes.kept_per_layer
    inputs = tokens * compute * shapes.hidden * shapes.layers
    activations = inputs + one_layer if checkpointing else shapes.layers * one_layer
    how = "each layer's input and one layer" if checkpointing else "every layer; gradient checkpointing is off"
    yield Item("activations", activations, f"{batch.micro} x {batch.width} tokens, {how}")
    rows = min(shapes.vocab, batch.micro * batch.completion * batch.support)
    scoring = 8 * tokens * shapes.hidden + 4 * shapes.hidden * rows
    yield Item("scoring", scoring, f"hidden states, and up to {rows:,} candidate rows")


def traces_item(shapes: ModelShapes, batch: Batch, replays_support: bool, replays_routes: bool) -> Item:
    """Traces of one generation batch, on the host."""
    completions = batch.generation * batch.completion
    total = completions * (_TOKEN_BYTES + (_CANDIDATE_BYTES * batch.support if replays_support else 0))
    note = f"{completions:,} tokens"
    if replays_support:
        note += f", at most {batch.support} candidates each"
    if replays_routes:
        width = shapes.moe_layers * shapes.experts_per_token * (1 if shapes.experts <= 256 else 2)
        total += batch.generation * batch.width * width
        note += f", {width} bytes of routes per token"
    return Item("traces", total, note, on_host=True)
