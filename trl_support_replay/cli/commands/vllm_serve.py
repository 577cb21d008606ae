"""Serve a model with vLLM, supports and routed experts included.

vLLM's own server with every option it has, and beside it the endpoint that carries what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Become vLLM's server."""
    from ...server.command import main as serve

    serve(argv)
    raise AssertionError("the server takes the place of this process")
