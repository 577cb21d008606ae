"""Splits credentials off server URLs: they are for the server alone."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

_USERINFO = re.compile(r"^((?:[A-Za-z][A-Za-z0-9+.-]*:)?//)?[^/?#]*@")


def without_credentials(url: str) -> str:
    """`url` without its `user:password@`: what logs, errors and plans may show."""
    return _USERINFO.sub(r"\1", url)


def credentials(url: str) -> tuple[str, str] | None:
    """User and password in `url`, decoded, or `None`."""
    parts = urlsplit(url)
    return None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
