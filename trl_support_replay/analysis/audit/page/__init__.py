"""One HTML page that carries its report, style and scripts, and asks no network for anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


def render_page(report: Mapping[str, Any]) -> str:
    """The page of a report with a token view (`report.build_report`, `token_view.add_samples`)."""
    page = _read("page.html")
    # Inside a script element, "</script" ends it wherever it stands; texts of tokens can hold it.
    data = json.dumps(report, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"STYLE": "style.css", "CHARTS": "charts.js", "TOKENS": "tokens.js"}
    for name, file in parts.items():
        page = page.replace(f"/*{name}*/", _read(file))
    return page.replace("/*REPORT*/", data)


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
