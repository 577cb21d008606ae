"""Code blocks and links of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
# A block that is not run says why, on the line before it.
_NOT_RUN = re.compile(r"<!-- not run: .{10,} -->")
_FENCE = re.compile(r"^(```+)(\w*)\s*$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text, line of its first line, and whether it is marked as not run."""

    language: str
    text: str
    line: int
    not_run: bool


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    start, language, marked = None, "", False
    for i, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence and start is None:
            start, language = i + 1, fence[2]
            marked = i > 0 and bool(_NOT_RUN.fullmatch(lines[i - 1].strip()))
        elif fence and start is not None:
            yield Block(language, "\n".join(lines[start:i]) + "\n", start + 1, marked)
            start = None


def prose(page: Path) -> str:
    """The page without its fenced blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def links(page: Path) -> list[str]:
    """Targets of the page's links and images."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Names of the page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}
