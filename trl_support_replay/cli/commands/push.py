"""Publish saved traces as a dataset on the Hub, with a card.

Every trace is checked before anything is uploaded. The access token is the one of `hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CommandError
from ._arguments import option, read_options


@dataclass(kw_only=True)
class Options:
    traces: str = option("folder of shards", main=True)
    repo: str = option("name of the dataset: user/name")
    private: bool | None = option("make a new dataset private", None, bool)
    revision: str | None = option("branch to commit to; the main one when it is left out", None)


def main(argv: Sequence[str]) -> int:
    """Upload a folder of traces."""
    example = "trl-support-replay push runs/traces --repo me/qwen3-traces --private"
    args = read_options(Options, argv, "push", __doc__, example)

    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    from ...hub.traces import push_traces

    try:
        url = push_traces(args.traces, args.repo, private=args.private, revision=args.revision)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        raise CommandError(f"{args.repo}: {error}") from error
    except httpx.TransportError as error:
        raise CommandError(
            f"{args.repo}: the Hub cannot be reached ({error}). Look at the network and at HF_ENDPOINT, and push again."
        ) from error
    print(f"traces: {url}")
    return 0
