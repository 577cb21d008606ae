"""Publish saved traces as a dataset on the Hub, with a card.

Every trace is checked before anything is uploaded. The access token is the one of `hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import CommandError
from ._arguments import command_parser


def main(argv: Sequence[str]) -> int:
    """Upload a folder of traces."""
    parser = command_parser(
        "push", __doc__, "trl-support-replay push --traces runs/traces --repo me/qwen3-traces --private"
    )
    parser.add_argument("--traces", required=True, help="folder of shards")
    parser.add_argument("--repo", required=True, help="name of the dataset: user/name")
    parser.add_argument("--private", action="store_true", default=None, help="make a new dataset private")
    parser.add_argument("--revision", help="branch to commit to (default: the main one)")
    args = parser.parse_args(argv)

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
