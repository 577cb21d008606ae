"""Reads command lines into dataclasses: each field is an option, and its metadata hold help and check.

`transformers.HfArgumentParser` reads dataclasses too, but takes no main input without an option, checks no values, and
importing it takes ten times as long as `--help` does here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")


def option(help: str, default: Any = MISSING, kind: Callable[[str], Any] = str, main: bool = False, **how: Any) -> Any:
    """A field of a command's options.

    Args:
        help: what `--help` says of it; a default is added.
        default: value of an option that is not given. An option without a default is required.
        kind: makes the value of the text, and raises `ArgumentTypeError` where it cannot; `bool` is a flag.
        main: whether this is the main input of the command, which may be given without the option's name.
        how: further arguments of `ArgumentParser.add_argument`.
    """
    stored = {"default": default} if default.__hash__ else {"default_factory": default.copy}
    return field(**stored, metadata={"help": help, "main": main, "kind": kind, **how})


def read_options(options: type[T], argv: Sequence[str], command: str, doc: str | None, example: str) -> T:
    """The options of a command; ends the process for `--help` and for arguments that are wrong.

    Args:
        options: a dataclass of fields made by `option`.
        argv: arguments after the command's name. Hyphens in the names of options count as underscores.
        command: its name, as typed.
        doc: the docstring of its module, shown by `--help` as it is written.
        example: a command line to end the help with.
    """
    described: Any = options
    ordered = sorted(fields(described), key=lambda f: (not f.metadata["main"], _default(f) is not MISSING))
    needed = [
        f.name.upper() if f.metadata["main"] else f"--{f.name} {f.name.upper()}"
        for f in ordered
        if _default(f) is MISSING
    ]
    parser = argparse.ArgumentParser(
        prog=f"trl-support-replay {command}",
        usage=" ".join([f"trl-support-replay {command}", *needed, "[options]"]),
        description=doc,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for f in ordered:
        how = dict(f.metadata)
        main, kind = how.pop("main"), how.pop("kind")
        how |= {"action": "store_true"} if kind is bool else {"type": kind}
        if main:
            group = parser.add_mutually_exclusive_group()
            how["default"] = argparse.SUPPRESS
            group.add_argument(f.name, nargs="?", metavar=f.name.upper(), **how)
            group.add_argument(f"--{f.name}", **how | {"help": argparse.SUPPRESS})
            continue
        default = _default(f)
        if default is not MISSING and default not in (None, False, (), {}):
            how["help"] += " (default: %(default)s)"
        how |= {"required": True} if default is MISSING else {"default": default}
        parser.add_argument(f"--{f.name}", **how)
    given = parser.parse_args([*map(_underscored, argv)])
    if lacking := [f.name.upper() for f in ordered if f.metadata["main"] and f.name not in given]:
        parser.error(f"the following arguments are required: {lacking[0]}")
    return options(**vars(given))


def _default(f: Any) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _underscored(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return (f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name) + equals + value


def _checked(kind: Callable[[str], Any], holds: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return read


positive = _checked(int, lambda n: n >= 1, "a whole number of 1 or more")
above_zero = _checked(float, lambda x: 0 < x < math.inf, "a number above 0")
mass = _checked(float, lambda x: 0 < x <= 1, "a probability above 0 and up to 1")
below_one = _checked(float, lambda x: 0 <= x < 1, "a probability from 0 and below 1")


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object, as '{{\"enforce_eager\": true}}' is one")
    return value


def dtype_option() -> Any:
    """The option `--dtype`."""
    return option("data type of the model", "float32", choices=("float32", "bfloat16", "float16"))


@dataclass(kw_only=True)
class ScoringOptions:
    """How models score saved traces."""

    traces: str = option("folder of shards, Parquet file, or dataset saved to disk", main=True)
    batch_size: int = option("traces per forward", 8, positive)
    dtype: str = dtype_option()
    device: str | None = option("device of the models; the GPU when there is one, else the CPU", None)
