"""Prints the rooms of the package, their floors and who imports whom: `python -m scripts.print_rooms`.

A room is a folder of `trl_support_replay`. Its floor is one above the highest room that it imports. Imports inside
functions and under `TYPE_CHECKING` count like all others. The package's own `__init__` offers names of every room and
belongs to none; nobody inside imports from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "trl_support_replay"


def modules() -> dict[str, Path]:
    """Path of every module by its dotted name, without the package's own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imported(module: str, path: Path) -> Iterator[str]:
    """Dotted names below the package that a module imports; `""` is the package itself."""
    name = PACKAGE.name
    package = [name, *module.split(".")]
    if path.name != "__init__.py" or path.parent == PACKAGE:
        package.pop()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import room` names the room behind the import.
            names = [f"{whole}.{alias.name}" for alias in node.names] if whole == name else [whole]
        else:
            continue
        for full in names:
            if full == name or full.startswith(f"{name}."):
                yield full[len(name) + 1 :]


def room_of(module: str) -> str:
    """The room of a module: its first folder, or the module itself where it lies loose at the top."""
    return module.split(".")[0]


def arrows() -> dict[str, dict[str, list[str]]]:
    """`arrows()[a][b]` lists the modules of room `a` that import from room `b`, each as `module -> imported`."""
    known = modules()
    found: dict[str, dict[str, list[str]]] = {room_of(module): {} for module in known if module != "__init__"}
    for module, path in known.items():
        if module == "__init__":
            continue
        for target in imported(module, path):
            there = room_of(target) if target and (PACKAGE / room_of(target)).exists() else ""
            there = there or (room_of(target) if room_of(target) in known else "__init__")
            if there != room_of(module):
                found[room_of(module)].setdefault(there, []).append(f"{module} -> {target or PACKAGE.name}")
    return found


def floors(found: dict[str, dict[str, list[str]]]) -> dict[str, int]:
    """Floor of each room, from 0.

    Raises:
        ValueError: rooms import each other in a circle, so that none of them is above.
    """
    height: dict[str, int] = {}
    open_rooms: list[str] = []

    def floor(room: str) -> int:
        if room in open_rooms:
            circle = [*open_rooms[open_rooms.index(room) :], room]
            steps = [found[a][b][0] for a, b in zip(circle, circle[1:], strict=False)]
            raise ValueError(f"Rooms import each other: {', '.join(steps)}.")
        if room not in height:
            open_rooms.append(room)
            height[room] = 1 + max((floor(below) for below in found.get(room, {})), default=-1)
            open_rooms.pop()
        return height[room]

    for room in found:
        floor(room)
    return height


def main() -> None:
    found = arrows()
    height = floors(found)
    for level in sorted(set(height.values()), reverse=True):
        print(f"floor {level}")
        for room in sorted(room for room in height if height[room] == level):
            print(f"  {room:<16} {' '.join(sorted(found.get(room, {}), key=lambda name: (-height[name], name)))}")
    print(f"{len(height)} rooms and loose modules, {sum(map(len, found.values()))} arrows")


if __name__ == "__main__":
    main()
