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
    """Name that identifies the array's memory; all names of one array have the same owner."""


@dataclass(frozen=True)
class Scope:
    """Arrays and scalars by name; ``names`` resolves called functions."""

    arrays: Mapping[str, ArrayInfo]
    scalars: Mapping[str, Kind]
    names: Names

    def only(self, names: Iterable[str]) -> dict[str, ArrayInfo]:
        """The arrays among some names.

        If the owner of an array is not among them, the first of the array's other names becomes the
        owner.
        """
        found = {name: self.arrays[name] for name in sorted(names) if name in self.arrays}
        heirs = {info.owner: name for name, info in reversed(found.items())}
        heirs |= {name: name for name in found}
        return {name: replace(info, owner=heirs[info.owner]) for name, info in found.items()}


def guessed_scope(nodes: Iterable[ast.AST], inputs: Iterable[str], names: Names) -> Scope:
    """Scope for analysis without data: ranks are guessed from each name's longest subscript."""
    ranks: dict[str, int] = {}

    def use(node: ast.expr, more: int = 0) -> None:
        name, count = _subscript_depth(node)
        if name:
            ranks[name] = max(ranks.get(name, 1), count + more)

    every = [node for top in nodes for node in ast.walk(top)]
    for node in every:
        match node:
            case ast.Subscript():
                use(node)
            case ast.Call(ast.Name("len"), [argument]):
                use(argument)
            case ast.BinOp(left, ast.MatMult(), right):
                use(left, 1)
                use(right, 1)
            case _:
                pass
    # ``w = W[u]`` followed by ``w[k]`` gives W rank 2, as ``w @ h`` does. Three rounds follow views
    # of views.
    for _ in range(3):
        for node in every:
            match node:
                case ast.Assign([ast.Name(target)], value) if target in ranks:
                    use(value, ranks[target])
                case _:
                    pass
    known = set(inputs)
    arrays = {name: ArrayInfo(rank, "unknown", name) for name, rank in ranks.items()
              if name in known}  # fmt: skip
    return Scope(arrays, dict.fromkeys(known - arrays.keys(), "unknown"), names)


def _subscript_depth(node: ast.expr) -> tuple[str, int]:
    count = 0
    while isinstance(node, ast.Subscript):
        count += len(node.slice.elts) if isinstance(node.slice, ast.Tuple) else 1
        node = node.value
    return (node.id, count) if isinstance(node, ast.Name) else ("", 0)


def _kind_of(value: Any) -> Kind:
    """Number kind of a scalar or of an array's elements."""
    kinds: dict[str, Kind] = {"b": "bool", "i": "int", "u": "int", "f": "float"}
    return kinds.get(np.asarray(value).dtype.kind, "unknown")


def data_scope(values: Mapping[str, Any], owners: Mapping[str, str], names: Names) -> Scope:
    """Scope of actual values; ``owners`` maps all names of an array to one."""
    arrays: dict[str, ArrayInfo] = {}
    scalars: dict[str, Kind] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            arrays[name] = ArrayInfo(value.ndim, _kind_of(value), owners.get(name, name))
        else:
            scalars[name] = _kind_of(value)
    return Scope(arrays, scalars, names)
