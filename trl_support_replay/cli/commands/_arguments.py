"""Types and groups of options that several commands have."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def command_parser(name: str, doc: str | None, example: str) -> argparse.ArgumentParser:
    """A command's parser.

    Args:
        name: the command, as typed.
        doc: the docstring of its module, shown by `--help` as it is written.
        example: a command line to end the help with.
    """
    return argparse.ArgumentParser(
        prog=f"trl-support-replay {name}",
        description=doc,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_scoring_options(parser: argparse.ArgumentParser) -> None:
    """How models score saved traces: `--batch_size`, `--dtype`, `--device`."""
    parser.add_argument("--batch_size", type=positive, default=8, help="traces per forward (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="data type of the models (default: %(default)s)"
    )
    parser.add_argument("--device", help="device of the models (default: the GPU when there is one, else the CPU)")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def temperature(text: str) -> float:
    """A sampling temperature."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number above 0; 1 leaves the model's probabilities as they are"
        )
    return value


def mass(text: str) -> float:
    """A probability above 0 and up to 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability above 0 and up to 1")
    return value


def top_p(text: str) -> float:
    """A mass that a nucleus keeps."""
    try:
        return mass(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; 1 is off") from None


def min_p(text: str) -> float:
    """A probability from 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability from 0 and below 1; 0 is off")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object, as '{{\"enforce_eager\": true}}' is one")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None
