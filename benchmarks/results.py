"""Writes what a benchmark measured as a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], fields: Sequence[str] | None = None) -> None:
    """Write rows in the place of an earlier file.

    Args:
        path: the file; its folder is made.
        rows: at least one.
        fields: names of the columns; those of the first row by default.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fields or list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
