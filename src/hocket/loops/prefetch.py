"""Find the rows of an array that a tile will access, by running a slice of its body.

After Wei et al., "Automating dependence-aware parallelization of machine learning training on
distributed shared memory", EuroSys 2019. The slice contains only the statements that the subscripts
need. Every access becomes a mark at its row, and statements whose values come from an array that
the loop writes are omitted. If a condition needs such a value, both branches are followed, so there
may be too many marks, but never too few. If a subscript itself needs such a value, no marks are
made and all rows count as accessed. The cost is that of the loops around the accesses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.loops.body import LoopLevel, parts_of
from hocket.loops.compile import CompileOptions, compiled
from hocket.loops.faithful import Faithful
from hocket.loops.flow import stored_names
from hocket.loops.form import Refusal
from hocket.loops.generate import KernelSource, list_kernel, range_kernel
from hocket.loops.names import Names

_MARKS = "touched_{}_"


@dataclass(frozen=True)
class Prefetch:
    """A kernel that marks rows, and the arrays whose rows it finds."""

    source: KernelSource
    arrays: tuple[str, ...]

    def rows(
        self, leading: Sequence[Any], values: Mapping[str, Any]
    ) -> dict[str, NDArray[np.int64]]:
        """Rows that one tile accesses, in ascending order, by array."""
        marks = {name: np.zeros(len(values[name]), np.bool_) for name in self.arrays}
        named = {_MARKS.format(name): mark for name, mark in marks.items()}
        kernel = compiled(self.source.text, CompileOptions(boundscheck=True))
        kernel(*leading, *(named.get(name, values.get(name)) for name in self.source.arguments))
        return {name: np.flatnonzero(mark) for name, mark in marks.items()}


def touched_rows(
    prefetch: Prefetch | None,
    arrays: Mapping[str, NDArray[Any]],
    leading: Sequence[Any],
    values: Mapping[str, Any],
) -> dict[str, NDArray[np.int64]]:
    """Rows of some arrays that a tile accesses; all rows if they are unknown."""
    found = prefetch.rows(leading, values) if prefetch is not None else {}
    return {name: found.get(name, np.arange(len(array))) for name, array in arrays.items()}


def prefetch_of(
    levels: Sequence[LoopLevel],
    arguments: Sequence[str],
    arrays: Iterable[str],
    written: Iterable[str],
    names: Names,
    *,
    is_listed: bool,
) -> Prefetch | None:
    """Build the plan for those of ``arrays`` whose rows can be known; None if there are none.

    ``written`` are the names of all arrays that the loop writes: values read from them are not
    known before the loop has run.
    """
    parts = parts_of(levels)
    unknown = _unknown_names(parts, set(written))
    found: dict[str, list[list[ast.stmt]]] = {}
    for array in sorted(arrays):
        try:
            found[array] = [_Slicer(array, unknown).block(part) for part in parts]
        except _NotKnown:
            continue
    if not found:
        return None
    # The slices of all arrays are concatenated in one kernel.
    merged = [[s for own in found.values() for s in own[k]] for k in range(len(parts))]
    sliced = [
        replace(level, prelude=tuple(part)) for level, part in zip(levels, merged, strict=True)
    ]
    last = levels[-1].node
    body = merged[-1] or [ast.Pass()]
    loop = ast.copy_location(ast.For(last.target, last.iter, body, [], None), last)
    sliced[-1] = LoopLevel(ast.fix_missing_locations(loop))
    marks = [_MARKS.format(name) for name in found]
    make = list_kernel if is_listed else range_kernel
    try:
        source = make(sliced, [*arguments, *marks], [], Faithful({}, names))
    except Refusal:
        return None
    return Prefetch(source, tuple(found))


def _unknown_names(parts: Sequence[Sequence[ast.stmt]], unknown: set[str]) -> frozenset[str]:
    """Names whose value may come from an array that the loop writes, for any order of
    statements."""
    depends: list[tuple[frozenset[str], frozenset[str]]] = []
    for node in (node for part in parts for top in part for node in ast.walk(top)):
        match node:
            case ast.Assign(_, value) | ast.AugAssign(_, _, value) | ast.For(_, value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                depends.append((stored_names(targets), _read(value)))
            case ast.If(test, body, orelse):
                depends.append((stored_names([*body, *orelse]), _read(test)))
    size = -1
    while len(unknown) != size:
        size = len(unknown)
        for bound, read in depends:
            unknown |= bound if read & unknown else set()
    return frozenset(unknown)


class _NotKnown(Exception):  # noqa: N818
    """Raised if the rows that a statement accesses cannot be known."""


@dataclass
class _Slicer:
    """Writes the slice of statements that finds the rows of one array."""

    array: str
    unknown: frozenset[str]
    num_unknown_tests: int = field(default=0)
    """Number of enclosing conditions whose value is not known."""

    def block(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        return [kept for statement in statements for kept in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.For(target, head, body, [], _):
                if self.is_unknown(head):
                    raise _NotKnown
                inside = self.block(body)
                loop = ast.For(target, head, inside, [], None)
                return [*self.marks(head), *([loop] if inside else [])]
            case ast.If(test, body, orelse):
                return [*self.marks(test), *self.condition(test, body, orelse)]
            case ast.Assign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound = stored_names(targets)
                is_kept = bool(bound) and not bound & self.unknown
                # A statement in the slice must have no effect on arrays.
                if is_kept and any(
                    isinstance(part, ast.Subscript)
                    for target in targets
                    for part in ast.walk(target)
                ):
                    raise _NotKnown
                return [*self.marks(node), *([node] if is_kept else [])]
            case ast.Expr():
                return self.marks(node)
            case ast.Pass():
                return []
            case ast.Continue() | ast.Break() if not self.num_unknown_tests:
                return [node]
        raise _NotKnown

    def condition(
        self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt]
    ) -> list[ast.stmt]:
        is_unknown = self.is_unknown(test)
        self.num_unknown_tests += is_unknown
        then, other = self.block(body), self.block(orelse)
        self.num_unknown_tests -= is_unknown
        # Both branches are followed: marking too many rows costs time, too few would be wrong.
        if is_unknown or not (then or other):
            return [*then, *other]
        return [ast.If(test, then or [ast.Pass()], other)]

    def is_unknown(self, node: ast.AST) -> bool:
        return bool(_read(node) & self.unknown)

    def marks(self, node: ast.AST) -> list[ast.stmt]:
        """Statements that mark every row of the array that some code accesses."""
        found: list[ast.stmt] = []
        for part in _without_sizes(node):
            match part:
                case ast.Subscript(ast.Name(name), index) if name == self.array:
                    row = index.elts[0] if isinstance(index, ast.Tuple) else index
                    if isinstance(row, ast.Slice) or self.is_unknown(row):
                        raise _NotKnown
                    text = f"{_MARKS.format(name)}[{ast.unparse(row)}] = True"
                    found += ast.parse(text).body
        names = [p for p in _without_sizes(node) if isinstance(p, ast.Name) and p.id == self.array]
        if len(names) != len(found):
            raise _NotKnown  # all of it: handed to a helper, or used whole
        return found


def _without_sizes(node: ast.AST) -> Iterable[ast.AST]:
    """Yield the nodes of some code, but not those of which only the size is used."""
    match node:
        case ast.Attribute(ast.Name(), "shape" | "size" | "ndim" | "dtype"):
            return
        case ast.Call(ast.Name("len"), [ast.Name()]):
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _without_sizes(child)


def _read(node: ast.AST) -> frozenset[str]:
    """Names whose values some code reads; uses of an array's size are left out."""
    return frozenset(part.id for part in _without_sizes(node) if isinstance(part, ast.Name))
