"""One name, one meaning: no two classes of the package have the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import hocket

ROOT = Path(hocket.__file__).parent


def test_every_class_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
