"""`trl-support-replay`: one command for each module in `commands`.

A command is a module with a docstring, whose first line is its help, and a function `main(argv) -> int` that takes the
arguments after its name and returns the exit status. Modules import what is heavy only when they run.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .._version import __version__
from ..errors import CommandError, is_ours
from . import commands

_DEBUG = "TRL_SUPPORT_REPLAY_DEBUG"
_EXAMPLES = """\
examples:
  trl-support-replay env
      versions, and what can be replayed on this machine
  trl-support-replay demo --steps 20
      a small model trained with replay and without, side by side
  trl-support-replay grpo --config grpo.yaml --top_p 0.9 --top_k 20
      TRL's GRPO on your model and data, scored over the sampling support

`trl-support-replay COMMAND --help` explains a command.
"""


def command_modules() -> dict[str, str]:
    """Command name to module name, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(commands.__path__) if not m.name.startswith("_"))
    return {name.replace("_", "-"): name for name in names}


def _help_line(module: str) -> str:
    # Read, not imported: the list of commands must not depend on what each of them needs.
    source = (Path(commands.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.split("\n", 1)[0].rstrip(".")


def _parser() -> argparse.ArgumentParser:
    modules = command_modules()
    width = max(map(len, modules))
    listing = "".join(f"  {name:<{width}}  {_help_line(module)}\n" for name, module in modules.items())
    parser = argparse.ArgumentParser(
        prog="trl-support-replay",
        usage="trl-support-replay [--debug] COMMAND [arguments]",
        description="Score the policy on the distribution the sampler really drew from.",
        epilog=f"commands:\n{listing}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trl-support-replay {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of every error")
    parser.add_argument("command", metavar="COMMAND", choices=modules, help="what to do, see below")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the command's own arguments")
    return parser


def run(command: Callable[[Sequence[str]], int], argv: Sequence[str], debug: bool = False) -> int:
    """Run a command; errors that the user can correct become one message.

    Every error type that this package defines has such a message. Its exit status is 2 when the input was wrong, and 1
    when something was found wrong later. Other errors are faults of the program and keep their traceback. In a run of
    several processes, the first one prints a wrong input, and every process prints its other errors.
    """
    try:
        return command(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug or _DEBUG in os.environ or not is_ours(error):
            raise
        several, alike = os.environ.get("WORLD_SIZE", "1") != "1", isinstance(error, CommandError)
        whose = f" of rank {os.environ.get('RANK', '?')}" if several and not alike else ""
        if not alike or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error{whose}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | TypeError | ImportError | OSError) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `trl-support-replay` command; returns the exit status."""
    args = _parser().parse_args(argv)
    module = importlib.import_module(f"{commands.__name__}.{command_modules()[args.command]}")
    with _workers_told(args.debug):
        return run(module.main, args.arguments, args.debug)


@contextlib.contextmanager
def _workers_told(debug: bool) -> Iterator[None]:
    """Tell the worker processes that a command starts to show tracebacks too."""
    if debug:
        os.environ[_DEBUG] = "1"
    try:
        yield
    finally:
        if debug:
            os.environ.pop(_DEBUG, None)
