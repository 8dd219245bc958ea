"""Scope of a loop: arrays with their rank and kind, scalars, and library names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hocket.loops.form import Kind
from hocket.loops.names import Names


@dataclass(frozen=True)
class ArrayInfo:
    """Rank, number kind and owner of an input array."""

    rank: int
    kind: Kind
    owner: str
    """Name that identifies the array's memory: two names of one array have the same owner."""


@dataclass(frozen=True)
class Scope:
    """Arrays and scalars by name; ``names`` resolves called functions."""

    arrays: Mapping[str, ArrayInfo]
    scalars: Mapping[str, Kind]
    names: Names

    def only(self, names: Iterable[str]) -> dict[str, ArrayInfo]:
        """Return the arrays among some names.

        If the owner of an array is not among them, the first of its other names becomes its
        owner.
        """
        heirs: dict[str, str] = {}
        found = {name: self.arrays[name] for name in sorted(names) if name in self.arrays}
        for name, info in found.items():
            heirs.setdefault(info.owner, info.owner if info.owner in found else name)
        return {name: replace(info, owner=heirs[info.owner]) for name, info in found.items()}

    def info(self, owner: str) -> ArrayInfo:
        """Return an array by the name of its owner."""
        return self.arrays[owner]


def guessed_scope(nodes: Iterable[ast.AST], inputs: Iterable[str], names: Names) -> Scope:
    """Scope for analysis without data: ranks are guessed from each name's longest subscript."""
    ranks: dict[str, int] = {}
    for top in nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.Subscript):
                name, count = _subscript_depth(node)
                if name:
                    ranks[name] = max(ranks.get(name, 1), count)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "len" and isinstance(node.args[0], ast.Name):
                    ranks.setdefault(node.args[0].id, 1)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                for side in (node.left, node.right):
                    name, count = _subscript_depth(side)
                    if name:
                        ranks[name] = max(ranks.get(name, 1), count + 1)
    _raise_through_aliases(nodes, ranks)
    known = set(inputs)
    arrays = {
        name: ArrayInfo(rank, "unknown", name) for name, rank in ranks.items() if name in known
    }
    scalars: dict[str, Kind] = {name: "unknown" for name in known if name not in arrays}
    return Scope(arrays, scalars, names)


def _raise_through_aliases(nodes: Iterable[ast.AST], ranks: dict[str, int]) -> None:
    """Increase ranks by use: ``w = W[u]`` with ``w[k]`` gives W rank 2, as ``w @ h`` gives both."""
    assigned = [
        (node.targets[0].id, node.value)
        for top in nodes
        for node in ast.walk(top)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    for _ in range(3):
        for target, value in assigned:
            name, count = _subscript_depth(value)
            if name and target in ranks:
                ranks[name] = max(ranks.get(name, 1), count + ranks[target])


def _subscript_depth(node: ast.expr) -> tuple[str, int]:
    count = 0
    while isinstance(node, ast.Subscript):
        index = node.slice
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        count += len(parts)
        node = node.value
    return (node.id, count) if isinstance(node, ast.Name) else ("", 0)


def kind_of(value: Any) -> Kind:
    """Number kind of a scalar or of an array's elements."""
    dtype = np.asarray(value).dtype
    if dtype.kind == "b":
        return "bool"
    if dtype.kind in "iu":
        return "int"
    return "float" if dtype.kind == "f" else "unknown"


def data_scope(values: Mapping[str, Any], owners: Mapping[str, str], names: Names) -> Scope:
    """Scope of actual values; ``owners`` maps all names of an array to one."""
    arrays: dict[str, ArrayInfo] = {}
    scalars: dict[str, Kind] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            arrays[name] = ArrayInfo(value.ndim, kind_of(value), owners.get(name, name))
        else:
            scalars[name] = kind_of(value)
    return Scope(arrays, scalars, names)
