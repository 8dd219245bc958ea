"""Names that go from one iteration to the next: sums, products, extremes, or a reason to refuse.

A carried name is a reduction if every statement that mentions it is one update by the same
associative operator and its value is read nowhere else. Each worker then has its own, and they are
combined in a fixed order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hocket.loops.flow import mentions
from hocket.loops.form import Refusal
from hocket.loops.names import Library, Names

_CLASSES = {
    "Add": "sum", "Sub": "sum", "Mult": "product", "BitOr": "or", "BitAnd": "and",
}  # fmt: skip
_EXTREMES = (Library("builtins.min"), Library("builtins.max"))
EXACT = frozenset({"min", "max", "or", "and"})
"""Operators that give the same result in every order, also on floating-point numbers."""


@dataclass(frozen=True)
class Reduction:
    """A scalar that the loop accumulates."""

    name: str
    op: str
    line: int
    added: tuple[ast.expr, ...]
    takes_equal: bool = False
    """Of an extreme: whether of two equal numbers (0.0 and -0.0) the later one is kept."""
    takes_nan: bool = False
    """``min(e, s)``: an e that is no number is kept, and lost again at the next one."""


class _Update(NamedTuple):
    op: str
    added: ast.expr
    takes_equal: bool = False
    takes_nan: bool = False


def find_reduction(name: str, statements: Sequence[ast.stmt], names: Names) -> Reduction:
    """Reduction that accumulates a carried name; raises `Refusal` naming its lines if it is not."""
    found: list[tuple[_Update, int]] = []
    for statement in _simple_statements(statements):
        if not mentions(statement, name):
            continue
        update = _update(statement, name, names)
        if update is None:
            raise _carried(name, statements)
        found.append((update, statement.lineno))
    if len({(update.op, update.takes_equal) for update, _ in found}) != 1:
        raise _carried(name, statements)
    first, line = found[0]
    return Reduction(
        name, first.op, line, tuple(update.added for update, _ in found),
        first.takes_equal, any(update.takes_nan for update, _ in found),
    )  # fmt: skip


def _simple_statements(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """Statements that hold no others, the heads of those that do, and whole guarded extremes."""
    for statement in statements:
        match statement:
            case ast.If() if _guarded_extreme(statement) is not None:
                yield statement
            case ast.If(test, body, orelse) | ast.While(test, body, orelse):
                yield test
                yield from _simple_statements([*body, *orelse])
            case ast.For(target, head, body, orelse):
                yield target
                yield head
                yield from _simple_statements([*body, *orelse])
            case _:
                yield statement


def _update(node: ast.AST, name: str, names: Names) -> _Update | None:
    match node:
        case ast.AugAssign(ast.Name(target), op, value) if target == name:
            return _simple_update(type(op).__name__, value, name)
        case ast.Assign([ast.Name(target)], ast.BinOp(ast.Name(left), op, value)) if (
            target == name and left == name
        ):
            return _simple_update(type(op).__name__, value, name)
        case ast.Assign([ast.Name(target)], ast.BinOp(value, op, ast.Name(right))) if (
            target == name and right == name and not isinstance(op, ast.Sub)
        ):
            return _simple_update(type(op).__name__, value, name)
        case ast.Assign([ast.Name(target)], ast.Call(ast.Name(function), [one, other], [])) if (
            target == name and names.meaning(function) in _EXTREMES
        ):
            value = other if _is(one, name) else one
            kept = one if value is other else other
            if not _is(kept, name) or mentions(value, name):
                return None
            return _Update(function, value, takes_equal=value is one, takes_nan=value is one)
        case ast.If():
            extreme = _guarded_extreme(node)
            return extreme[1] if extreme is not None and extreme[0] == name else None
        case _:
            return None


def _simple_update(op: str, value: ast.expr, name: str) -> _Update | None:
    return _Update(_CLASSES[op], value) if op in _CLASSES and not mentions(value, name) else None


def _guarded_extreme(node: ast.If) -> tuple[str, _Update] | None:
    """``if e > s: s = e`` keeps the greatest."""
    match node:
        case ast.If(
            ast.Compare(left, [op], [right]),
            [ast.Assign([ast.Name(name)], value)],
            [],
        ):
            text = ast.unparse(value)
            greater = isinstance(op, (ast.Gt, ast.GtE))
            if not greater and not isinstance(op, (ast.Lt, ast.LtE)):
                return None
            equal = isinstance(op, (ast.GtE, ast.LtE))
            if ast.unparse(left) == text and _is(right, name) and not mentions(left, name):
                return name, _Update("max" if greater else "min", value, equal)
            if ast.unparse(right) == text and _is(left, name) and not mentions(right, name):
                return name, _Update("min" if greater else "max", value, equal)
    return None


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _carried(name: str, statements: Sequence[ast.stmt]) -> Refusal:
    reads: list[int] = []
    writes: list[int] = []
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == name:
                (reads if isinstance(node.ctx, ast.Load) else writes).append(node.lineno)
            if isinstance(node, ast.AugAssign) and _is(node.target, name):
                reads.append(node.lineno)
    read, write = min(reads, default=0), min(writes, default=0)
    return Refusal(
        f"{name} is carried from one iteration to the next: read at line {read}, written at line "
        f"{write}",
        read,
        write,
    )


def refuse_lost_numbers(reduction: Reduction, kind: str) -> None:
    """Raise `Refusal` where an extreme of floats depends on where a NaN stands."""
    if reduction.takes_nan and kind not in ("int", "bool"):
        name, op = reduction.name, reduction.op
        raise Refusal(
            f"{name} = {op}(…, {name}) at line {reduction.line} depends on the order where a "
            f"number is NaN; {op}({name}, …) does not",
            reduction.line,
        )
