"""Rewrite statements over whole rows as loops over their elements before compilation.

Compiled as written, ``w = W[u[n]]; w += rate * (e * h - decay * w)`` would allocate temporary
arrays in every iteration. Here a statement that changes a row becomes one loop without temporaries,
and ``w @ h`` becomes a sum that may be vectorised. Statements keep their order and a loop accesses
only equal positions of rows, so the meaning is numpy's. Statements that do not fit are unchanged.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.loops.names import Names, parsed
from hocket.loops.promotion import Arr, KindReader, Kinds, Num

# BLAS uses its own order of summation, so this sum may be reassociated and vectorised too.
DOT = """
@njit(**{**OPTIONS_, "fastmath": {"reassoc", "contract", "nsz"}})
def dot_(a, b):
    total = a.dtype.type(0)
    for k in range(len(a)):
        total += a[k] * b[k]
    return total
"""


Lengths = dict[tuple[str, int], int]
"""Lengths of arrays by name and axis."""


class _Unfit(Exception):  # noqa: N818
    """Raised if an expression over rows cannot be computed element by element."""


def with_row_loops(
    parts: Sequence[Sequence[ast.stmt]], values: Mapping[str, Any], names: Names,
    known: Sequence[str] = (),
) -> tuple[list[list[ast.stmt]], Lengths]:  # fmt: skip
    """Return statements with loops over elements, and the lengths that the loops rely on.

    There are no lengths if no statement has changed. ``known`` are source lines that precede the
    statements. Different arrays must not share memory.
    """
    parts = copy.deepcopy(parts)
    every = [statement for part in parts for statement in part]
    reader = KindReader.of([*ast.parse("\n".join(known)).body, *every], values, names)
    writer = _RowLoops(values, names, reader, *_definitions(every))
    made = [ast.Module(list(part), []) for part in parts]
    made = [ast.fix_missing_locations(writer.visit(part)) for part in made]
    return [part.body for part in made], writer.lengths


def _definitions(statements: Sequence[ast.stmt]) -> tuple[dict[str, ast.expr], Counter[str]]:
    """Values of the names that one plain assignment binds, and how often each name is bound."""
    definitions: dict[str, ast.expr] = {}
    counts: Counter[str] = Counter()
    for node in (node for statement in statements for node in ast.walk(statement)):
        match node:
            case ast.Name(name, ast.Store()):
                counts[name] += 1
            case ast.AugAssign(ast.Name(name)):
                counts[name] -= 1  # a row is changed in place
            case ast.Assign([ast.Name(name)], value):
                definitions[name] = copy.deepcopy(value)
            case _:
                pass
    return {name: value for name, value in definitions.items() if counts[name] == 1}, counts


@dataclass
class _Elements:
    """A loop over the elements of a row that is being written."""

    row: Kinds
    index: ast.expr
    before: list[ast.stmt] = field(default_factory=list)
    """Statements before the loop: numbers and rows that are the same for all elements."""
    lengths: Lengths = field(default_factory=dict)
    """Lengths of the arrays whose rows occur."""

    def keep(self, name: str, value: ast.expr) -> ast.expr:
        self.before.append(ast.Assign([ast.Name(name, ast.Store())], value))
        return ast.Name(name, ast.Load())

    def length(self) -> int:
        lengths = set(self.lengths.values())
        if len(lengths) != 1:
            raise _Unfit
        return lengths.pop()


@dataclass
class _RowLoops(ast.NodeTransformer):
    values: Mapping[str, Any]
    names: Names
    reader: KindReader
    definitions: dict[str, ast.expr]
    counts: Counter[str]
    count: int = 0
    lengths: Lengths = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}_"

    # ── statements ──────────────────────────────────────────────────────────────────────────────

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Assign([ast.Subscript() as target], value):
                return self.loop(node, target, None, value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        return self.loop(node, node.target, node.op, node.value)

    def loop(
        self, node: ast.stmt, target: ast.expr, op: ast.operator | None, value: ast.expr
    ) -> ast.stmt | list[ast.stmt]:
        """Return a loop over the elements of a row; the statement itself if it does not fit."""
        target = copy.deepcopy(target)
        target.ctx = ast.Load()  # type: ignore[attr-defined]
        row = self.reader.of_expression(target)
        if not _is_row(row) or isinstance(op, (ast.MatMult, ast.Pow)):
            return node
        index = self.fresh("at")
        work = _Elements(row, ast.Name(index, ast.Load()))
        try:
            made, cell = self.element(value, work), self.element(target, work)
            length = work.length()
        except _Unfit:
            return node
        self.lengths |= work.lengths
        cell.ctx = ast.Store()  # type: ignore[attr-defined]
        inside = ast.AugAssign(cell, op, made) if op else ast.Assign([cell], made)  # type: ignore[arg-type]
        head = parsed(f"range({length})")
        loop = ast.For(ast.Name(index, ast.Store()), head, [inside], [], None)
        return [ast.copy_location(part, node) for part in (*work.before, loop)]

    # ── expressions ─────────────────────────────────────────────────────────────────────────────

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return self.dot(node, node.left, node.right) if isinstance(node.op, ast.MatMult) else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_dot = self.names.library(node.func) == "numpy.dot" and len(node.args) == 2
        return self.dot(node, *node.args) if is_dot else node

    def dot(self, node: ast.expr, left: ast.expr, right: ast.expr) -> ast.expr:
        """Return a call for a product of two rows; any other product as it is."""
        row = self.reader.of_expression(left)
        work = _Elements(row, ast.Constant(0))
        try:
            if not _is_row(row) or self.reader.of_expression(right) != row:
                return node
            self.element(left, work)
            self.element(right, work)
            work.length()
        except _Unfit:
            return node
        self.lengths |= work.lengths
        return ast.copy_location(ast.Call(ast.Name("dot_", ast.Load()), [left, right], []), node)

    def element(self, node: ast.expr, work: _Elements) -> ast.expr:
        """Return one element of a row's expression; raises `_Unfit`."""
        kinds = self.reader.of_expression(node)
        if kinds and all(isinstance(kind, Num) for kind in kinds):
            is_plain = isinstance(node, (ast.Constant, ast.Name))
            return node if is_plain else work.keep(self.fresh("part"), node)
        if kinds != work.row:
            raise _Unfit
        match node:
            case ast.Name(name):
                self.measure(name, work)
                return ast.Subscript(node, work.index, ast.Load())
            case ast.Subscript(ast.Name(name), place) if self.is_matrix(name):
                if isinstance(place, (ast.Slice, ast.Tuple)):
                    raise _Unfit
                work.lengths[name, 1] = self.values[name].shape[1]
                row = work.keep(self.fresh("row"), node)
                made: ast.expr = ast.Subscript(row, work.index, ast.Load())
            case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right):
                made = ast.BinOp(self.element(left, work), op, self.element(right, work))
            case ast.UnaryOp(ast.USub() as sign, operand):
                made = ast.UnaryOp(sign, self.element(operand, work))
            case ast.Call(ast.Attribute(value, "copy"), [], []):
                made = self.element(value, work)
            case ast.Call(function, [operand], []) if self.is_ufunc(function):
                made = ast.Call(function, [self.element(operand, work)], [])
            case _:
                raise _Unfit
        return made

    def measure(self, name: str, work: _Elements) -> None:
        """Add the length of a named row; raises `_Unfit` for a part of a row or an unknown one."""
        if name in self.values and not self.counts[name]:
            work.lengths[name, 0] = self.values[name].shape[0]
        elif name in self.definitions:
            value = self.definitions.pop(name)  # a definition that needs itself has no length
            self.element(value, _Elements(work.row, work.index, lengths=work.lengths))
            self.definitions[name] = value
        else:
            raise _Unfit

    def is_matrix(self, name: str) -> bool:
        return not self.counts[name] and getattr(self.values.get(name), "ndim", 0) == 2

    def is_ufunc(self, function: ast.expr) -> bool:
        module, _, name = (self.names.library(function) or "").partition(".")
        return module == "numpy" and isinstance(getattr(np, name, None), np.ufunc)


def _is_row(kinds: Kinds) -> bool:
    return kinds in [frozenset({Arr(dtype, 1)}) for dtype in ("float32", "float64")]
