"""Reloading the engine's weights from the folder that a server shares with its trainer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from .errors import Refusal
from .gate import WeightsGate
from .settings import ServerSettings

logger = logging.getLogger(__name__)

# A version is a folder's name, so it must not be able to be a path.
VERSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,95}")


class Reloader:
    """Loads versions of the weights, one at a time and never under a running request.

    Args:
        engine: vLLM's asynchronous engine client.
        settings: the server's bounds, with the folder.

    Attributes:
        gate: holds the name of the version that the engine has.
    """

    def __init__(self, engine: Any, settings: ServerSettings):
        self._engine = engine
        self._settings = settings
        self.gate = WeightsGate()

    async def label(self, version: str) -> None:
        """Name the weights that came into the engine in another way.

        Raises:
            Refusal: 400 for a name that is not one, 503 when running requests do not end.
        """
        check_version_name(version)
        async with self._alone():
            self.gate.version = version
            self.gate.broken = False

    async def reload(self, version: str) -> None:
        """Let the engine hold `version`. Does nothing when it does already.

        Raises:
            Refusal: 400 for a name that is not one, a server without a folder, or an engine whose reload has no
                effect; 503 when the folder has no such version (a shared file system may show it late), or running
                requests do not end.
        """
        self._check_engine()
        files = weight_files(self._settings.weights_dir, version)
        async with self._alone():
            if self.gate.version != version or self.gate.broken:
                await self._load(version, files)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        timeout = self._settings.reload_timeout
        async with contextlib.AsyncExitStack() as held:
            try:
                await held.enter_async_context(self.gate.reloading(timeout))
            except TimeoutError:
                raise Refusal(
                    503, "busy", f"Requests are still running after reload_timeout={timeout} seconds."
                ) from None
            yield

    async def _load(self, version: str, files: list[str]) -> None:
        # The engine's own pause also lets ordinary requests of this server finish on the weights they began with.
        try:
            await self._engine.pause_generation(mode="wait")
            self.gate.broken = True
            await self._engine.collective_rpc("support_replay_reload", args=(files,))
            if await self._engine.reset_prefix_cache() is False:
                raise RuntimeError("The prefix cache could not be emptied, so it would mix two versions.")
            self.gate.version = version
            self.gate.broken = False
        finally:
            await asyncio.shield(self._engine.resume_generation())
        logger.info("The engine holds the weights %s.", version)

    def _check_engine(self) -> None:
        from vllm.platforms import current_platform

        dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        if current_platform.is_cpu() and dtype != "float32":
            raise Refusal(
                400,
                "reload_without_effect",
                f"dtype={dtype!r}: on a CPU a reload of a half-precision engine has no effect. Start the server with "
                "--dtype float32.",
                setting="dtype",
            )


def check_version_name(version: str) -> None:
    """Raise `Refusal` for what could be more than a folder's name."""
    if not VERSION_NAME.fullmatch(version):
        raise Refusal(
            400,
            "version_name",
            f"version={version!r} is not the name of a version (letters, digits, '-' and '_', at most 96).",
            setting="version",
        )


def weight_files(folder: Path | None, version: str) -> list[str]:
    """Paths of the safetensors files of a version, in order.

    Raises:
        Refusal: 400 for no folder, a name that is not a version's, or a file that is not a plain safetensors file
            inside the folder; 503 for a version that is not there.
    """
    if folder is None:
        raise Refusal(
            400,
            "no_weights_dir",
            "The server was started without --weights-dir, so it reloads nothing.",
            setting="weights_dir",
        )
    check_version_name(version)
    root = folder / version
    if not root.is_dir():
        raise Refusal(503, "no_such_version", f"There is no version {version} in the server's weights folder.")
    entries = sorted(root.iterdir())
    for entry in entries:
        outside = entry.resolve().parent != root.resolve() or root.resolve().parent != folder.resolve()
        if entry.suffix != ".safetensors" or not entry.is_file() or outside:
            raise Refusal(
                400,
                "not_safetensors",
                f"{entry.name} in version {version} is not a plain safetensors file inside the weights folder.",
                setting="version",
            )
    if not entries:
        raise Refusal(400, "not_safetensors", f"Version {version} has no files.", setting="version")
    return [str(entry) for entry in entries]
