"""Refuses images, video and audio in traces, which carry token ids only.

A model that is trained on the ids of an image without the image scores other prompts than those that were sampled
from: the ratios are wrong, and nothing else shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import TraceSchemaError

if TYPE_CHECKING:
    from .columns import Trace

IMAGE_COLUMNS = ("image", "images")
"""Columns of a dataset from which TRL's trainers take images."""

_REMEDY = (
    "Traces carry no images, video or audio, so training on them or scoring them would leave these out. Keep to rows "
    "of text only"
)
_MEDIA = re.compile("image|video|audio")
# Ids that stand in a prompt only where something other than text goes in.
_PLACEHOLDER = re.compile(r"(image|video|audio|vision)(_\w+)?_token_(id|index)")


class MultimodalTraceError(TraceSchemaError):
    """Prompts of more than text, which traces cannot hold."""


def check_text_row(row: Mapping[str, Any], where: str) -> None:
    """Refuse a dataset's row with images, or with messages that have parts other than text.

    Raises:
        MultimodalTraceError: naming the row and what it holds.
    """
    for name in IMAGE_COLUMNS:
        if row.get(name) is not None and (not isinstance(row[name], list) or row[name]):
            raise MultimodalTraceError(f"{where} has a value in the column {name!r}. {_REMEDY}.")
    found = next(_parts(row.get("prompt")), None)
    if found is not None:
        raise MultimodalTraceError(f"{where}: its prompt has a part of type {found!r}. {_REMEDY}.")


def check_text_only(traces: Sequence[Trace]) -> None:
    """`check_text_row` for the further columns of each trace."""
    for i, trace in enumerate(traces):
        check_text_row(trace.extra, f"Row {i}")


def check_no_placeholders(traces: Sequence[Trace], config: Any, where: str = "Row") -> None:
    """Refuse traces whose prompts or observations hold ids that stand for images, video or audio.

    Sampled ids may be any: a model of images and text can draw such an id in a text.

    Args:
        traces: the traces.
        config: of the model that sampled or is going to score; one for text only names no such ids.
        where: what to call a trace, before its number.

    Raises:
        MultimodalTraceError: naming the row, the id and its name in the configuration.
    """
    check_ids([trace.prompt_ids for trace in traces], config, where, "prompt")
    # Those that the policy did not sample.
    given = [t.completion_ids[~t.loss_mask & (t.supports.sizes == 0)] for t in traces]
    check_ids(given, config, where, "observations")


def check_ids(rows: Sequence[Any], config: Any, where: str, what: str) -> None:
    """Refuse lists of token ids that hold ids which stand for images, video or audio.

    Args:
        rows: the lists.
        config: of the model.
        where: what to call a list, before its number.
        what: what the ids are.

    Raises:
        MultimodalTraceError: naming the row, the id and its name in the configuration.
    """
    names = placeholder_ids(config)
    for i, row in enumerate(rows if names else ()):
        ids = np.asarray(row, np.int64)
        held = ids[np.isin(ids, list(names))]
        if len(held):
            raise MultimodalTraceError(
                f"{where} {i}: its {what} hold {len(held)} times the id {held[0]}, the {names[int(held[0])]} of "
                f"{config.model_type}. {_REMEDY}."
            )


def placeholder_ids(config: Any) -> dict[int, str]:
    """The ids that stand for images, video or audio in a model's prompts, with their names in its configuration."""
    found: dict[int, str] = {}
    pending = [config]
    while pending:
        current = pending.pop()
        for name, value in vars(current).items():
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0 and _PLACEHOLDER.fullmatch(name):
                found[value] = name
            if name.endswith("_config") and hasattr(value, "to_dict"):
                pending.append(value)
    return found


def _parts(prompt: Any) -> Iterator[str]:
    """The types of a conversation's parts that are no text."""
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping):
                kind = str(part.get("type") or "")
                media = [kind] if _MEDIA.search(kind) else []
                media += [str(key) for key, value in part.items() if value is not None and _MEDIA.search(str(key))]
                yield from media
