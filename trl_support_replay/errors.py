"""Errors that belong to no room: what a command tells its user without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class CommandError(ValueError):
    """Something that the user can put right; its message is all that is shown."""


def is_ours(error: BaseException) -> bool:
    """Whether an error is of a type of this package, whose message says all that its user needs."""
    return type(error).__module__.startswith("trl_support_replay.")


@contextlib.contextmanager
def told(
    say: Callable[[Exception], str], kinds: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Errors of libraries become one message; those of this package pass.

    Args:
        say: makes the message of the error.
        kinds: the errors; what readers raise at damaged files is not limited to any.

    Raises:
        CommandError: in the place of the error.
    """
    try:
        yield
    except kinds as error:
        if is_ours(error):
            raise
        raise CommandError(say(error)) from error
