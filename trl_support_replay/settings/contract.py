"""Which sampling settings can be replayed exactly.

Replaying a support is exact when the engine drew each token from `softmax(logits / temperature)` restricted to the
recorded set, and nothing else. The set may come from truncation, from a constraint that removes tokens, or from a rule
that fixes one. Where no token can be cut, the trainer scores over the whole vocabulary, which is exact when the engine
drew from all of it. Every setting that changes the distribution in another way is refused here, before a model is
loaded. What each setting does is in `sampling_table`; this module knows where settings come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from . import shifted
from .sampling_table import Field, Refused, generate, trl, unknown, vllm

# vLLM raises lower temperatures to this one, in each request.
_VLLM_LEAST_TEMPERATURE = 0.01
_LOGITS_PROCESSORS = "vllm.logits_processors"
_CLEAR = "Clear it there, or in config.json where the model has no generation_config.json"
_OWN_SETTINGS = ("top_k", "top_p", "min_p", "vllm_structured_outputs_regex")  # of those that cut tokens
_SHOWN = 80  # characters of a value; a JSON schema has thousands
_NO_DICTIONARY = Refused("it is not a dictionary", "Give names and values")


class UnreplayableSettingError(ValueError):
    """A setting under which replayed log-probs would not be those of the sampler's distribution.

    Attributes:
        setting: name of the offending setting.
        value: the value it has.
        reason: why it cannot be replayed.
        remedy: what to do.
    """

    def __init__(self, setting: str, value: Any, reason: str, remedy: str):
        super().__init__(f"{setting}={value!r} cannot be replayed: {reason}. {remedy}.")
        self.setting = setting
        self.value = value
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class SamplingSettings:
    """The settings that every engine and the trainer must agree on, in one spelling.

    Attributes:
        temperature: softmax temperature, > 0 when replay is on.
        top_p: nucleus mass in (0, 1]; 1.0 is off.
        top_k: number of candidates kept; 0 is off.
        min_p: least probability relative to the best token; 0.0 is off.
        other: further settings that are on and cut tokens (`typical_p`, `structured_outputs`, ...), with their values.
        allowed: number of tokens that a constraint leaves at most, where it is known; 0 where it is not.
        shifts: settings that shift logits as scoring repeats it, with their values.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    other: Mapping[str, Any] = field(default_factory=dict)
    allowed: int = 0
    shifts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cutting(self) -> dict[str, Any]:
        """The settings that cut tokens, with their values: by truncation, by a constraint, or by fixing a token."""
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1.0, "min_p": self.min_p > 0.0}
        return {name: getattr(self, name) for name, is_on in on.items() if is_on} | dict(self.other)

    def __str__(self) -> str:
        """The settings that cut tokens, as a user wrote them."""
        return ", ".join(f"{name}={_shortened(value)}" for name, value in self.cutting.items())

    @property
    def truncates(self) -> bool:
        """Whether any token can be cut from the distribution, that is, whether there is something to replay."""
        return bool(self.cutting)

    @property
    def bound(self) -> int:
        """The `top_k` of a request: the given one, or the size of what is allowed, which it leaves whole; 0 is off."""
        return self.top_k or self.allowed


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def normalize_top_k(top_k: int | None) -> int:
    """One spelling for "off": engines write `None`, `0` and `-1` for it, here it is always `0`."""
    return 0 if top_k is None or top_k <= 0 else int(top_k)


def spell_off_alike(args: Any) -> None:
    """Write "off" in `args` as every engine understands it.

    `generate` fails at `top_k=-1`, and for `None` it takes the model's own default, which may truncate.
    """
    kwargs = dict(args.generation_kwargs or {})
    for name, others, off in (("top_k", (None, -1), 0), ("top_p", (None,), 1.0)):
        if getattr(args, name) in others:
            setattr(args, name, off)
        if kwargs.get(name, off) in others:
            args.generation_kwargs = kwargs = {**kwargs, name: off}


