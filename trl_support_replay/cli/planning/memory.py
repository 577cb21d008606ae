"""Memory of one device, term by term.

With P parameters of which P_t are trained, n processes, b completions a micro-batch, s tokens in each (prompt and
completion), h hidden size, L layers, and the bytes w of a weight, g of a gradient, o of the optimizer's state for a
parameter, and e of an activation:

    weights      w P            / n with ZeRO-3 or FSDP, and then two gathered units of e bytes per parameter besides
    gradients    g P_t          / n from ZeRO-2 on, and with FSDP
    optimizer    o P_t          / n from ZeRO-1 on, and with FSDP
    reference    w P            when beta > 0 and there is no adapter, / n as the weights
    activations  b s e h L      with gradient checkpointing, and one layer's a(e) b s; without it, L of those
    scoring      b s h 8        the hidden states and their gradient in float32, and
                 4 h min(V, b c K)   the gradient of the candidates' rows, c tokens a completion with supports of K
    engine       a colocated vLLM takes the part of the device that it is given; nothing in server mode
    traces       4 K + 17 bytes per token of a generation batch on the host (ids, offset, log-prob, loss mask),
                 and L_moe k bytes (2 L_moe k above 256 experts) for its routes

Tensor parallelism over t processes divides the first four by t where they are not divided by n already.

The bytes follow from how precision is mixed: DeepSpeed keeps 2-byte weights and gradients and 12 bytes of master
weights and Adam moments; elsewhere weights, gradients and Adam's two moments have the type the weights were loaded in,
float32 with FSDP under mixed precision, and autocast holds 2-byte copies of float32 weights.

What a decoder layer keeps for its backward, in bytes per token, counted in the layers of transformers with SDPA
attention (no term in s^2):

    a(e) = h (4 e + 8) + 2 e q + e kv + 4 e I            Llama
         + (e + 4) (q + kv / 2)                          with normalised queries and keys
    and for k experts of width I in place of 4 e I:  k (2 e h + 4 e I)

with q and kv the widths of queries, and of keys and values together; what there is per head or expert is left out.
Buffers of communication and fragmentation come on top: leave a tenth of the device free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .launch import Launch
from .shapes import ModelShapes

GIB = 2**30
# What is taken for the size of a support when nothing bounds it.
UNBOUNDED_SUPPORT = 100
_CANDIDATE_BYTES = 4
_TOKEN_BYTES = 8 + 4 + 4 + 1  # offset, id, log-prob, loss mask


@dataclass(frozen=True)
class Precision:
    """Bytes a parameter and an activation take.

    Attributes:
        weight: of a trained weight.
        frozen: of a weight that is not trained.
        gradient: of a gradient.
        optimizer: of the optimizer's state for one trained parameter.
        compute: of an activation, and of a gathered weight.
        autocast_copy: of the copy of a weight that autocast holds.
    """

    weight: float
    frozen: float
    gradient: float
    optimizer: float
    compute: int
    autocast_copy: int = 0


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


# Bytes of state a parameter, relative to the weight's own type; those that do not scale with it stand in bytes.
_STATES_IN_WEIGHTS = {"sgd": 0, "adagrad": 1, "rmsprop": 1, "lion_32bit": 1}
_STATES_IN_BYTES = {"adafactor": 0, "adamw_bnb_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "lion_8bit": 1}


def precision(launch: Launch, dtype: str, mixed: str, optimizer: str, frozen_bits: int | None = None) -> Precision:
    """Bytes under a launch.

    Args:
        launch: what shards the model.
        dtype: type that the weights are loaded in; "auto" and `None` stand for float32, TRL's default.
        mixed: "no", "bf16" or "fp16".
        optimizer: `optim` of the training arguments; one that is not known here is taken for Adam.
        frozen_bits: 4 or 8 when the weights that are not trained are quantized.
    """
    loaded = 2 if dtype in ("bfloat16", "float16") else 4
    compute = 2 if mixed != "no" else loaded
    if launch.is_deepspeed and mixed != "no":
        return Precision(2, frozen_bits / 8 if frozen_bits else 2, 2, 12, 2)
    weight = 4 if launch.method.startswith("FSDP") and mixed != "no" else loaded
    state = _STATES_IN_BYTES.get(optimizer, _STATES_IN_WEIGHTS.get(optimizer, 2) * weight)
    copy = 2 if mixed != "no" and weight == 4 and not launch.method.startswith("FSDP") else 0
    return Precision(weight, frozen_bits / 8 if frozen_bits else weight, weight, state, compute, copy)


def layer_bytes(shapes: ModelShapes, compute: int) -> float:
    """What one decoder layer keeps for its backward, in bytes per token: a(e) of the module's docstring."""
    e = compute
    kept = shapes.hidden * (4 * e + 8) + 2 * e * shapes.query_width + e * shapes.kv_width
    if shapes.qk_norm:
        kept += (e + 4) * (shapes.query_width + shapes.kv_width // 2)
    if shapes.experts:
        return kept + shapes.experts_per_token * (2 * e * shapes.hidden + 4 * e * shapes.inner)
    return kept + 4 * e * shapes.inner


def model_items(shapes: ModelShapes, launch: Launch, bytes_of: Precision, reference: bool) -> list[Item]:
    """Weights, gradients, optimizer and reference model."""
    n = launch.processes
    frozen = 0 if shapes.trainable == shapes.parameters else shapes.parameters  # an adapter comes beside the model
    whole = shapes.trainable * bytes_of.weight + frozen * bytes_of.frozen
    weights = whole / (n if launch.shards_weights else launch.tensor_parallel)
    gradients = shapes.trainable * bytes_of.gradient / (n if launch.shards_gradients else launch.tensor_parallel)
    optimizer = shapes.trainable * bytes_of.optimizer / (n if launch.shards_optimizer else launch.tensor_parallel)
    copies = shapes.parameters * bytes_of.autocast_copy / launch.tensor_parallel
    items = [
        Item("weights", weights, f"{shapes.parameters:,} parameters", launch.offloads_weights),
        Item("gradients", gradients, f"{shapes.trainable:,} trained", launch.offloads_weights),
        Item("optimizer", optimizer, f"{bytes_of.optimizer:g} bytes per trained parameter", launch.offloads_optimizer),
    ]
    if launch.shards_weights:
        gathered = 2 * shapes.largest_unit * bytes_of.compute
        items.append(Item("gathered weights", gathered, "two units: one in use, the next on its way"))
    if copies:
        items.append(Item("autocast copies", copies, "of float32 weights, in 2 bytes; none with --dtype bfloat16"))
    if reference:
        items.append(replace(items[0], name="reference model", bytes=weights, note="beta > 0 and no adapter"))
    return items


def batch_items(shapes: ModelShapes, batch: Batch, bytes_of: Precision, checkpointing: bool) -> list[Item]:
    """Activations and scoring of one micro-batch."""
    tokens = batch.micro * batch.width
    one_layer = tokens * layer_bytes(shapes, bytes_of.compute)
    inputs = tokens * bytes_of.compute * shapes.hidden * shapes.layers
    activations = inputs + one_layer if checkpointing else shapes.layers * one_layer
    how = "each layer's input and one layer" if checkpointing else "every layer; gradient checkpointing is off"
    rows = min(shapes.vocab, batch.micro * batch.completion * batch.support)
    scoring = 8 * tokens * shapes.hidden + 4 * shapes.hidden * rows
    return [
        Item("activations", activations, f"{batch.micro} x {batch.width} tokens, {how}"),
        Item("scoring", scoring, f"hidden states, and up to {rows:,} candidate rows"),
    ]


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


def kv_bytes(shapes: ModelShapes, compute: int) -> int:
    """The engine's cache of keys and values, in bytes per token."""
    return shapes.layers * shapes.kv_width * compute
