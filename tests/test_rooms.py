"""The layout of the package: rooms on floors, and imports that point down only."""

from __future__ import annotations

import ast

import pytest

from scripts.print_rooms import PACKAGE, arrows, floors, modules

# Rooms by floor, from the top. A room imports from lower floors only, and never from its own.
FLOORS = (
    ("cli",),
    ("trainers",),
    ("hub",),
    ("engines",),
    ("analysis", "client", "rollouts", "server"),
    ("checks", "megatron", "parallel", "policy", "wire"),
    ("batch", "engine_outputs", "libraries", "routing", "settings"),
    ("scoring", "traces"),
)
ROOMS = {room: len(FLOORS) - number for number, rooms in enumerate(FLOORS) for room in rooms}
LOOSE = {"__init__", "__main__", "_version", "errors"}
HEIGHT = {**ROOMS, "__main__": len(FLOORS) + 1, "errors": 0, "_version": 0}
"""Modules at the top of the package: `errors` and `_version` are below every room, `__main__` is above."""

SHARED_BY_BOTH_ENDS = {"wire", "engine_outputs", "settings", "libraries", "traces"}
MOST_ROOMS, MOST_FLOORS, MOST_LINES = 20, 9, 400


def test_every_import_points_down():
    """Imports inside functions and under `TYPE_CHECKING` too; nobody imports from the package's own `__init__`."""
    wrong = [
        f"{use} (floor {HEIGHT[room]} to {HEIGHT.get(below, 'none')})"
        for room, targets in arrows().items()
        for below, uses in targets.items()
        if HEIGHT.get(below, len(HEIGHT)) >= HEIGHT[room]
        for use in uses
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_are_few_and_known():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(ROOMS) and len(folders) <= MOST_ROOMS and len(FLOORS) <= MOST_FLOORS


def test_no_module_lies_loose():
    assert {path.stem for path in PACKAGE.glob("*.py")} == LOOSE


def test_server_and_client_share_only_what_is_below_both():
    found = arrows()
    assert "client" not in found["server"] and "server" not in found["client"]
    assert set(found["server"]) & set(found["client"]) <= SHARED_BY_BOTH_ENDS


def test_modules_are_short_and_say_what_they_are():
    sources = {module: path.read_text(encoding="utf-8") for module, path in modules().items()}
    long = [module for module, source in sources.items() if source.count("\n") > MOST_LINES]
    silent = [module for module, source in sources.items() if not ast.get_docstring(ast.parse(source))]
    assert not long and not silent


def test_below_the_trainers_nobody_reads_their_private_attributes():
    for module, path in modules().items():
        if module.split(".")[0] in ("trainers", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and isinstance(node.value, ast.Name):
                assert node.value.id != "trainer", f"{module}, line {node.lineno}: trainer.{node.attr}"


def test_a_circle_is_named():
    with pytest.raises(ValueError, match="Rooms import each other: a.x -> b.y, b.y -> a.x"):
        floors({"a": {"b": ["a.x -> b.y"]}, "b": {"a": ["b.y -> a.x"]}})
