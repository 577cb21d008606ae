"""What a server allows, read from its environment.

vLLM builds the endpoint from an import path, without arguments, so its settings travel in environment variables.
`vllm-serve` sets them from its flags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

_PREFIX = "TRL_SUPPORT_REPLAY_"


class ServerSettingError(ValueError):
    """A setting of the server that has no value it can have.

    Attributes:
        field: name of the field of `ServerSettings`.
        problem: its value, and what is wrong with it.
    """

    def __init__(self, field: str, problem: str):
        super().__init__(f"{variable(field)}={problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True)
class ServerSettings:
    """Bounds of one server; every field is an environment variable, for example `TRL_SUPPORT_REPLAY_MAX_N`.

    Attributes:
        weights_dir: folder shared with the trainer, from which weights may be reloaded; `None` allows no reload.
        max_request_bytes: largest accepted request body.
        max_n: most completions of one request.
        max_tokens: most new tokens of one completion.
        max_top_k: largest top-k of a request that records supports.
        reload_timeout: seconds that a reload may wait for running requests to finish.

    Raises:
        ServerSettingError: for a bound below 1, or a folder that is none.
    """

    weights_dir: Path | None = None
    max_request_bytes: int = 16 * 2**20
    max_n: int = 256
    max_tokens: int = 32768
    max_top_k: int = 1020
    reload_timeout: int = 600

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "weights_dir" and value < 1:
                raise ServerSettingError(field.name, f"{value} must be at least 1.")
        if self.weights_dir is not None and not self.weights_dir.is_dir():
            raise ServerSettingError(
                "weights_dir",
                f"{str(self.weights_dir)!r} is not a folder. Create it, and give the trainer the same one as "
                "weight_sync_dir.",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> ServerSettings:
        """Read the variables that are set; the others keep their defaults.

        Raises:
            ServerSettingError: naming the variable whose value is not what it should be.
        """
        environ = os.environ if environ is None else environ
        given: dict[str, Path | int] = {}
        for field in fields(cls):
            value = environ.get(variable(field.name))
            if not value:
                continue
            if field.name == "weights_dir":
                given[field.name] = Path(value).resolve()
                continue
            try:
                given[field.name] = int(value)
            except ValueError:
                raise ServerSettingError(field.name, f"{value!r} is not an integer.") from None
        return cls(**given)  # type: ignore[arg-type]


def variable(name: str) -> str:
    """Environment variable of a field."""
    return _PREFIX + name.upper()
