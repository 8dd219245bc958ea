"""Rooms and their folders depend on each other one way, also by imports inside of functions."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hocket

ROOT = Path(hocket.__file__).parent
Wants = dict[str, set[str]]


class Source(NamedTuple):
    """What a file says of itself."""

    path: Path
    """Below the package."""
    imports: list[list[str]]
    """Modules of the package that it imports when it runs, without the package's name."""


@functools.cache
def sources() -> list[Source]:
    return [
        Source(path.relative_to(ROOT), read(ast.parse(path.read_text())))
        for path in sorted(ROOT.rglob("*.py"))
    ]


def read(tree: ast.Module) -> list[list[str]]:
    imports = []
    for node in nodes_that_run(tree):
        if isinstance(node, ast.ImportFrom):
            first, *rest = (node.module or "").split(".")
            if first == "hocket" and rest:
                imports.append(rest)
    return imports


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All but what is there for checkers of types."""
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    yield node
    if not isinstance(node, ast.expr):  # no import and no class is in an expression
        for inner in ast.iter_child_nodes(node):
            yield from nodes_that_run(inner)


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
    for source in sources():
        room = source.path.parts[0].removesuffix(".py")
        wants[room] |= {other[0] for other in source.imports} - {room}
    assert circle(wants) == []


def test_folders_of_a_room_import_each_other_one_way() -> None:
    for room in (path for path in ROOT.iterdir() if path.is_dir()):
        wants: Wants = defaultdict(set)
        folders = {path.name for path in room.iterdir() if path.is_dir()}
        for source in sources():
            if source.path.parts[0] != room.name or len(source.path.parts) < 3:
                continue
            own = source.path.parts[1]
            for other in source.imports:
                if other[0] == room.name and len(other) > 1 and other[1] in folders - {own}:
                    wants[own].add(other[1])
        assert circle(wants) == [], room.name
