"""What the `grpo` command is given: its arguments, and the data, rewards and tools that they name."""

import contextlib

import yaml
from safetensors import SafetensorError

from ...errors import told

# Errors whose message is enough; for others the type is printed before it.
_SAID = (ValueError, TypeError, OSError, ImportError, SafetensorError)


def input_errors(way_out: str) -> contextlib.AbstractContextManager[None]:
    """Whatever goes wrong before training starts is about the input: it becomes one message that ends with a way out.

    Raises:
        CommandError: in the place of the error.
    """

    def say(error: Exception) -> str:
        text = str(error) if isinstance(error, _SAID) else f"{type(error).__name__}: {error}"
        return f"{text}\n({way_out})"

    return told(say, (*_SAID, LookupError, AttributeError, ArithmeticError, yaml.YAMLError))
