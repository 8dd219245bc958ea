"""Rewrite expressions over whole rows as loops over their elements before compilation.

Compiled as written, ``w = W[u[n]]; w += rate * (e * h - decay * w)`` would allocate temporary
arrays and count references to views in every iteration. Here a view becomes the index of its row,
an expression becomes one loop without temporaries, and ``w @ h`` a sum that may be vectorised.
Statements keep their order and a loop accesses only equal positions of rows, so the meaning is
numpy's. Code that does not fit this pattern is left as it is.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.loops.body import LoopLevel
from hocket.loops.flow import stored_names
from hocket.loops.names import Library, Names, parsed
from hocket.loops.promotion import Arr, KindReader, Other

_ELEMENTWISE = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_REDUCERS = frozenset({"sum", "mean", "std", "var", "max", "min", "argmax", "argmin", "prod"})
_SCALAR_CALLS = frozenset({"abs", "min", "max", "float", "int", "len"})
HELPERS = """
@njit(**{**OPTIONS_, "fastmath": {"reassoc", "contract", "nsz"}})
def dot_rows_(a, i, b, j):
    total = a.dtype.type(0)
    for k in range(a.shape[1]):
        total += a[i, k] * b[j, k]
    return total


@njit(**{**OPTIONS_, "fastmath": {"reassoc", "contract", "nsz"}})
def dot_row_(a, i, b):
    total = a.dtype.type(0)
    for k in range(a.shape[1]):
        total += a[i, k] * b[k]
    return total


@njit(**{**OPTIONS_, "fastmath": {"reassoc", "contract", "nsz"}})
def dot_(a, b):
    total = a.dtype.type(0)
    for k in range(len(a)):
        total += a[k] * b[k]
    return total
"""


@dataclass(frozen=True)
class Lowered:
    """Rewritten statements per level (between loops, then the body), and those before all loops."""

    parts: tuple[tuple[ast.stmt, ...], ...]
    setup: tuple[str, ...]


@dataclass(frozen=True)
class _Row:
    array: str
    place: str
    """Name of the variable that holds the row's index; empty for an array of rank one."""

    def element(self, index: str) -> str:
        return f"{self.array}[{self.place}, {index}]" if self.place else f"{self.array}[{index}]"


class _Unfit(Exception):  # noqa: N818
    pass


def lowered(levels: Sequence[LoopLevel], values: Mapping[str, Any], names: Names) -> Lowered | None:
    """Statements of an iteration as loops over elements; None if they do not fit."""
    parts = [*(level.prelude for level in levels[:-1]), tuple(levels[-1].node.body)]
    every = [statement for part in parts for statement in part]
    indices = [statement for level in levels for statement in ast.parse(f"{level.name} = 0").body]
    reader = KindReader.of([*indices, *every], values, names)
    writer = _Writer(values, names, reader, _bound_once(every))
    try:
        made = tuple(tuple(writer.block(part)) for part in parts)
    except _Unfit:
        return None
    if not writer.has_rows:
        return None
    for part in made:
        for statement in part:
            ast.fix_missing_locations(statement)
    return Lowered(made, tuple(writer.setup))


def _bound_once(statements: Sequence[ast.stmt]) -> frozenset[str]:
    """Names bound by one plain assignment at the top level and by no other statement."""
    counts: dict[str, int] = {}
    plain: set[str] = set()
    for top in statements:
        for node in ast.walk(top):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                counts[node.id] = counts.get(node.id, 0) + 1
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                # In place for rows, so no binding.
                counts[node.target.id] = counts.get(node.target.id, 0) - 1
        if isinstance(top, ast.Assign):
            plain |= stored_names(top.targets)
    return frozenset(name for name in plain if counts[name] == 1)


