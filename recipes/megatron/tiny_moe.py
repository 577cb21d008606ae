"""The tiny mixture-of-experts GPT that `make_traces.py` samples from and `train.py` trains, split as asked for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

try:
    import transformer_engine  # noqa: F401

    HAVE_TRANSFORMER_ENGINE = True
except ImportError:
    HAVE_TRANSFORMER_ENGINE = False

VOCAB, LAYERS, EXPERTS, TOP_K = 256, 4, 8, 2
EOS, PAD = 1, 0


def add_split_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size; with sequence parallelism above 1")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--virtual-pipeline", type=int, default=None, help="model chunks a stage (interleaved)")
    parser.add_argument("--context", type=int, default=1, help="context-parallel size; needs Transformer Engine")
    parser.add_argument("--expert", type=int, default=1, help="expert-parallel size")
    parser.add_argument("--recompute", action="store_true", help="recompute all layers in backward")


def initialize(split: argparse.Namespace) -> torch.device:
    """Process group and Megatron's groups, under torchrun or alone; the device of this rank."""
    alone: dict[str, Any] = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}  # needs no port
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo", **({} if "RANK" in os.environ else alone))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tensor,
        pipeline_model_parallel_size=split.pipeline,
        virtual_pipeline_model_parallel_size=split.virtual_pipeline,
        context_parallel_size=split.context,
        expert_model_parallel_size=split.expert,
        # Whole experts on each rank; without expert parallelism Megatron splits them like the dense layers.
        expert_tensor_parallel_size=1 if split.expert > 1 else None,
    )
    model_parallel_cuda_manual_seed(0)
    return torch.device("cuda") if on_gpu else torch.device("cpu")


def build_config(split: argparse.Namespace) -> TransformerConfig:
    settings: dict[str, Any] = {}
    if split.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=64,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.2,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=split.tensor,
        sequence_parallel=split.tensor > 1,
        pipeline_model_parallel_size=split.pipeline,
        virtual_pipeline_model_parallel_size=split.virtual_pipeline,
        # Two interleaved stages exchange wrong activations with batched point-to-point communication.
        overlap_p2p_comm=split.virtual_pipeline is not None,
        batch_p2p_comm=split.virtual_pipeline is None,
        context_parallel_size=split.context,
        expert_model_parallel_size=split.expert,
        expert_tensor_parallel_size=1 if split.expert > 1 else None,
        # Fused kernels that need more than megatron-core.
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **settings,
    )


def build_chunks(config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """This rank's model chunks; one unless the pipeline is interleaved."""
    if config.context_parallel_size > 1 and not HAVE_TRANSFORMER_ENGINE:
        raise SystemExit("Context parallelism needs the attention of Transformer Engine, which is not installed.")
    torch.manual_seed(0)
    chunks = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=HAVE_TRANSFORMER_ENGINE, normalization="RMSNorm", vp_stage=vp_stage
        )
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=256,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
        ).to(device)
        chunk.model_type = ModelType.encoder_or_decoder
        chunks.append(chunk)
    return chunks


def sharded_state(chunks: list[GPTModel]) -> dict[str, Any]:
    return {f"chunk{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}


def save(chunks: list[GPTModel], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(sharded_state(chunks), str(folder))


def load(chunks: list[GPTModel], folder: Path) -> None:
    """Weights saved under any split."""
    state = dist_checkpointing.load(sharded_state(chunks), str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"chunk{i}"])
