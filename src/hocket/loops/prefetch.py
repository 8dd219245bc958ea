"""Find the rows of an array that a tile will access by running a slice of its body.

After Wei et al., "Automating dependence-aware parallelization of machine learning training on
distributed shared memory", EuroSys 2019. The slice keeps only the statements that the subscripts
need: every access becomes a mark at its row, and a statement whose value comes from an array that
the loop writes is left out. If a condition needs such a value, both branches are followed, so there
may be too many marks, never too few. If a subscript itself needs such a value, no marks are made
and all rows count as accessed. The cost is that of the loops around the accesses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.loops.body import LoopLevel
from hocket.loops.compile import CompileOptions, compiled
from hocket.loops.faithful import Faithful
from hocket.loops.flow import stored_names
from hocket.loops.form import Refusal
from hocket.loops.generate import KernelSource, list_kernel, range_kernel
from hocket.loops.names import Names
from hocket.loops.rows import Lowered

_MARKS = "touched_{}_"
_ATTRIBUTES = ("shape", "size", "ndim", "dtype")


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
    """Rows of some arrays that a tile accesses; all rows if that is not known."""
    every = {name: np.arange(len(array)) for name, array in arrays.items()}
    if prefetch is None:
        return every
    found = prefetch.rows(leading, values)
    return {name: found.get(name, rows) for name, rows in every.items()}


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
    parts = [*(level.prelude for level in levels[:-1]), tuple(levels[-1].node.body)]
    found: dict[str, list[tuple[ast.stmt, ...]]] = {}
    for array in sorted(arrays):
        slicer = _Slicer(array, _unknown_names(parts, set(written)))
        try:
            found[array] = [tuple(slicer.block(part)) for part in parts]
        except _NotKnown:
            continue
    if not found:
        return None
    merged = tuple(tuple(s for own in found.values() for s in own[k]) for k in range(len(parts)))
    for part in merged:
        for statement in part:
            ast.fix_missing_locations(statement)
    marks = [_MARKS.format(name) for name in found]
    make = list_kernel if is_listed else range_kernel
    try:
        source = make(levels, [*arguments, *marks], [], Faithful({}, names), Lowered(merged, ()))
    except Refusal:
        return None
    return Prefetch(source, tuple(found))


def _unknown_names(parts: Sequence[Sequence[ast.stmt]], written: set[str]) -> frozenset[str]:
    """Names whose value may come from an array that the loop writes, in any order of statements."""
    depends: list[tuple[set[str], frozenset[str]]] = []
    for node in (node for part in parts for top in part for node in ast.walk(top)):
        match node:
            case ast.Assign(_, value) | ast.AugAssign(_, _, value) | ast.For(_, value):
                depends.append((set(_stored(node)), _read(value)))
            case ast.If(test, body, orelse):
                depends.append((set(stored_names([*body, *orelse])), _read(test)))
    unknown, size = set(written), -1
    while len(unknown) != size:
        size = len(unknown)
        for targets, read in depends:
            if read & unknown:
                unknown |= targets
    return frozenset(unknown)


def _stored(node: ast.Assign | ast.AugAssign | ast.For) -> Iterable[str]:
    """Plain names that a statement itself binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


class _NotKnown(Exception):  # noqa: N818
    pass


@dataclass
class _Slicer:
    """Writes the slice of statements that finds the rows of one array."""

    array: str
    unknown: frozenset[str]
    flattened: int = field(default=0)
    """Number of enclosing conditions whose value is not known."""

    def block(self, statements: Iterable[ast.stmt]) -> list[ast.stmt]:
        return [kept for statement in statements for kept in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.For(target, head, body, [], _):
                if self._is_unknown(head):
                    raise _NotKnown
                inside = self.block(body)
                loop = ast.For(target, head, inside, [], None)
                return [*self.marks(head), *([loop] if inside else [])]
            case ast.If(test, body, orelse):
                return [*self.marks(test), *self._condition(test, body, orelse)]
            case ast.Assign([ast.Name() as target], value) | ast.AugAssign(
                ast.Name() as target, _, value
            ):
                return [*self.marks(value), *([] if target.id in self.unknown else [node])]
            case ast.Assign() | ast.AugAssign():
                bound = set(_stored(node))
                is_kept = bool(bound) and not bound & self.unknown
                if is_kept and any(
                    isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store)
                    for part in ast.walk(node)
                ):
                    raise _NotKnown
                return [*self.marks(node), *([node] if is_kept else [])]
            case ast.Expr(value):
                return self.marks(value)
            case ast.Pass():
                return []
            case ast.Continue() | ast.Break() if not self.flattened:
                return [node]
        raise _NotKnown

    def _condition(
        self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt]
    ) -> list[ast.stmt]:
        if not self._is_unknown(test):
            then, other = self.block(body), self.block(orelse)
            return [ast.If(test, then or [ast.Pass()], other)] if then or other else []
        self.flattened += 1
        both = [*self.block(body), *self.block(orelse)]
        self.flattened -= 1
        return both

    def _is_unknown(self, node: ast.AST) -> bool:
        return bool(_read(node) & self.unknown)

    def marks(self, node: ast.AST) -> list[ast.stmt]:
        """Statements that mark every row of the array that some code accesses."""
        found: list[ast.stmt] = []
        subscripts = {
            id(part.value): part for part in ast.walk(node) if isinstance(part, ast.Subscript)
        }
        measured = _measured(node)
        for part in ast.walk(node):
            if not isinstance(part, ast.Name) or part.id != self.array or id(part) in measured:
                continue
            if id(part) not in subscripts:
                raise _NotKnown  # all of it: handed to a helper, or used whole
            index = subscripts[id(part)].slice
            row = index.elts[0] if isinstance(index, ast.Tuple) else index
            if isinstance(row, ast.Slice) or self._is_unknown(row):
                raise _NotKnown
            text = f"{_MARKS.format(self.array)}[{ast.unparse(row)}] = True"
            found += ast.parse(text).body
        return found


def _measured(node: ast.AST) -> set[int]:
    """Ids of the name nodes of which only the size is used."""
    found: set[int] = set()
    for part in ast.walk(node):
        match part:
            case ast.Attribute(ast.Name() as name, attribute) if attribute in _ATTRIBUTES:
                found.add(id(name))
            case ast.Call(ast.Name("len"), [ast.Name() as name]):
                found.add(id(name))
            case _:
                pass
    return found


def _read(node: ast.AST) -> frozenset[str]:
    """Names whose values some code reads; uses of an array's size are left out."""
    measured = _measured(node)
    return frozenset(
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and id(part) not in measured
    )
