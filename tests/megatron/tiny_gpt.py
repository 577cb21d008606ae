"""A tiny mixture-of-experts GPT of megatron-core, the same whatever the way it is split over ranks."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB, WIDTH, HIDDEN, EXPERTS, TOP_K = 96, 16, 32, 8, 2

# How a run is split. `layers` and `moe_layer_freq` describe the model, the rest goes to Megatron as it is.
PARALLEL_SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}


def config(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=64,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    return TransformerConfig(**{**settings, **changes})


def initialize_parallel(**sizes: Any) -> None:
    """Megatron's groups for these sizes, over all ranks, in place of any that were there."""
    parallel_state.destroy_model_parallel()
    forget_balancing_losses()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)


def forget_balancing_losses() -> None:
    """Drop what megatron-core keeps in the process: a log sized for the first model, and the last schedule's scale."""
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:  # 0.18 and newer
        from megatron.core.transformer.moe import moe_logging

        moe_logging.destroy_moe_metrics_tracker()


def build_chunks(
    cfg: TransformerConfig, *, tied: bool = False, packed: bool = False, vocab: int = VOCAB, **model: Any
) -> list[GPTModel]:
    """This rank's model chunks, with weights that depend on nothing but each parameter's global name."""
    num_chunks = cfg.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(num_chunks or 1):
        vp_stage = stage if num_chunks else None
        spec = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
        if packed or cfg.context_parallel_size > 1:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = GatheringAttention
        chunk = GPTModel(
            config=cfg,
            transformer_layer_spec=spec,
            vocab_size=vocab,
            max_sequence_length=4 * WIDTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            vp_stage=vp_stage,
            **model,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        initialize_by_name(chunk)
        chunks.append(chunk.train())
    return chunks


def initialize_by_name(chunk: GPTModel) -> None:
    for name, parameter in chunk.named_parameters():
        whole = whole_parameter(chunk, name, parameter)
        with torch.no_grad():
            parameter.copy_(local_part(name, parameter, whole))


def global_name(chunk: GPTModel, name: str) -> str:
    """A parameter's name in the model that is not split."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found:
        layer = chunk.decoder.layers[int(found[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{name[found.end() :]}"
    found = re.search(r"local_experts\.(\d+)\.", name)
    if found:
        per_rank = EXPERTS // parallel_state.get_expert_model_parallel_world_size()
        expert = int(found[1]) + parallel_state.get_expert_model_parallel_rank() * per_rank
        name = name.replace(found[0], f"local_experts.{expert}.")
    return name


def whole_parameter(chunk: GPTModel, name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    name = global_name(chunk, name)
    shape = list(parameter.shape)
    if _is_split(parameter):
        shape[parameter.partition_dim] *= _tensor_group(name)[0]
    if "norm" in name:
        return torch.ones(shape)
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    scale = 1.0 if "router" in name else 0.05
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def local_part(name: str, parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole parameter, or of its gradient."""
    size, rank = _tensor_group(name)
    if size == 1 or not _is_split(parameter):
        return whole
    if "linear_fc1" in name:  # gate and up projection, each split
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, parameter.partition_dim)[rank]


def _is_split(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False) and parameter.partition_dim >= 0


def _tensor_group(name: str) -> tuple[int, int]:
    if "local_experts" in name:
        return parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def tokens(seed: int, batch: int = 2, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, each `[B, S]`."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCAB, (2, batch, width), generator=generator)
    return ids, labels


def routes(seed: int, num_layers: int, batch: int = 2, width: int = WIDTH, top_k: int = TOP_K) -> torch.Tensor:
    """Random routes `[B, S, L, k]`, uint8."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, width, num_layers, EXPERTS, generator=generator)
    return scores.topk(top_k).indices.to(torch.uint8)


def causal_mask(width: int) -> torch.Tensor:
    """`[1, 1, S, S]`, True where attention is not allowed."""
    return torch.ones(width, width, dtype=torch.bool).triu(1)[None, None]


class _GatherParts(torch.autograd.Function):
    """The parts of all ranks of a group; the gradient of a part is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = torch.stack([grad.contiguous() for grad in grads])
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def zig_zag(values: torch.Tensor, lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """The part of `values` `[..., S]` on one of `size` context-parallel ranks, sequence by sequence."""
    parts = []
    for sequence in values.split(list(lengths), dim=-1):
        chunks = sequence.chunk(2 * size, dim=-1)
        parts += [chunks[rank], chunks[-1 - rank]] if size > 1 else [sequence]
    return torch.cat(parts, dim=-1)


class GatheringAttention(DotProductAttention):
    """megatron-core's local attention, which refuses context parallelism and packed sequences, made to take both.

    Keys and values of all context-parallel ranks are put in order, and the mask given says who sees whom.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)

    def forward(self, query, key, value, attention_mask, *args, packed_seq_params=None, **kwargs):  # type: ignore[override]
        group = parallel_state.get_context_parallel_group()
        width = attention_mask.shape[-2]
        lengths = [width]
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            query, key, value = query[:, None], key[:, None], value[:, None]
        places = [zig_zag(torch.arange(width), lengths, group.size(), rank) for rank in range(group.size())]
        order = torch.cat(places).argsort()

        def whole(part: torch.Tensor) -> torch.Tensor:
            return torch.cat(_GatherParts.apply(part.contiguous(), group))[order]

        rows = places[group.rank()]
        return super().forward(query, whole(key), whole(value), attention_mask[..., rows, :], *args, **kwargs)
