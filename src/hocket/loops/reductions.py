"""Recognise reductions among carried names: sums, products, minima, maxima, flags.

A name carried from one iteration to the next is a reduction if every statement that mentions it is
one update by the same associative operator and its value is read nowhere else. Each worker then has
a copy of its own, and the copies are combined in a fixed order. Any other carried name is
refused.
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
"""Operators whose result does not depend on the order, even for floating-point numbers."""


@dataclass(frozen=True)
class Reduction:
    """A scalar that the loop accumulates."""

    name: str
    op: str
    line: int
    depends_on_order: bool = False
    """True for a minimum or maximum that keeps a NaN or the later of 0.0 and -0.0."""


class _Update(NamedTuple):
    op: str
    depends_on_order: bool = False


def find_reduction(name: str, statements: Sequence[ast.stmt], names: Names) -> Reduction:
    """Return the reduction of a carried name; raises `Refusal` with its lines if it is none."""
    found: list[tuple[_Update, int]] = []
    for statement in _simple_statements(statements):
        if not mentions(statement, name):
            continue
        update = _update(statement, name, names)
        if update is None:
            raise _carried(name, statements)
        found.append((update, statement.lineno))
    if len({update.op for update, _ in found}) != 1:
        raise _carried(name, statements)
    first, line = found[0]
    return Reduction(name, first.op, line, any(update.depends_on_order for update, _ in found))


def _simple_statements(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """Simple statements, heads of compound ones, and ``if e > s: s = e`` as one statement."""
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
            is_kept_first = _is(one, name)
            value, kept = (other, one) if is_kept_first else (one, other)
            if not _is(kept, name) or mentions(value, name):
                return None
            return _Update(function, depends_on_order=not is_kept_first)
        case ast.Assign([ast.Name(target)], ast.Constant(bool() as value)) if target == name:
            return _Update("or" if value else "and")  # a flag that is only raised or only lowered
        case ast.If():
            extreme = _guarded_extreme(node)
            return extreme[1] if extreme is not None and extreme[0] == name else None
        case _:
            return None


def _simple_update(op: str, value: ast.expr, name: str) -> _Update | None:
    return _Update(_CLASSES[op]) if op in _CLASSES and not mentions(value, name) else None


def _guarded_extreme(node: ast.If) -> tuple[str, _Update] | None:
    """Name and update of ``if e > s: s = e`` and similar maxima and minima, else None."""
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
                return name, _Update("max" if greater else "min", equal)
            if ast.unparse(right) == text and _is(left, name) and not mentions(right, name):
                return name, _Update("min" if greater else "max", equal)
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


def refuse_order(reduction: Reduction, kind: str) -> None:
    """Raise `Refusal` if a float extreme depends on the order of equal numbers or NaN."""
    if reduction.depends_on_order and kind not in ("int", "bool"):
        name, op = reduction.name, reduction.op
        raise Refusal(
            f"{name} at line {reduction.line} takes the later of two equal numbers, or a NaN, so "
            f"it depends on the order; {name} = {op}({name}, …) does not",
            reduction.line,
        )