@dataclass
class _Writer:
    values: Mapping[str, Any]
    names: Names
    reader: KindReader
    bound_once: frozenset[str]
    rows: dict[str, _Row] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    lengths: set[int] = field(default_factory=set)
    dtypes: set[Any] = field(default_factory=set)
    has_rows: bool = False
    count: int = 0

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}_"

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in statements for made in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        before: list[ast.stmt] = []
        match node:
            case ast.Assign([ast.Name(name)], value) if self.is_row(value):
                return self.bind(name, value, before)
            case ast.Assign([target], value) if self.is_row(target):
                return self.over_row(target, None, value, before)
            case ast.AugAssign(target, op, value) if self.is_row(target):
                if not isinstance(op, _ELEMENTWISE):
                    raise _Unfit
                return self.over_row(target, op, value, before)
            case ast.If(test, body, orelse):
                head = self.scalar(test, before)
                return [*before, ast.If(head, self.block(body), self.block(orelse))]
            case ast.For(target, head, body, []):
                head = self.scalar(head, before)
                return [*before, ast.For(target, head, self.block(body), [], None)]
            case ast.While(test, body, []):
                head = self.scalar(test, before)
                if before:
                    raise _Unfit
                return [ast.While(head, self.block(body), [])]
            case ast.Assign(targets, value):
                made = self.scalar(value, before)
                bound = [self.scalar(target, before) for target in targets]
                return [*before, ast.Assign(bound, made)]
            case ast.AugAssign(target, op, value):
                made = self.scalar(value, before)
                changed: Any = self.scalar(target, before)
                return [*before, ast.AugAssign(changed, op, made)]
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Expr(ast.Constant()):
                return [node]
            case _:
                raise _Unfit

    # ── rows ────────────────────────────────────────────────────────────────────────────────────

    def rank(self, node: ast.expr) -> int:
        """0 for a number, 1 for a row, more for other arrays; raises `_Unfit` if unknown."""
        match node:
            case ast.Call(ast.Attribute(value, "copy"), [], []):
                return self.rank(value)
            case ast.Call(_, arguments, []):
                is_number = self.is_dot(node) or self.reduced(node) is not None
                return 0 if is_number else max(map(self.rank, arguments), default=0)
        kinds = self.reader.of_expression(node)
        ranks = {kind.rank if isinstance(kind, Arr) else 0 for kind in kinds}
        if len(ranks) > 1 or Other() in kinds:
            raise _Unfit
        return max(ranks, default=0)

    def is_row(self, node: ast.expr) -> bool:
        rank = self.rank(node)
        if rank > 1:
            raise _Unfit
        return rank == 1

    def reduced(self, node: ast.Call) -> ast.expr | None:
        """The row that ``row.sum()`` or ``np.sum(row)`` sums; None for other calls."""
        match node:
            case ast.Call(ast.Attribute(ast.Name(module), name), [value], []) if (
                name in _REDUCERS and self.is_numpy(module)
            ):
                return value if self.is_row(value) else None
            case ast.Call(ast.Attribute(value, name), [], []) if name in _REDUCERS:
                return value if self.is_row(value) else None
        return None

    def is_dot(self, node: ast.Call) -> bool:
        if (
            len(node.args) != 2
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr != "dot"
        ):
            return False
        return isinstance(node.func.value, ast.Name) and self.is_numpy(node.func.value.id)

    def is_numpy(self, name: str) -> bool:
        meaning = self.names.meaning(name)
        return isinstance(meaning, Library) and meaning.path == "numpy"

    def row(self, node: ast.expr, before: list[ast.stmt]) -> _Row:
        """The row that an expression denotes; its index is stored in a variable."""
        if isinstance(node, ast.Name) and node.id in self.rows:
            return self.rows[node.id]
        if any(isinstance(part, ast.Slice) for part in ast.walk(node)):
            raise _Unfit
        base = node.value if isinstance(node, ast.Subscript) else node
        if not isinstance(base, ast.Name) or base.id not in self.values:
            raise _Unfit
        array = self.values[base.id]
        if array.dtype.kind != "f":
            raise _Unfit
        self.dtypes.add(array.dtype)
        self.lengths.add(array.shape[-1])
        if len(self.dtypes) > 1 or len(self.lengths) > 1:
            raise _Unfit
        self.has_rows = True
        if not isinstance(node, ast.Subscript):
            return _Row(base.id, "")
        place = self.fresh("row")
        index = self.scalar(node.slice, before)
        before.append(ast.Assign([ast.Name(place, ast.Store())], index))
        return _Row(base.id, place)

    def bind(self, name: str, value: ast.expr, before: list[ast.stmt]) -> list[ast.stmt]:
        if name not in self.bound_once or name in self.values:
            raise _Unfit
        if isinstance(value, (ast.Subscript, ast.Name)):
            self.rows[name] = self.row(value, before)
            return before
        scratch = self.fresh("scratch")
        made = self.over_row(_Row(scratch, ""), None, value, before)
        dtype = next(iter(self.dtypes))
        length = next(iter(self.lengths))
        self.setup += [f"{scratch} = np_.empty({length}, np_.{dtype.name})"]
        self.rows[name] = _Row(scratch, "")
        return made

    def over_row(
        self,
        target: ast.expr | _Row,
        op: ast.operator | None,
        value: ast.expr,
        before: list[ast.stmt],
    ) -> list[ast.stmt]:
        """Write a loop over the elements of one row."""
        row = target if isinstance(target, _Row) else self.row(target, before)
        index = self.fresh("at")
        made = self.element(value, index, before)
        cell: Any = parsed(row.element(index))
        cell.ctx = ast.Store()
        inside = ast.Assign([cell], made) if op is None else ast.AugAssign(cell, op, made)
        length = next(iter(self.lengths))
        loop = ast.For(ast.Name(index, ast.Store()), parsed(f"range({length})"), [inside], [], None)
        return [*before, loop]

    def element(self, node: ast.expr, index: str, before: list[ast.stmt]) -> ast.expr:
        """Write one element of a row's expression."""
        if not self.is_row(node):
            # Numbers are the same for all elements: they are taken before the loop.
            made = self.scalar(node, before)
            if isinstance(made, (ast.Constant, ast.Name)):
                return made
            name = self.fresh("part")
            before.append(ast.Assign([ast.Name(name, ast.Store())], made))
            return ast.Name(name, ast.Load())
        match node:
            case ast.Name() | ast.Subscript():
                return parsed(self.row(node, before).element(index))
            case ast.BinOp(left, op, right) if isinstance(op, _ELEMENTWISE):
                one, other = (self.element(side, index, before) for side in (left, right))
                return ast.BinOp(one, op, other)
            case ast.UnaryOp(ast.USub() as op, operand):
                return ast.UnaryOp(op, self.element(operand, index, before))
            case ast.Call(ast.Attribute(value, "copy"), [], []):
                return self.element(value, index, before)
            case ast.Call(ast.Attribute(ast.Name(module), name) as function, [argument], []):
                if not self.is_numpy(module) or not isinstance(getattr(np, name, None), np.ufunc):
                    raise _Unfit
                return ast.Call(function, [self.element(argument, index, before)], [])
            case _:
                raise _Unfit

    # ── numbers ─────────────────────────────────────────────────────────────────────────────────

    def scalar(self, node: ast.expr, before: list[ast.stmt]) -> ast.expr:
        """Write an expression without rows: products of rows become calls, their elements cells."""
        match node:
            case ast.Name(name):
                if name in self.rows:
                    raise _Unfit
                return node
            case ast.Constant():
                return node
            case ast.Attribute(ast.Name(name)):
                if name in self.rows:
                    raise _Unfit
                return node
            case ast.Call(ast.Attribute(_, name)) if (row := self.reduced(node)) is not None:
                if not isinstance(row, (ast.Name, ast.Subscript)):
                    raise _Unfit
                whole = self.row(row, before)
                text = f"{whole.array}[{whole.place}]" if whole.place else whole.array
                return ast.copy_location(parsed(f"{text}.{name}()"), node)
            case ast.BinOp(left, ast.MatMult(), right):
                return self.dot(left, right, before)
            case ast.Call() if self.is_dot(node):
                return self.dot(node.args[0], node.args[1], before)
            case ast.Subscript(ast.Name(name), place) if name in self.rows:
                cell = parsed(self.rows[name].element(ast.unparse(self.scalar(place, before))))
                cell.ctx = node.ctx  # type: ignore[attr-defined]
                return cell
            case ast.Call(ast.Name(function), _, []) if function not in _SCALAR_CALLS | {"range"}:
                raise _Unfit
        made = copy.copy(node)
        for name, child in ast.iter_fields(node):
            if isinstance(child, ast.expr):
                setattr(made, name, self.scalar(child, before))
            elif isinstance(child, list):
                parts = [
                    self.scalar(part, before) if isinstance(part, ast.expr) else part
                    for part in child
                ]
                setattr(made, name, parts)
        return made

    def dot(self, left: ast.expr, right: ast.expr, before: list[ast.stmt]) -> ast.expr:
        one, other = self.row(left, before), self.row(right, before)
        if not one.place and other.place:
            one, other = other, one
        if one.place and other.place:
            return parsed(f"dot_rows_({one.array}, {one.place}, {other.array}, {other.place})")
        if one.place:
            return parsed(f"dot_row_({one.array}, {one.place}, {other.array})")
        return parsed(f"dot_({one.array}, {other.array})")
