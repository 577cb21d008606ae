"""The one error of the server: a refusal, with its HTTP status."""

from __future__ import annotations

from typing import Any

from ..wire import protocol


class Refusal(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status. From 500 on, the client may try the same request again.
        body: the JSON body, with a `code` that a client acts on and a message for people.
    """

    def __init__(self, status: int, code: str, message: str, **details: Any):
        super().__init__(message)
        self.status = status
        self.body = protocol.encode_error(code, message, **details)
