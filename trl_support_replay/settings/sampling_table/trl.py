"""TRL 1.15 and 1.16: what `GRPOConfig` and `RLOOConfig` add to transformers' `TrainingArguments`."""

from __future__ import annotations

from .effects import Effect, Field, harmless, removes, reports, shifts, truncates

# With any engine. `generation_kwargs` holds settings of the engine itself, which have tables of their own.
ALWAYS: dict[str, Field] = {
    "temperature": Field(Effect.SCALES),
    "top_p": truncates(1.0),
    "top_k": truncates(0, -1),
    "min_p": truncates(0.0),
    "repetition_penalty": shifts(1.0),
    **harmless("""
        generation_kwargs max_completion_length num_generations num_generations_eval chat_template_kwargs
        cache_implementation pad_to_multiple_of transformers_continuous_batching_config use_vllm vllm_mode
        vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port
        vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
        vllm_tensor_parallel_size

        model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
        ds3_gather_for_generation shuffle_dataset generation_batch_size steps_per_generation beta num_iterations
        epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
        vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type
        mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
        entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap
        off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal num_completions_to_print
        log_unique_prompts log_completions_hub_repo normalize_advantages reward_clip_range
    """),
}

WITH_VLLM: dict[str, Field] = {"vllm_structured_outputs_regex": removes()}

# What the recorded supports need, continuous batching has. It is refused while routes are recorded.
_ROUTES = "continuous batching does not tell which tokens its routers see, which routed_experts_replay=True needs"
WITHOUT_VLLM: dict[str, Field] = {
    "use_transformers_continuous_batching": reports(_ROUTES, False, None),
    "use_transformers_paged": reports(_ROUTES, False, None),
}
