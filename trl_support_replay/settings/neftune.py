"""The refusal of NEFTune."""

from __future__ import annotations

from typing import Any

from .contract import UnreplayableSettingError


def refuse_neftune(args: Any) -> None:
    """Refuse NEFTune, whose noise comes from a hook that is set when training starts.

    Raises:
        UnreplayableSettingError: `neftune_noise_alpha` is set.
    """
    if args.neftune_noise_alpha:
        raise UnreplayableSettingError(
            "neftune_noise_alpha",
            args.neftune_noise_alpha,
            "it adds noise to the embeddings while the policy is scored, and the engine samples without noise",
            "Leave it out",
        )
