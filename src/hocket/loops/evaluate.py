"""Evaluate index expressions for all iterations at once, before the loop runs.

Only integer expressions are supported: loop variables (as arrays), invariants, lengths, and
elements of arrays that the loop does not write. The syntax tree is walked; no text is executed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from hocket.loops.form import Refusal

_OPERATORS = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.FloorDiv: np.floor_divide,
    ast.Mod: np.remainder, ast.BitAnd: np.bitwise_and, ast.BitOr: np.bitwise_or,
    ast.BitXor: np.bitwise_xor, ast.LShift: np.left_shift, ast.RShift: np.right_shift,
}  # fmt: skip


class CannotEvaluate(Refusal):
    """Raised if the value of an expression is unknown before the loop."""


def evaluate(expression: str | ast.expr, values: Mapping[str, Any]) -> Any:
    """Return the value of an expression: an int64 number or array."""
    text = expression if isinstance(expression, str) else ast.unparse(expression)
    try:
        with np.errstate(all="raise"):
            return _value(ast.parse(text, mode="eval").body, values)
    except (IndexError, ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise CannotEvaluate(f"{text} is not known before the loop: {error}") from error


def number(expression: str | ast.expr, values: Mapping[str, Any]) -> int:
    """Return the value of an expression without loop variables."""
    result = evaluate(expression, values)
    if np.ndim(result):
        raise CannotEvaluate(f"{expression} is not one number")
    return int(result)


def loop_range(loop: ast.For, values: Mapping[str, Any]) -> range:
    """Return the values of a loop's variable if the loop started now."""
    match loop.iter:
        case ast.Call(ast.Name("range" | "prange") | ast.Attribute(_, "prange"), ends, []):
            found = [number(end, values) for end in ends]
            if len(found) < 3 or found[2]:
                return range(*found)
    raise CannotEvaluate(f"the range of the loop is not known: {ast.unparse(loop.iter)}")


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(int() as constant):
            return constant
        case ast.Name(name):
            return _integers(values[name], name)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.UnaryOp(ast.USub(), operand):
            return np.negative(_value(operand, values))
        case ast.Call(ast.Name("len"), [ast.Name(name)]):
            return len(values[name])
        case ast.Call(ast.Name("min" | "max" as name), arguments):
            choose = np.minimum if name == "min" else np.maximum
            return functools.reduce(choose, (_value(argument, values) for argument in arguments))
        case ast.Attribute(ast.Name(name), "size" | "ndim" as attribute):
            return getattr(values[name], attribute)
        case ast.Subscript(ast.Attribute(ast.Name(name), "shape"), ast.Constant(int() as axis)):
            return values[name].shape[axis]
        case ast.Subscript(ast.Name(name), place):
            parts = place.elts if isinstance(place, ast.Tuple) else [place]
            indices = tuple(_value(part, values) for part in parts)
            # Python would count a negative index from the end, but the analysis treats it as a
            # position.
            if any(np.size(index) and np.min(index) < 0 for index in indices):
                raise ValueError(f"{ast.unparse(node)} counts from the end")
            return _integers(values[name][indices], name)
        case _:
            raise ValueError(f"{ast.unparse(node)} is no expression of integers")


def _integers(value: Any, name: str) -> Any:
    array = np.asarray(value)
    # Values of unsigned 64-bit integers may exceed int64.
    if array.dtype.kind not in "iub" or array.dtype.str[1:] == "u8":
        raise ValueError(f"{name} holds no signed integers of up to 64 bits")
    return array.astype(np.int64, copy=False) if array.ndim else int(array)
