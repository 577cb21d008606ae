"""SGLang: sampling parameters of `/generate`. Its engine is not installed where this is tested."""

from __future__ import annotations

from .effects import Effect, Field, harmless, removes, shifts, truncates, unreplayable

_GRAMMAR = "it is not established that SGLang's mask leaves out what a grammar removes"

REQUEST: dict[str, Field] = {
    "temperature": Field(Effect.SCALES),
    "top_p": truncates(1.0),
    "top_k": truncates(0, -1),
    "min_p": truncates(0.0),
    "min_new_tokens": removes(0),
    "json_schema": unreplayable(_GRAMMAR),
    "regex": unreplayable(_GRAMMAR),
    "ebnf": unreplayable(_GRAMMAR),
    "structural_tag": unreplayable(_GRAMMAR),
    "repetition_penalty": shifts(1.0),
    "presence_penalty": shifts(0.0),
    "frequency_penalty": shifts(0.0),
    "logit_bias": shifts({}),
    "custom_params": unreplayable("custom logits processors read it", {}),
    "n": unreplayable("the trainer asks for one completion for each prompt it repeats", 1),
    **harmless("""
        max_new_tokens stop stop_token_ids stop_regex ignore_eos skip_special_tokens spaces_between_special_tokens
        no_stop_trim stream_interval sampling_seed
    """),
}