def sampling_settings(args: Any, generation_config: Any | None = None) -> SamplingSettings:
    """The sampling that `args` asks for, with `generation_kwargs` and the model's own defaults taken into account.

    Args:
        args: a `trl.GRPOConfig` (or any object with its sampling fields).
        generation_config: the model's `GenerationConfig`, or `None`. With `use_vllm=False`, `generate` takes from it
            whatever TRL leaves unset (`min_p`, `typical_p`, ...); vLLM is given every value explicitly.

    Returns:
        The settings that a request will really carry.

    Raises:
        UnreplayableSettingError: for a value that a setting cannot have.
    """
    settings, refused = _settings(args, generation_config)
    if refused:
        raise refused[0]
    return settings


def check_contract(args: Any, generation_config: Any | None = None) -> SamplingSettings:
    """Refuse every setting that cannot be replayed exactly.

    Args:
        args: a `SupportReplayGRPOConfig`.
        generation_config: the model's own `GenerationConfig`, when it is known.

    Returns:
        The normalised sampling settings. When they cut no tokens, there is nothing to replay.

    Raises:
        UnreplayableSettingError: naming the first setting that breaks the contract, its value and the way out.
    """
    settings, refused = find_refusals(args, generation_config)
    if refused:
        raise refused[0]
    return settings


def find_refusals(
    args: Any, generation_config: Any | None = None
) -> tuple[SamplingSettings, list[UnreplayableSettingError]]:
    """As `check_contract`, with every refusal in the place of an error. A value that is refused counts as off."""
    settings, refused = _settings(args, generation_config)
    refused += _check_sampling(args, settings)
    routes = getattr(args, "routed_experts_replay", False)
    replays = settings.truncates or routes
    own = {name: value for name, value in vars(args).items() if name not in settings.shifts}
    tables = [trl.ALWAYS, trl.WITH_VLLM if args.use_vllm else trl.WITHOUT_VLLM]
    for table in tables:
        given = {name: value for name, value in own.items() if name in table}
        refused += judge(given, table, "{}", routes if table is trl.WITHOUT_VLLM else replays)
    kwargs = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
    table = vllm.REQUEST if args.use_vllm else generate.CONFIG
    given = {name: value for name, value in kwargs.items() if name not in settings.shifts}
    refused += judge(given, table, "generation_kwargs[{!r}]", replays)
    if args.use_vllm:
        refused += _check_vllm(args, settings, replays)
        return settings, refused
    if generation_config is not None:
        refused += _check_inherited(kwargs, generation_config, replays)
    if getattr(args, "use_transformers_continuous_batching", False) or getattr(args, "use_transformers_paged", False):
        refused += _check_continuous_batching(args, settings)
    return settings, refused


def warnings_of(args: Any) -> Iterator[str]:
    """What is not wrong, but hardly meant."""
    colocated = args.use_vllm and args.vllm_mode == "colocate"
    kwargs = {"generation_kwargs": args.generation_kwargs, "vllm_engine_kwargs": args.vllm_engine_kwargs}
    for name, given in kwargs.items() if colocated else ():
        seed = (given or {}).get("seed")
        if seed is not None:
            alike = "of a prompt" if name == "generation_kwargs" else "of a prompt that several processes sample"
            yield (
                f"{name}['seed']={seed!r}: completions {alike} come out alike, so their rewards do not differ. "
                "Leave it out: `seed` itself makes a run repeatable."
            )


