"""vLLM 0.22 to 0.31: `SamplingParams`, engine arguments, and the configuration of a built engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .effects import Effect, Field, biases, fixes, harmless, removes, reports, shifts, truncates, unreplayable

_OWNED = "the capture sets it"
_SEARCH = "the completion is found by a search, not drawn token by token"
_DRAFTS = "it is not established that accepted draft tokens are drawn from the recorded support"
_CODE = "code that is not vLLM's takes part in drawing tokens"
_INTERNAL = "vLLM sets it itself"

REQUEST: dict[str, Field] = {
    "temperature": Field(Effect.SCALES),
    "top_p": truncates(1.0),
    "top_k": truncates(0, -1),
    "min_p": truncates(0.0),
    "min_tokens": removes(0),
    "bad_words": removes([]),
    "allowed_token_ids": removes([]),
    "structured_outputs": removes(),
    "repetition_penalty": shifts(1.0),
    "presence_penalty": shifts(0.0),
    "frequency_penalty": shifts(0.0),
    "logit_bias": biases(),
    "thinking_token_budget": fixes(),
    "trace_decode_token_ids": unreplayable("its tokens are given beforehand, not drawn"),
    "logits_processors": unreplayable(_CODE, []),
    "extra_args": unreplayable("custom logits processors read it", {}),
    "n": unreplayable("the trainer asks for one completion for each prompt it repeats", 1),
    "best_of": unreplayable(_SEARCH, 1),
    "use_beam_search": unreplayable(_SEARCH, False),
    "truncate_prompt_tokens": unreplayable("the trainer scores with the whole prompt"),
    "logprobs": reports(_OWNED),
    "flat_logprobs": reports(_OWNED),
    "logprob_token_ids": reports(_OWNED, None),
    "routed_experts_prompt_start": reports(_OWNED, 0),
    "prompt_logprobs": reports("the engine returns nothing that the trainer could use", None),
    "prompt_logprob_start": reports("the engine returns nothing that the trainer could use", None, 0),
    "prompt_logprob_token_ids": reports("the engine returns nothing that the trainer could use", None),
    "_eos_token_id": unreplayable(_INTERNAL),
    "_all_stop_token_ids": unreplayable(_INTERNAL),
    "_bad_words_token_ids": unreplayable(_INTERNAL),
    # `watermarking` is a switch for requests of an engine with a `watermark_config`, which is refused. A repeated
    # pattern only ends a completion.
    **harmless("""
        seed stop stop_token_ids ignore_eos max_tokens detokenize skip_special_tokens spaces_between_special_tokens
        include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length
        skip_reading_prefix_cache repetition_detection watermarking
    """),
}


def most_allowed(cutting: Mapping[str, Any]) -> int:
    """Number of tokens that a request's constraints leave at most for any position, where they tell; else 0.

    Of a choice, what is allowed next are the tokens that the rest of a choice begins with, and the ends. A number that
    is too small is no fault: it is sent as the request's `top_k`.

    Args:
        cutting: settings of a request that cut tokens, with their values.
    """
    ids = cutting.get("allowed_token_ids")
    structured = cutting.get("structured_outputs")
    choice = structured.get("choice") if isinstance(structured, Mapping) else getattr(structured, "choice", None)
    sizes = [len(set(ids))] if ids else []
    if choice:
        # Some vocabularies have two tokens for a byte.
        sizes.append(2 * sum(len(str(text).encode()) for text in choice) + 16)
    return min(sizes, default=0)


# What makes the engine's logits differ from the policy's (data types, quantization, overrides of the model, kernels) is
# not for this table: `replay_check` compares the log-probs of both.
ENGINE: dict[str, Field] = {
    "speculative_config": unreplayable(_DRAFTS),
    "spec_method": unreplayable(_DRAFTS),
    "spec_model": unreplayable(_DRAFTS),
    "spec_tokens": unreplayable(_DRAFTS),
    "watermark_config": unreplayable("a watermark chooses tokens by a key, they are not drawn"),
    "diffusion_config": unreplayable("a diffusion model does not draw its tokens one after another"),
    "enable_trace_replay": unreplayable("requests may then give their tokens beforehand", False),
    "logits_processors": unreplayable(_CODE, []),
    "scheduler_cls": unreplayable(_CODE),
    "worker_cls": unreplayable(_CODE, "auto"),
    "video_pruning_rate": unreplayable("the engine drops parts of videos that the trainer scores with", 0, 0.0),
    "logprobs_mode": Field(
        Effect.UNREPLAYABLE,
        ("processed_logprobs",),
        "the recorded log-probs would not be those of the distribution that tokens are drawn from",
    ),
    # Default parameters of an engine (`generation_config`, `override_generation_config`) do not count: each request
    # states its own. `additional_config` is for the kernels of a platform. `worker_extension_cls` only adds
    # methods; vLLM refuses one that replaces any. Capture sets `return_sampling_mask` and the like itself, last.
    **harmless("""
        model model_weights served_model_name tokenizer hf_config_path runner convert skip_tokenizer_init
        enable_prompt_embeds tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        load_format config_format dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes
        max_cudagraph_capture_size ir_op_priority revision code_revision hf_token hf_overrides model_class_overrides
        tokenizer_revision quantization quantization_config allow_deprecated_quantization enforce_eager chat_template
        model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location model_impl
        override_attention_dtype calculate_kv_scales

        enable_return_routed_experts return_sampling_mask max_logprobs use_fp64_gumbel enable_batch_sharded_sampling
        generation_config override_generation_config structured_outputs_config reasoning_config reasoning_parser
        reasoning_parser_plugin aux_output_config tokens_only stream_interval

        distributed_executor_backend pipeline_parallel_size master_addr master_port nnodes node_rank
        distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
        tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend
        dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size data_parallel_rank
        data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
        enable_expert_parallel enable_ep_weight_filter moe_backend linear_backend sparse_indexer_topk_backend
        all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
        dp_sync_interval dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config enable_eplb
        expert_placement_strategy _api_process_count _api_process_rank max_parallel_loading_workers
        disable_custom_all_reduce ray_workers_use_nsight worker_extension_cls enable_nccl_comm_suspend
        weight_transfer_config fault_tolerance_config enable_fault_tolerance shutdown_timeout

        block_size enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit
        disable_sliding_window disable_cascade_attn offload_backend cpu_offload_gb cpu_offload_params
        offload_group_size offload_num_in_group offload_prefetch_step offload_params gpu_memory_utilization
        kv_cache_memory_bytes num_gpu_blocks_override watermark disable_hybrid_kv_cache_manager
        kv_cache_dtype_skip_layers kv_sharing_fast_prefill kv_offloading_size kv_offloading_backend
        kv_transfer_config kv_events_config ec_transfer_config ec_manager_config swa_bounded_replay
        enable_sleep_mode enable_cumem_allocator sleep_preserve_parameter_names

        max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold
        long_prefill_token_threshold_adaptive max_num_seqs max_num_active_seqs max_num_queued_reqs
        max_num_queued_tokens max_num_partial_prefills max_long_partial_prefills enable_chunked_prefill
        disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval scheduling_policy
        async_scheduling

        language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs
        mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
        mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin io_processor_plugin renderer_num_workers skip_mm_profiling
        video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize
        enable_mm_processor_stats

        enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype
        lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras max_lora_cls_labels

        pooler_config compilation_config attention_config attention_backend engram_config mamba_config kernel_config
        enable_flashinfer_autotune mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
        mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        gdn_prefill_backend kda_prefill_backend kda_decode_backend optimization_level performance_mode
        additional_config

        disable_log_stats aggregate_engine_logging enable_log_requests log_config_file log_level logging_config
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
        kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
        enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose profiler_config
        fail_on_environ_validation
    """),
}

# `VllmConfig` and its `ModelConfig` also hold what vLLM derives.
BUILT: dict[str, Field] = {
    **ENGINE,
    # The import path of our own, which is vLLM's scheduler with one attribute set.
    "scheduler_cls": unreplayable(_CODE, "trl_support_replay.engine_outputs.vllm_worker.capture_scheduler"),
    **harmless("""
        model_config cache_config parallel_config scheduler_config device_config load_config offload_config lora_config
        observability_config quant_config instance_id hf_config hf_text_config word_embeddings_untied_by_checkpoint
        spec_target_max_model_len sleep_mode_backend multimodal_config is_submodel_config
    """),
}
