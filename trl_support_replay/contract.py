"""Which sampling settings can be replayed exactly.

Replaying a support is exact when the engine drew each token from `softmax(logits / temperature)` restricted to the
recorded set, and nothing else. Every setting that changes the distribution in another way (penalties, biases, forced
tokens, a second temperature, search instead of sampling) is refused here, before a model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class UnreplayableSettingError(ValueError):
    """A setting under which recorded supports would not give the sampler's distribution.

    Attributes:
        setting: name of the offending setting.
        value: the value it has.
    """

    def __init__(self, setting: str, value: Any, reason: str, remedy: str):
        super().__init__(f"{setting}={value!r} cannot be replayed: {reason}. {remedy}.")
        self.setting = setting
        self.value = value


@dataclass(frozen=True)
class SamplingSettings:
    """The settings that every engine and the trainer must agree on, in one spelling.

    Attributes:
        temperature: softmax temperature, > 0 when replay is on.
        top_p: nucleus mass in (0, 1]; 1.0 is off.
        top_k: number of candidates kept; 0 is off.
        min_p: least probability relative to the best token; 0.0 is off.
        other: names of further truncating warpers of `transformers.generate` that are on (`typical_p`, ...).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    other: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The settings that truncate, as a user wrote them."""
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1.0, "min_p": self.min_p > 0.0}
        return ", ".join([f"{name}={getattr(self, name)}" for name, is_on in on.items() if is_on] + list(self.other))

    @property
    def truncates(self) -> bool:
        """Whether any token can be cut from the distribution, that is, whether there is something to replay."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or bool(self.other)


def normalize_top_k(top_k: int | None) -> int:
    """One spelling for "off": engines write `None`, `0` and `-1` for it, here it is always `0`."""
    return 0 if top_k is None or top_k <= 0 else int(top_k)


# `generate` warpers that only remove tokens. The Transformers capture reads the processed scores, so their supports are
# exact; the engines do not know them. Each maps to the value that means "off".
_TRANSFORMERS_TRUNCATION = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}

_SEARCH = "the completion is found by a search, not drawn token by token"
_SHIFTS = "it moves the logits in a way that the trainer does not repeat"
_FORCES = "it forces or forbids tokens by rules that the trainer does not repeat"
_OWNED = "the capture sets it"

# setting -> (values that leave the distribution alone, why any other value does not)
_VLLM_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "repetition_penalty": ((None, 1.0), _SHIFTS),
    "presence_penalty": ((None, 0.0), _SHIFTS),
    "frequency_penalty": ((None, 0.0), _SHIFTS),
    "logit_bias": ((None, {}), _SHIFTS),
    "logits_processors": ((None, []), _SHIFTS),
    "extra_args": ((None, {}), "custom logits processors read it"),
    "bad_words": ((None, []), _FORCES),
    "allowed_token_ids": ((None, []), _FORCES),
    "structured_outputs": ((None,), _FORCES),
    "guided_decoding": ((None,), _FORCES),
    "thinking_token_budget": ((None,), _FORCES),
    "n": ((None, 1), "the trainer asks for one completion for each prompt it repeats"),
    "best_of": ((None, 1), _SEARCH),
    "use_beam_search": ((None, False), _SEARCH),
    "logprobs": ((), _OWNED),
    "flat_logprobs": ((), _OWNED),
    "logprob_token_ids": ((None,), _OWNED),
    "prompt_logprobs": ((None,), "the engine returns nothing that the trainer could use"),
}
_VLLM_ENGINE_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "speculative_config": ((None,), "accepted draft tokens are not drawn from the recorded support"),
    "logits_processors": ((None, []), _SHIFTS),
    "logprobs_mode": (("processed_logprobs",), "the recorded log-probs would not be normalised over the support"),
}
_TRANSFORMERS_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "do_sample": ((None, True), "greedy decoding has nothing to replay"),
    "num_beams": ((None, 1), _SEARCH),
    "num_beam_groups": ((None, 1), _SEARCH),
    "diversity_penalty": ((None, 0.0), _SEARCH),
    "penalty_alpha": ((None, 0.0), _SEARCH),
    "dola_layers": ((None,), _SEARCH),
    "constraints": ((None,), _FORCES),
    "force_words_ids": ((None,), _FORCES),
    "num_return_sequences": ((None, 1), "the trainer asks for one completion for each prompt it repeats"),
    "repetition_penalty": ((None, 1.0), _SHIFTS),
    "encoder_repetition_penalty": ((None, 1.0), _SHIFTS),
    "no_repeat_ngram_size": ((None, 0), _SHIFTS),
    "encoder_no_repeat_ngram_size": ((None, 0), _SHIFTS),
    "exponential_decay_length_penalty": ((None,), _SHIFTS),
    "sequence_bias": ((None, {}), _SHIFTS),
    "guidance_scale": ((None, 1, 1.0), _SHIFTS),
    "watermarking_config": ((None,), _SHIFTS),
    "logits_processor": ((None, []), _SHIFTS),
    "bad_words_ids": ((None, []), _FORCES),
    "forced_bos_token_id": ((None,), _FORCES),
    "forced_eos_token_id": ((None,), _FORCES),
    "suppress_tokens": ((None, []), _FORCES),
    "begin_suppress_tokens": ((None, []), _FORCES),
    "assistant_model": ((None,), "accepted draft tokens are not drawn from the recorded support"),
    "prompt_lookup_num_tokens": ((None,), "accepted draft tokens are not drawn from the recorded support"),
    "remove_invalid_values": ((None, False), "infinite and NaN logits are replaced without the trainer knowing"),
}