def _settings(args: Any, generation_config: Any | None) -> tuple[SamplingSettings, list[UnreplayableSettingError]]:
    given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    kwargs = args.generation_kwargs or {}
    refused: list[UnreplayableSettingError] = []
    if not isinstance(kwargs, Mapping):
        refused.append(UnreplayableSettingError("generation_kwargs", kwargs, *_NO_DICTIONARY))
        kwargs = {}
    given.update({name: value for name, value in kwargs.items() if name in given})
    for error in _check_numbers(given):
        refused.append(error)
        given[error.setting] = 1.0 if error.setting == "temperature" else None
    other: dict[str, Any] = {}
    for name, setting in (vllm.REQUEST if args.use_vllm else generate.CONFIG).items():
        value = kwargs.get(name)
        if value is None and not args.use_vllm:
            value = getattr(generation_config, name, None)
        if name not in given and setting.narrows(value):
            other[name] = value
    if args.use_vllm:
        regex = getattr(args, "vllm_structured_outputs_regex", None)
        if regex is not None:
            other.pop("structured_outputs", None)  # TRL puts the regex in its place
            other["vllm_structured_outputs_regex"] = regex
    elif given["min_p"] is None:
        given["min_p"] = getattr(generation_config, "min_p", None)
    settings = SamplingSettings(
        temperature=float(given["temperature"]),
        top_p=1.0 if given["top_p"] is None else float(given["top_p"]),
        top_k=normalize_top_k(given["top_k"]),
        min_p=float(given["min_p"] or 0.0),
        other=other,
        allowed=vllm.most_allowed(other) if args.use_vllm else 0,
    )
    # Beside truncation only: scores over the whole vocabulary have no shifts.
    return replace(settings, shifts=shifted.replayed_shifts(args) if settings.truncates else {}), refused


def _check_numbers(given: Mapping[str, Any]) -> Iterator[UnreplayableSettingError]:
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
            yield UnreplayableSettingError(name, value, "it is not a value of this setting", remedy)


def _check_sampling(args: Any, settings: SamplingSettings) -> Iterator[UnreplayableSettingError]:
    temperature = settings.temperature
    if temperature <= 0:
        yield UnreplayableSettingError(
            "temperature",
            temperature,
            "greedy decoding draws from a single token, so every log-prob is 0 and nothing can be learned",
            "Set a temperature above 0",
        )
    elif args.use_vllm and temperature < _VLLM_LEAST_TEMPERATURE:
        yield UnreplayableSettingError(
            "temperature",
            temperature,
            f"vLLM samples at {_VLLM_LEAST_TEMPERATURE} instead, and the trainer would score at {temperature}",
            f"Set a temperature of {_VLLM_LEAST_TEMPERATURE} or more",
        )
    if isinstance(args.temperature, int | float) and temperature != float(args.temperature):
        yield UnreplayableSettingError(
            "generation_kwargs['temperature']",
            temperature,
            f"the trainer scores at temperature={args.temperature}",
            "Set `temperature` itself and leave it out of `generation_kwargs`",
        )
    if settings.top_k == 1:
        yield UnreplayableSettingError(
            "top_k",
            1,
            "every support would hold only the sampled token, so every log-prob is 0 and nothing can be learned",
            "Set top_k to 2 or more (20 is usual), or 0 to turn it off",
        )


def _check_vllm(args: Any, settings: SamplingSettings, replays: bool) -> Iterator[UnreplayableSettingError]:
    engine_kwargs = getattr(args, "vllm_engine_kwargs", None) or {}
    if not isinstance(engine_kwargs, Mapping):
        yield UnreplayableSettingError("vllm_engine_kwargs", engine_kwargs, *_NO_DICTIONARY)
        engine_kwargs = {}
    in_server = getattr(args, "vllm_mode", "colocate") == "server"
    if in_server and engine_kwargs:
        yield UnreplayableSettingError(
            "vllm_engine_kwargs",
            engine_kwargs,
            "it reaches the colocated engine only, and vllm_mode is 'server'",
            "Give these settings to the server as flags",
        )
        return
    if in_server and settings.other.get("logit_bias"):
        yield UnreplayableSettingError(
            "generation_kwargs['logit_bias']",
            settings.other["logit_bias"],
            "a bias of -inf does not travel to a server",
            "Use bad_words or allowed_token_ids instead, or vllm_mode='colocate'",
        )
    yield from judge(engine_kwargs, vllm.ENGINE, "vllm_engine_kwargs[{!r}]", replays)
    max_logprobs = engine_kwargs.get("max_logprobs")
    if not isinstance(max_logprobs, int | None):
        refused = "it is not a value of this setting", "Leave it out (it is set for you)"
        yield UnreplayableSettingError("vllm_engine_kwargs['max_logprobs']", max_logprobs, *refused)
        max_logprobs = None
    if getattr(args, "support_capture", "auto") == "logprobs":
        yield from beyond_logprobs(settings, max_logprobs, "support_capture='logprobs'")
    if not in_server:  # a server tells of its own
        yield from installed_logits_processors()


