"""Arithmetic on abstract numbers: linear forms if possible, otherwise expressions as keys."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from hocket.loops.form import (
    UNKNOWN,
    Array,
    Atom,
    Kind,
    Linear,
    Scalar,
    Tuple,
    Value,
    View,
)  # fmt: skip

_KEY_OPS = (ast.Mult, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift,
            ast.RShift)  # fmt: skip


def arithmetic(op: ast.operator, left: Scalar, right: Scalar, dims: Sequence[str]) -> Scalar:
    """Abstract result of a binary operator."""
    kind = result_kind(op, left.kind, right.kind)
    if kind in ("float", "bool"):
        return Scalar(None, None, kind)
    text = None
    if left.text is not None and right.text is not None:
        text = ast.unparse(ast.parse(f"({left.text}) {_symbol(op)} ({right.text})", mode="eval"))
    if left.linear is not None and right.linear is not None:
        if isinstance(op, ast.Add):
            return Scalar(left.linear + right.linear, text, kind)
        if isinstance(op, ast.Sub):
            return Scalar(left.linear - right.linear, text, kind)
        if isinstance(op, ast.Mult) and left.linear.is_const:
            return Scalar(right.linear.scaled(left.linear.const), text, kind)
        if isinstance(op, ast.Mult) and right.linear.is_const:
            return Scalar(left.linear.scaled(right.linear.const), text, kind)
    if text is None or not isinstance(op, _KEY_OPS):
        return Scalar(None, None, kind)
    return known_before(text, kind, dims)


def known_before(text: str, kind: Kind, dims: Sequence[str]) -> Scalar:
    """A number whose expression can be evaluated before the loop runs."""
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    atom = Atom("key" if names & set(dims) else "invariant", text)
    return Scalar(Linear.of(atom), text, kind)


def result_kind(op: ast.operator, left: Kind, right: Kind) -> Kind:
    """Kind of number that a binary operator returns."""
    if isinstance(op, ast.Div) or "float" in (left, right):
        return "float"
    if "unknown" in (left, right):
        return "unknown"
    return "int"


def _symbol(op: ast.operator) -> str:
    text = ast.unparse(ast.BinOp(ast.Name("a"), op, ast.Name("b")))
    return text.split()[1]


def views_in(value: Value) -> frozenset[View]:
    """All memory that a value may refer to."""
    if isinstance(value, Array):
        return value.views
    if isinstance(value, Tuple):
        return frozenset[View]().union(*(views_in(item) for item in value.items))
    return frozenset()


def merged(values: Sequence[Value]) -> Value:
    """A value that may be any one of several values."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(isinstance(value, Tuple) for value in values):
        tuples = [value.items for value in values if isinstance(value, Tuple)]
        if len({len(items) for items in tuples}) == 1:
            return Tuple(tuple(merged(items) for items in zip(*tuples, strict=True)))
    views = frozenset[View]().union(*(views_in(value) for value in values))
    if views:
        return Array(views)
    kinds = {value.kind if isinstance(value, Scalar) else "unknown" for value in values}
    return Scalar(None, None, kinds.pop()) if len(kinds) == 1 else UNKNOWN
