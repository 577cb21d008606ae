"""transformers 5: `GenerationConfig`, and what `generate` takes beside it."""

from __future__ import annotations

from .effects import Effect, Field, biases, fixes, harmless, removes, shifts, truncates, unreplayable

_SEARCH = "the completion is found by a search, not drawn token by token"
_DRAFTS = "it is not established that accepted draft tokens are drawn from the recorded support"

_UNREPEATED = "it shifts logits in a way that scoring does not repeat"

# Settings that continuous batching applies as `generate` does. It drops some others, and shows those that look at the
# tokens so far only the latest one.
IN_CONTINUOUS_BATCHING = (
    "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "suppress_tokens",
)  # fmt: skip

CONFIG: dict[str, Field] = {
    "temperature": Field(Effect.SCALES),
    "top_p": truncates(1.0),
    "top_k": truncates(0),
    "min_p": truncates(0.0),
    "typical_p": truncates(1.0),
    "epsilon_cutoff": truncates(0.0),
    "eta_cutoff": truncates(0.0),
    "top_h": truncates(),
    "min_length": removes(0),
    "min_new_tokens": removes(0),
    "bad_words_ids": removes([]),
    "suppress_tokens": removes([]),
    "begin_suppress_tokens": removes([]),
    "no_repeat_ngram_size": removes(0),
    "encoder_no_repeat_ngram_size": removes(0),
    "constraints": unreplayable(_SEARCH),
    "force_words_ids": unreplayable(_SEARCH),
    "forced_bos_token_id": fixes(),
    "forced_eos_token_id": fixes(),
    "repetition_penalty": shifts(1.0),
    "encoder_repetition_penalty": Field(Effect.SHIFTS, (None, 1.0), _UNREPEATED),
    "exponential_decay_length_penalty": Field(Effect.SHIFTS, (None,), _UNREPEATED),
    "sequence_bias": biases(),
    "guidance_scale": unreplayable("its logits take a second forward, which the trainer does not repeat", 1, 1.0),
    "watermarking_config": unreplayable("a watermark moves logits by a key that the trainer does not have"),
    "logits_processor": unreplayable("code that is not transformers' takes part in drawing tokens", []),
    "do_sample": unreplayable("greedy decoding has nothing to replay", True),
    "num_beams": unreplayable(_SEARCH, 1),
    "num_beam_groups": unreplayable(_SEARCH, 1),
    "diversity_penalty": unreplayable(_SEARCH, 0.0),
    "penalty_alpha": unreplayable(_SEARCH, 0.0),
    "dola_layers": unreplayable(_SEARCH),
    "num_return_sequences": unreplayable("the trainer asks for one completion for each prompt it repeats", 1),
    "remove_invalid_values": unreplayable("infinite and NaN logits are replaced without the trainer knowing", False),
    "token_healing": unreplayable("it samples the end of the prompt anew, and the trainer scores the prompt", False),
    "stop_strings": unreplayable("TRL gives `generate` no tokenizer, without which it cannot find them", []),
    "return_dict_in_generate": unreplayable("TRL takes token ids from `generate`", False),
    "assistant_model": unreplayable(_DRAFTS),
    "assistant_early_exit": unreplayable(_DRAFTS),
    "assistant_ensemble_weight": unreplayable(_DRAFTS),
    "assistant_confidence_threshold": unreplayable(_DRAFTS, 0.4),
    "assistant_lookbehind": unreplayable(_DRAFTS, 10),
    "prompt_lookup_num_tokens": unreplayable(_DRAFTS),
    "is_assistant": unreplayable(_DRAFTS, False),
    "speculation_type": unreplayable(_DRAFTS),
    "use_mtp": unreplayable(_DRAFTS, False),
    # Some only count for a search or beside drafts, which are refused. `renormalize_logits` adds the same number to all
    # of a token's logits. `generate` does not read `seed`, which is vLLM's.
    **harmless("""
        max_length max_new_tokens max_time eos_token_id pad_token_id bos_token_id decoder_start_token_id
        renormalize_logits use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config
        disable_compile continuous_batching_config low_memory output_attentions output_hidden_states output_scores
        output_logits early_stopping length_penalty max_matching_ngram_size num_assistant_tokens
        num_assistant_tokens_schedule target_lookbehind transformers_version _commit_hash _from_model_config seed
    """),
}
