"""Rooms and their folders depend on each other one way, also by imports inside of functions."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hocket

ROOT = Path(hocket.__file__).parent
Wants = dict[str, set[str]]


def imports(path: Path) -> Iterator[list[str]]:
    """The modules of the package that a file imports when it runs, without the package's name."""
    tree = ast.parse(path.read_text())
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in only_types:
            first, *rest = (node.module or "").split(".")
            if first == "hocket" and rest:
                yield rest


def circle(wants: Wants) -> list[str]:
    """Names that want each other in a circle, each with the next; empty where none do."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(wants.get(name, ())):
            if found := visit(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(wants) if (found := visit(name, []))), [])


def test_rooms_import_each_other_one_way() -> None:
    wants: Wants = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        wants[room] |= {other[0] for other in imports(path)} - {room}
    assert circle(wants) == []


def test_folders_of_a_room_import_each_other_one_way() -> None:
    for room in (path for path in ROOT.iterdir() if path.is_dir()):
        wants: Wants = defaultdict(set)
        folders = {path.name for path in room.iterdir() if path.is_dir()}
        for path in room.glob("*/**/*.py"):
            own = path.relative_to(room).parts[0]
            for other in imports(path):
                if other[0] == room.name and len(other) > 1 and other[1] in folders - {own}:
                    wants[own].add(other[1])
        assert circle(wants) == [], room.name
