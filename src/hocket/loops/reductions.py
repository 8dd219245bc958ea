"""Recognise reductions among carried names: sums, products, minima, maxima, flags.

A name carried from one iteration to the next is a reduction if every statement that mentions it
updates it by the same associative operator, and its value is read nowhere else. Each worker then
has its own copy, and the copies are combined in a fixed order. Any other carried name is refused.
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


@dataclass(frozen=True)
class Reduction:
    """A scalar that the loop accumulates."""

    name: str
    op: str
    line: int
    depends_on_order: bool = False
    """True for a minimum or maximum that keeps a NaN, or the later of 0.0 and -0.0."""
    kind: str = "unknown"
    """Kind of the numbers that are accumulated."""

    @property
    def is_exact(self) -> bool:
        """True if the bits of the result do not depend on the order of updates."""
        return self.op in ("min", "max", "or", "and") or self.kind in ("int", "bool")


class _Update(NamedTuple):
    op: str
    depends_on_order: bool = False


def find_reduction(name: str, statements: Sequence[ast.stmt], names: Names) -> Reduction:
    """Return the reduction of a carried name; raises `Refusal` with its lines if it is none."""
    mentioning = [node for node in _simple_statements(statements) if mentions(node, name)]
    updates = [_update(node, name, names) for node in mentioning]
    first = updates[0]
    if first is None or any(update is None or update.op != first.op for update in updates):
        raise _carried(name, statements)
    depends_on_order = any(update is not None and update.depends_on_order for update in updates)
    return Reduction(name, first.op, mentioning[0].lineno, depends_on_order)


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
        case ast.Assign([ast.Name(target)], ast.Constant(bool() as flag)) if target == name:
            return _Update("or" if flag else "and")  # a flag that is only raised or only lowered
        case ast.Assign([ast.Name(target)], ast.Call(ast.Name(function), [one, other], [])) if (
            target == name and names.meaning(function) in _EXTREMES
        ):
            is_kept_first = _is(one, name)
            value, kept = (other, one) if is_kept_first else (one, other)
            is_update = _is(kept, name) and not mentions(value, name)
            return _Update(function, depends_on_order=not is_kept_first) if is_update else None
        case ast.AugAssign(ast.Name(target), op, value):
            pass
        case ast.Assign([ast.Name(target)], ast.BinOp(ast.Name(left), op, value)) if left == name:
            pass
        case ast.Assign([ast.Name(target)], ast.BinOp(value, op, right)):
            if not _is(right, name) or isinstance(op, ast.Sub):
                return None
        case ast.If():
            found, extreme = _guarded_extreme(node) or ("", None)
            return extreme if found == name else None
        case _:
            return None
    op_class = _CLASSES.get(type(op).__name__)
    return _Update(op_class) if op_class and target == name and not mentions(value, name) else None


def _guarded_extreme(node: ast.If) -> tuple[str, _Update] | None:
    """Name and update of ``if e > s: s = e`` and similar maxima and minima, else None."""
    match node:
        case ast.If(
            ast.Compare(left, [ast.Gt() | ast.GtE() | ast.Lt() | ast.LtE() as op], [right]),
            [ast.Assign([ast.Name(name)], value)],
            [],
        ):
            is_greater = isinstance(op, (ast.Gt, ast.GtE))
            if _is(left, name):  # s < e is e > s
                left, right, is_greater = right, left, not is_greater
            is_same = ast.unparse(left) == ast.unparse(value)
            if is_same and _is(right, name) and not mentions(left, name):
                # 0.0 and -0.0 are equal but have different bits, so the order decides which one
                # remains.
                keeps_later = isinstance(op, (ast.GtE, ast.LtE))
                return name, _Update("max" if is_greater else "min", keeps_later)
    return None


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _carried(name: str, statements: Sequence[ast.stmt]) -> Refusal:
    reads: list[int] = []
    writes: list[int] = []
    for node in (node for statement in statements for node in ast.walk(statement)):
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


def refuse_order(reduction: Reduction) -> None:
    """Raise `Refusal` if a float extreme depends on the order of equal numbers or NaN."""
    if reduction.depends_on_order and reduction.kind not in ("int", "bool"):
        name, op = reduction.name, reduction.op
        raise Refusal(
            f"{name} at line {reduction.line} takes the later of two equal numbers, or a NaN, so "
            f"it depends on the order; {name} = {op}({name}, …) does not",
            reduction.line,
        )