def sampling_settings(args: Any, generation_config: Any | None = None) -> SamplingSettings:
    """The sampling that `args` asks for, with `generation_kwargs` and the model's own defaults taken into account.

    Args:
        args: a `trl.GRPOConfig` (or any object with its sampling fields).
        generation_config: the model's `GenerationConfig`, or `None`. With `use_vllm=False`, `generate` takes from it
            whatever TRL leaves unset (`min_p`, `typical_p`, ...); vLLM is given every value explicitly.

    Returns:
        The settings that a request will really carry.
    """
    given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    kwargs = args.generation_kwargs or {}
    if not isinstance(kwargs, Mapping):
        raise UnreplayableSettingError("generation_kwargs", kwargs, "it is not a dictionary", "Give names and values")
    given.update({k: v for k, v in kwargs.items() if k in {*given, *_TRANSFORMERS_TRUNCATION}})
    _check_numbers(given)
    other: list[str] = []
    if not args.use_vllm:
        for name, off in _TRANSFORMERS_TRUNCATION.items():
            value = given.get(name, getattr(generation_config, name, None))
            if value is not None and value != off:
                other.append(name)
        if given["min_p"] is None:
            given["min_p"] = getattr(generation_config, "min_p", None)
    return SamplingSettings(
        temperature=float(given["temperature"]),
        top_p=1.0 if given["top_p"] is None else float(given["top_p"]),
        top_k=normalize_top_k(given["top_k"]),
        min_p=float(given["min_p"] or 0.0),
        other=tuple(other),
    )


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse what is no value of its setting. Left alone, it would switch truncation off, and replay with it."""
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "temperature": (lambda x: 0 <= x < math.inf, "Choose a number above 0"),
        "top_p": (lambda x: 0 < x <= 1, "Choose it in (0, 1], for example 0.95; 1 turns it off"),
        "top_k": (lambda x: x >= -1 and x == int(x), "Choose a whole number of candidates; 0 turns it off"),
        "min_p": (lambda x: 0 <= x < 1, "Choose it in [0, 1); 0 turns it off"),
    }
    for name, (holds, remedy) in rules.items():
        value = given[name]
        if value is None and name != "temperature":
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (number and holds(value)):
            raise UnreplayableSettingError(name, value, "it is not a value of this setting", remedy)


def check_contract(args: Any, generation_config: Any | None = None) -> SamplingSettings:
    """Refuse every setting that cannot be replayed exactly.

    Args:
        args: a `SupportReplayGRPOConfig`.
        generation_config: the model's own `GenerationConfig`, when it is known.

    Returns:
        The normalised sampling settings. When they truncate nothing, there is nothing to replay and nothing is refused.

    Raises:
        UnreplayableSettingError: naming the first setting that breaks the contract, its value and the way out.
    """
    settings = sampling_settings(args, generation_config)
    if not settings.truncates:
        return settings
    _check_sampling(args, settings)
    generation_kwargs = dict(args.generation_kwargs or {})
    if args.use_vllm:
        _check_vllm(args, settings, generation_kwargs)
    else:
        _check_transformers(args, generation_kwargs, generation_config)
    return settings


def _check_sampling(args: Any, settings: SamplingSettings) -> None:
    if settings.temperature <= 0:
        raise UnreplayableSettingError(
            "temperature",
            settings.temperature,
            "greedy decoding draws from a single token, so every log-prob is 0 and nothing can be learned",
            "Set a temperature above 0, or turn truncation off (top_k=0, top_p=1, min_p=0)",
        )
    if settings.temperature != float(args.temperature):
        raise UnreplayableSettingError(
            "generation_kwargs['temperature']",
            settings.temperature,
            f"the trainer scores at temperature={args.temperature}",
            "Set `temperature` itself and leave it out of `generation_kwargs`",
        )
    if settings.top_k == 1:
        raise UnreplayableSettingError(
            "top_k",
            1,
            "every support would hold only the sampled token, so every log-prob is 0 and nothing can be learned",
            "Set top_k to 2 or more (20 is usual), or 0 to turn it off",
        )
    if args.repetition_penalty != 1.0:
        raise UnreplayableSettingError("repetition_penalty", args.repetition_penalty, _SHIFTS, "Set it to 1.0")


def _check_vllm(args: Any, settings: SamplingSettings, generation_kwargs: Mapping[str, Any]) -> None:
    if getattr(args, "vllm_mode", "colocate") == "server" and getattr(args, "vllm_engine_kwargs", None):
        raise UnreplayableSettingError(
            "vllm_engine_kwargs",
            args.vllm_engine_kwargs,
            "it reaches the colocated engine only, and vllm_mode is 'server'",
            "Give these settings to the server as flags",
        )
    if settings.top_k == 0:
        asked = {"top_p": settings.top_p} if settings.top_p < 1 else {"min_p": settings.min_p}
        ((name, value),) = asked.items()
        raise UnreplayableSettingError(
            name,
            value,
            "without top_k nothing bounds the support, and vLLM reports only a bounded number of candidates",
            "Set top_k as well (for example top_k=100, which cuts little that top_p or min_p would keep), or use "
            "use_vllm=False, whose capture has no bound",
        )
    if args.vllm_structured_outputs_regex is not None:
        raise UnreplayableSettingError(
            "vllm_structured_outputs_regex", args.vllm_structured_outputs_regex, _FORCES, "Leave it unset"
        )
    _refuse(generation_kwargs, _VLLM_REFUSED, "generation_kwargs[{!r}]")
    _refuse(getattr(args, "vllm_engine_kwargs", None) or {}, _VLLM_ENGINE_REFUSED, "vllm_engine_kwargs[{!r}]")
    max_logprobs = (getattr(args, "vllm_engine_kwargs", None) or {}).get("max_logprobs")
    if max_logprobs is not None and 0 <= max_logprobs < settings.top_k:
        raise UnreplayableSettingError(
            "vllm_engine_kwargs['max_logprobs']",
            max_logprobs,
            f"it is smaller than top_k={settings.top_k}, so the engine could not report a whole support",
            "Leave it out (it is set for you) or make it larger than top_k",
        )


def _check_transformers(args: Any, generation_kwargs: Mapping[str, Any], generation_config: Any | None) -> None:
    if args.use_transformers_continuous_batching:
        raise UnreplayableSettingError(
            "use_transformers_continuous_batching",
            True,
            "continuous batching does not give the processed scores of each step",
            "Set it to False, or use use_vllm=True",
        )
    _refuse(generation_kwargs, _TRANSFORMERS_REFUSED, "generation_kwargs[{!r}]")
    if generation_config is None:
        return
    # `generate` falls back to the model's own defaults for whatever TRL does not pass.
    set_by_trl = {"do_sample", "temperature", "top_p", "top_k", "repetition_penalty", *generation_kwargs}
    inherited = {
        name: getattr(generation_config, name, None) for name in _TRANSFORMERS_REFUSED if name not in set_by_trl
    }
    _refuse(inherited, _TRANSFORMERS_REFUSED, "the model's generation_config.{}", remedy="Clear it there")


def _refuse(
    given: Mapping[str, Any],
    table: Mapping[str, tuple[Iterable[Any], str]],
    spelling: str,
    remedy: str = "Leave it out",
) -> None:
    for name, value in given.items():
        if name in table:
            harmless, reason = table[name]
            if not any(value is h or (h is not None and value == h) for h in harmless):
                raise UnreplayableSettingError(spelling.format(name), value, reason, remedy)
