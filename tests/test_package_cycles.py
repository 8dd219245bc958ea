"""Folders of a package import each other one way; import-linter checks the packages."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hocket

ROOT = Path(hocket.__file__).parent
Imports = dict[str, set[str]]
"""Names that each name imports."""


class Source(NamedTuple):
    """A file of the package."""

    path: Path
    """Path below the package."""
    imports: list[list[str]]
    """Modules of the package that it imports at run time, without the package's name."""


@functools.cache
def sources() -> list[Source]:
    return [
        Source(path.relative_to(ROOT), imports_of(ast.parse(path.read_text())))
        for path in sorted(ROOT.rglob("*.py"))
    ]


def imports_of(tree: ast.Module) -> list[list[str]]:
    imports = []
    for node in nodes_at_run_time(tree):
        if isinstance(node, ast.ImportFrom):
            first, *rest = (node.module or "").split(".")
            if first == "hocket" and rest:
                imports.append(rest)
    return imports


def nodes_at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those for type checkers."""
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
        return
    yield node
    if not isinstance(node, ast.expr):  # no import is inside of an expression
        for inner in ast.iter_child_nodes(node):
            yield from nodes_at_run_time(inner)


def cycle(imports: Imports) -> list[str]:
    """Names that import each other in a cycle, each with the next; empty if there is none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(imports.get(name, ())):
            if found := search(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(imports) if (found := search(name, []))), [])


def test_folders_of_a_package_import_each_other_one_way() -> None:
    for package in (path for path in ROOT.iterdir() if path.is_dir()):
        imports: Imports = defaultdict(set)
        folders = {path.name for path in package.iterdir() if path.is_dir()}
        for source in sources():
            if source.path.parts[0] != package.name or len(source.path.parts) < 3:
                continue
            own = source.path.parts[1]
            for other in source.imports:
                if other[0] == package.name and len(other) > 1 and other[1] in folders - {own}:
                    imports[own].add(other[1])
        assert cycle(imports) == [], package.name