def beyond_logprobs(
    settings: SamplingSettings, max_logprobs: int | None, why: str
) -> Iterator[UnreplayableSettingError]:
    """A refusal of each setting under which log-probs of the best candidates do not hold a whole support.

    Args: `max_logprobs` of the engine, `None` when the capture sets it; `why` supports are read from log-probs.
    """
    if settings.truncates and settings.bound == 0:
        name, value = next(iter(settings.cutting.items()))
        yield UnreplayableSettingError(
            _spelled(name),
            value,
            f"without top_k nothing bounds the support, and it is read from a bounded number of log-probs ({why})",
            "Set top_k as well (for example top_k=100, which cuts little that top_p or min_p would keep), or sample "
            "with what records supports of any size: vLLM 0.28 or newer with support_capture='auto', or use_vllm=False",
        )
    if max_logprobs is not None and 0 <= max_logprobs < settings.bound:
        yield UnreplayableSettingError(
            "vllm_engine_kwargs['max_logprobs']",
            max_logprobs,
            f"a support may have {settings.bound} members, so the engine could not report a whole one ({why})",
            "Leave it out (it is set for you) or make it larger than that",
        )


def _check_continuous_batching(args: Any, settings: SamplingSettings) -> Iterator[UnreplayableSettingError]:
    for name, value in settings.cutting.items():
        if name not in generate.IN_CONTINUOUS_BATCHING:
            yield UnreplayableSettingError(
                _spelled(name),
                value,
                "continuous batching drops it, or shows it only the latest token",
                "Leave it out, or set use_transformers_continuous_batching=False",
            )


def _spelled(name: str) -> str:
    return name if name in _OWN_SETTINGS else f"generation_kwargs[{name!r}]"


def installed_logits_processors() -> Iterator[UnreplayableSettingError]:
    """A refusal of each logits processor that vLLM loads because a package with it is installed here."""
    for point in metadata.entry_points(group=_LOGITS_PROCESSORS):
        package = point.dist.name if point.dist is not None else "an unnamed distribution"
        yield UnreplayableSettingError(
            f"the entry point {point.name} of {package} in {_LOGITS_PROCESSORS}",
            point.value,
            "vLLM loads this logits processor into each engine, without any setting",
            f"Uninstall {package}",
        )


def _check_inherited(
    kwargs: Mapping[str, Any], generation_config: Any, replays: bool
) -> Iterator[UnreplayableSettingError]:
    """`generate` falls back to the model's own defaults for whatever TRL leaves unset."""
    set_by_trl = {"do_sample", "repetition_penalty"} | {name for name, value in kwargs.items() if value is not None}
    # A model's file may hold more, which `generate` does not read.
    read = [name for name in vars(type(generation_config)()) if name not in set_by_trl]
    inherited = {name: getattr(generation_config, name, None) for name in read}
    spelling = "the model's generation_config.{}"
    for error in judge(inherited, generate.CONFIG, spelling, replays):
        yield UnreplayableSettingError(error.setting, error.value, error.reason, _CLEAR)


def judge(
    given: Mapping[str, Any], table: Mapping[str, Field], spelling: str, replays: bool = True
) -> Iterator[UnreplayableSettingError]:
    """A refusal of each setting that a table refuses or does not have."""
    for name, value in given.items():
        setting = table.get(name)
        refused: Refused | None
        if setting is None:
            refused = None if value is None else unknown(name, table)
        else:
            refused = setting.refused(value, replays)
        if refused is not None:
            yield UnreplayableSettingError(spelling.format(name), value, *refused)
