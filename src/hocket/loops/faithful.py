"""Rewrite statements so that compiled code computes the same numbers as Python and numpy.

Adds casts where numpy computes in fewer bits than compiled code, checks where Python raises (a
divisor of zero, ``math.sqrt(-1)``, ``int(nan)``), numpy's pairwise order for sums, and ``or`` for
sums of numpy bools. Operations that cannot be made the same are recorded with their line
(`Deviation`).
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from hocket.loops.form import Refusal
from hocket.loops.names import Names
from hocket.loops.promotion import Arr, KindReader, Kinds, Num, Other

_NATIVE = frozenset({"int64", "float64", "complex128"})
"""Types in which compiled code computes without casts."""
_SAME_UFUNCS = frozenset({
    "add", "subtract", "multiply", "divide", "true_divide", "floor_divide", "remainder", "mod",
    "negative", "positive", "absolute", "abs", "fabs", "sqrt", "square", "reciprocal", "sign",
    "floor", "ceil", "trunc", "rint", "minimum", "maximum", "fmin", "fmax", "isnan", "isinf",
    "isfinite", "signbit", "copysign", "sin", "cos", "hypot", "heaviside", "invert",
    "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "logical_and",
    "logical_or", "logical_xor", "logical_not", "greater", "greater_equal", "less", "less_equal",
    "equal", "not_equal", "deg2rad", "radians",
})  # fmt: skip
"""Numpy functions whose compiled form gives the same bits, as tests check."""
_SAME_REDUCTIONS = frozenset({
    "min", "max", "amin", "amax", "argmin", "argmax", "any", "all", "cumsum", "prod", "sort",
    "argsort", "copy", "searchsorted", "count_nonzero", "median",
})  # fmt: skip
_PRODUCTS = frozenset({"dot", "vdot", "inner", "outer"})
_SUMS = {"sum": "sum_", "mean": "mean_", "var": "var_", "std": "std_"}
_CHECKED_MATH = {
    "sqrt": "ValueError", "log": "ValueError", "log2": "ValueError", "log10": "ValueError",
    "log1p": "ValueError", "acos": "ValueError", "asin": "ValueError", "atanh": "ValueError",
    "acosh": "ValueError", "sin": "ValueError", "cos": "ValueError", "tan": "ValueError",
    "exp": "OverflowError", "expm1": "OverflowError", "sinh": "OverflowError",
    "cosh": "OverflowError",
}  # fmt: skip
"""Functions of ``math`` and the exception for a finite argument with an infinite result."""
_LOOSE_MATH = frozenset({"gamma", "lgamma", "hypot", "dist", "fsum", "prod"})

_PIECES = {
    "divide_": """
@njit(**OPTIONS_)
def divide_(a, b):
    if b == 0:
        raise ZeroDivisionError("division by zero")
    return a / b
""",
    "floor_divide_": """
@njit(**OPTIONS_)
def floor_divide_(a, b):
    if b == 0:
        raise ZeroDivisionError("division or modulo by zero")
    return a // b
""",
    "modulo_": """
@njit(**OPTIONS_)
def modulo_(a, b):
    if b == 0:
        raise ZeroDivisionError("division or modulo by zero")
    return a % b
""",
    "power_": """
@njit(**OPTIONS_)
def power_(a, b):
    found = a ** b
    if a == 0 and b < 0:
        raise ZeroDivisionError("0.0 cannot be raised to a negative power")
    if found != found and a == a and b == b:
        raise ValueError("a power of a negative number is complex, which this loop cannot hold")
    if abs(found) == np_.inf and abs(a) < np_.inf and abs(b) < np_.inf:
        raise OverflowError("(34, 'Numerical result out of range')")
    return found
""",
    "whole_power_": """
@njit(**OPTIONS_)
def whole_power_(a, b):
    if b < 0:
        raise ValueError("Integers to negative integer powers are not allowed.")
    return a ** b
""",
    "whole_": """
@njit(**OPTIONS_)
def whole_(a):
    if not abs(a) < 9.2e18:
        if a != a:
            raise ValueError("cannot convert float NaN to integer")
        raise OverflowError("cannot convert float infinity, or one beyond 64 bits, to integer")
    return int(a)
""",
    "sum_": """
@njit(**OPTIONS_)
def sum_block_(a, first, last):
    if last - first < 8:
        total = a.dtype.type(0)
        for k in range(first, last):
            total += a[k]
        return total
    s0, s1, s2, s3 = a[first], a[first + 1], a[first + 2], a[first + 3]
    s4, s5, s6, s7 = a[first + 4], a[first + 5], a[first + 6], a[first + 7]
    stop = last - (last - first) % 8
    for k in range(first + 8, stop, 8):
        s0 += a[k]
        s1 += a[k + 1]
        s2 += a[k + 2]
        s3 += a[k + 3]
        s4 += a[k + 4]
        s5 += a[k + 5]
        s6 += a[k + 6]
        s7 += a[k + 7]
    total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    for k in range(stop, last):
        total += a[k]
    return total


@njit(**OPTIONS_)
def sum_(a):
    if len(a) <= 128:
        return sum_block_(a, 0, len(a))
    first, last = np_.empty(64, np_.int64), np_.empty(64, np_.int64)
    is_right, left = np_.empty(64, np_.bool_), np_.empty(64, a.dtype)
    first[0], last[0], is_right[0], top = 0, len(a), False, 0
    while True:
        if last[top] - first[top] > 128:
            half = (last[top] - first[top]) // 2
            first[top + 1], last[top + 1] = first[top], first[top] + half - half % 8
            top += 1
            is_right[top] = False
            continue
        total = sum_block_(a, first[top], last[top])
        while top and is_right[top]:
            top -= 1
            total = left[top] + total
        if not top:
            return total
        left[top - 1] = total
        first[top], last[top], is_right[top] = last[top], last[top - 1], True
""",
    "mean_": """
@njit(**OPTIONS_)
def mean_(a):
    return a.dtype.type(sum_(a) / a.dtype.type(len(a)))
""",
    "var_": """
@njit(**OPTIONS_)
def var_(a):
    middle = mean_(a)
    squares = np_.empty(len(a), a.dtype)
    for k in range(len(a)):
        squares[k] = (a[k] - middle) * (a[k] - middle)
    return mean_(squares)
""",
    "std_": """
@njit(**OPTIONS_)
def std_(a):
    return np_.sqrt(var_(a))
""",
}
_NEEDS = {"mean_": ("sum_",), "var_": ("sum_", "mean_"), "std_": ("sum_", "mean_", "var_")}
_DIVISIONS = {ast.Div: "divide_", ast.FloorDiv: "floor_divide_", ast.Mod: "modulo_"}


@dataclass(frozen=True)
class Deviation:
    """An operation whose compiled form may give other bits than the plain loop."""

    what: str
    line: int


@dataclass
class Faithful:
    """Rewrites the statements of one loop and collects the helpers that its kernel calls."""

    values: Mapping[str, Any]
    names: Names
    is_exact: bool = True
    """True if ``x ** 2`` is numpy's power, not ``x * x``, which may differ in the last bit."""
    pieces: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, ast.FunctionDef] = field(default_factory=dict)
    deviations: list[Deviation] = field(default_factory=list)
    needs_zero: bool = False
    """True if the kernel uses ``unknown_zero_``, a zero that the compiler cannot fold."""
    assigned: dict[str, Kinds] = field(default_factory=dict)
    """Types of the values that the loop assigns to each name."""

    def rewrite(self, statements: Sequence[ast.stmt], known: Sequence[str] = ()) -> list[ast.stmt]:
        """Rewrite statements for the compiler; ``known`` are source lines that precede them."""
        before = [ast.parse(line).body[0] for line in known]
        every = [*before, *statements]
        reader = KindReader.of(every, self.values, self.names)
        self.assigned = reader.assigned
        bound = {
            node.id
            for statement in every
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        fixed = {
            name: value for name, value in self.values.items()
            if name not in bound and not isinstance(value, np.ndarray)
        }  # fmt: skip
        made = _FaithfulWriter(self, reader, fixed).block(statements)
        for name, helper in reader.helpers.items():
            self.helpers[name] = copy.copy(helper.function)
            self.helpers[name].body = _FaithfulWriter(self, helper, {}).block(helper.body)
        return made

    def dtype_of(self, name: str) -> str:
        """Numpy dtype of all values that the loop assigns to a name; empty if there is none."""
        dtypes = {
            kind.dtype if isinstance(kind, Num) and not kind.is_python else ""
            for kind in self.assigned.get(name, frozenset())
        }
        return dtypes.pop() if len(dtypes) == 1 else ""

    def need(self, piece: str, text: str | None = None) -> str:
        """Add a helper function to the kernel's module and return its name."""
        for other in _NEEDS.get(piece, ()):
            self.pieces.setdefault(other, _PIECES[other])
        self.pieces.setdefault(piece, text or _PIECES[piece])
        return piece

    def note(self, what: str, node: ast.AST) -> None:
        """Record an operation whose bits may differ."""
        found = Deviation(what, getattr(node, "lineno", 0))
        if found not in self.deviations:
            self.deviations.append(found)


class _FaithfulWriter(ast.NodeTransformer):
    def __init__(self, out: Faithful, reader: KindReader, fixed: Mapping[str, Any]) -> None:
        self.out, self.reader, self.fixed = out, reader, fixed
        dtypes = {getattr(k, "dtype", "bool") for kinds in reader.kinds.values() for k in kinds}
        self.has_narrow_types = bool({*map(_full, dtypes)} - _NATIVE - {"bool"})

    def block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [
            ast.fix_missing_locations(self.visit(copy.deepcopy(statement)))
            for statement in statements
        ]

    # ── operators ───────────────────────────────────────────────────────────────────────────────

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = (self.reader.of_expression(side) for side in (node.left, node.right))
        one, other = self.visit(node.left), self.visit(node.right)
        return ast.copy_location(self.operator(node, type(node.op), left, right, one, other), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        op, target = type(node.op), node.target
        loaded = copy.deepcopy(target)
        for part in ast.walk(loaded):
            if part is loaded and isinstance(part, (ast.Name, ast.Subscript)):
                part.ctx = ast.Load()
        left, right = self.reader.of_expression(loaded), self.reader.of_expression(node.value)
        value = self.visit(node.value)
        if isinstance(target, ast.Subscript):
            target = self.visit(target)
        if any(isinstance(kind, (Arr, Other)) for kind in left | right):
            self.note_arrays(node, op, left, right)
            return ast.copy_location(ast.AugAssign(target, node.op, value), node)
        if isinstance(target, ast.Name):
            made = self.operator(node, op, left, right, loaded, value)
            return ast.copy_location(ast.Assign([target], made), node)
        dtype = self.computed_in(op, left, right)
        if dtype in ("float32", "complex64"):
            value = _cast(dtype, value)
        return ast.copy_location(ast.AugAssign(target, node.op, value), node)

    def operator(
        self, node: ast.AST, op: type[ast.operator], left: Kinds, right: Kinds,
        one: ast.expr, other: ast.expr,
    ) -> ast.expr:  # fmt: skip
        """Write ``left op right`` so that it is computed as in numpy or Python."""
        plain = ast.BinOp(one, op(), other)
        found = self.reader.combined(op, left, right)
        if op is ast.MatMult:
            self.out.note("a product of rows is summed in another order than BLAS does", node)
            return plain
        if not found or any(isinstance(kind, (Arr, Other)) for kind in found):
            self.note_arrays(node, op, left, right)
            return plain
        numbers = cast("frozenset[Num]", found)
        self.refuse_lost(op, left, right, one, other, node)
        if any(kind.is_python for kind in numbers) and op in _DIVISIONS:
            if not self.is_nonzero(other):
                return _call(self.out.need(_DIVISIONS[op]), one, other)
            return plain
        if op is ast.Pow:
            return self.power(numbers, left, right, one, other, node)
        dtype = self.computed_in(op, left, right)
        if dtype is None:
            if any(kind.dtype not in (*_NATIVE, "int", "float", "bool") for kind in numbers):
                self.out.note("computed in 64 bits, where numpy may take fewer", node)
            return plain
        return self.narrowed(dtype, op, left, right, one, other)

    def computed_in(self, op: type[ast.operator], left: Kinds, right: Kinds) -> str | None:
        """The dtype in which numpy computes, if compiled code would use another, else None."""
        found = self.reader.combined(op, left, right)
        dtypes = {
            kind.dtype if isinstance(kind, Num) and not kind.is_python else None for kind in found
        }
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return dtype if dtype not in _NATIVE else None

    def narrowed(
        self, dtype: str, op: type[ast.operator], left: Kinds, right: Kinds,
        one: ast.expr, other: ast.expr,
    ) -> ast.expr:  # fmt: skip
        """Write an operation that is computed in a dtype of fewer bits."""
        if dtype == "bool":
            logical = {ast.Add: ast.BitOr, ast.Mult: ast.BitAnd}.get(op, op)
            sides = [_call("bool", side) for side in (one, other)]
            return ast.BinOp(sides[0], logical(), sides[1])
        if dtype in ("float32", "complex64", "uint64", "float16"):
            if not _are(left, dtype):
                one = _cast(dtype, one)
            if not _are(right, dtype):
                other = _cast(dtype, other)
            return ast.BinOp(one, op(), other)
        return _cast(dtype, ast.BinOp(one, op(), other))

    def power(
        self, numbers: frozenset[Num], left: Kinds, right: Kinds,
        one: ast.expr, other: ast.expr, node: ast.AST,
    ) -> ast.expr:  # fmt: skip
        """Write a power; floats use the library's ``pow``, as in Python and numpy."""
        plain = ast.BinOp(one, ast.Pow(), other)
        constant = _constant(other)
        if all(kind.dtype in ("int", "int64") for kind in numbers):
            if constant is not None and constant >= 0:
                return plain
            return _call(self.out.need("whole_power_"), one, other)
        if any(np.dtype(_full(kind.dtype)).kind != "f" for kind in numbers):
            return plain
        is_python = any(kind.is_python for kind in numbers)
        if is_python and not (constant is not None and constant >= 0 and constant % 1 == 0):
            return _call(self.out.need("power_"), one, other)
        if constant is None:
            return plain
        if not self.out.is_exact:
            # One multiplication instead of a call: 6 of 12,000 squares differ in the last bit.
            self.out.note(f"a power of {constant:g} is made of products", node)
            return plain
        self.out.needs_zero = True
        dtypes = {kind.dtype for kind in numbers}
        exponent: ast.expr = ast.BinOp(
            ast.Constant(float(constant)), ast.Add(), ast.Name("unknown_zero_", ast.Load())
        )
        if dtypes == {"float32"}:
            return ast.BinOp(_cast("float32", one), ast.Pow(), _cast("float32", exponent))
        return ast.BinOp(_call("np_.float64", one), ast.Pow(), exponent)

    def refuse_lost(
        self, op: type[ast.operator], left: Kinds, right: Kinds,
        one: ast.expr, other: ast.expr, node: ast.AST,
    ) -> None:  # fmt: skip
        """Refuse a constant that a small integer type cannot hold, for which numpy raises."""
        for kinds, side in ((left, other), (right, one)):
            value = _constant(side)
            for kind in kinds:
                if not isinstance(kind, Num) or kind.is_python or not isinstance(value, int):
                    continue
                if np.dtype(kind.dtype).kind in "iu":
                    info = np.iinfo(kind.dtype)
                    if not info.min <= value <= info.max:
                        line = getattr(node, "lineno", 0)
                        raise Refusal(f"{value} at line {line} is no {kind.dtype}", line)

    def note_arrays(self, node: ast.AST, op: type[ast.operator], left: Kinds, right: Kinds) -> None:
        """Record expressions of arrays of small types, which compiled code computes in 64 bits."""
        for a, b in itertools.product(left, right):
            if not isinstance(a, (Num, Arr)) or not isinstance(b, (Num, Arr)):
                if self.has_narrow_types:
                    self.out.note(
                        "numbers of a type that is not known are computed in 64 bits", node
                    )
                continue
            natural = {_full(k.dtype) for k in (a, b)}
            if natural == {"bool"} and op in (ast.Add, ast.Mult, ast.Sub):
                raise Refusal(
                    f"arithmetic on arrays of bools at line {getattr(node, 'lineno', 0)} gives "
                    "bools in numpy and integers in compiled code",
                    getattr(node, "lineno", 0),
                )
            if natural - _NATIVE - {"bool"} and len(natural) > 1:
                self.out.note("an expression of arrays is computed in 64 bits", node)

    def is_nonzero(self, node: ast.expr) -> bool:
        value = _constant(node)
        if value is None and isinstance(node, ast.Name):
            value = self.fixed.get(node.id)
        return value is not None and bool(value != 0)

    def is_nonnegative(self, node: ast.expr) -> bool:
        """True if an expression is a square, or a sum of numbers that are never negative."""
        match node:
            case ast.BinOp(left, ast.Mult(), right) if ast.unparse(left) == ast.unparse(right):
                return True
            case ast.BinOp(_, ast.Pow(), ast.Constant(2)):
                return True
            case ast.BinOp(left, ast.Add() | ast.Mult() | ast.Div(), right):
                return self.is_nonnegative(left) and self.is_nonnegative(right)
            case ast.Name(name) if name in self.fixed:
                return bool(self.fixed[name] >= 0)
            case ast.Call(ast.Name("abs" | "len")):
                return True
            case _:
                value = _constant(node)
                return value is not None and value >= 0

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def visit_Call(self, node: ast.Call) -> ast.expr:
        path = self.reader.library(node.func)
        kinds = [self.reader.of_expression(argument) for argument in node.args]
        if path is not None:
            module, _, name = path.partition(".")
            made = {
                "builtins": self.builtin, "math": self.math, "numpy": self.numpy,
            }.get(module, self.untouched)(name, node, kinds)  # fmt: skip
        elif isinstance(node.func, ast.Attribute):
            base = self.reader.of_expression(node.func.value)
            made = self.reduction(node.func.attr, node, node.func.value, base, len(node.args) == 0)
        else:
            made = self.untouched("", node, kinds)
        return ast.copy_location(made, node)

    def untouched(self, name: str, node: ast.Call, kinds: Sequence[Kinds]) -> ast.expr:
        self.generic_visit(node)
        return node

    def builtin(self, name: str, node: ast.Call, kinds: Sequence[Kinds]) -> ast.expr:
        self.generic_visit(node)
        if name == "int" and len(kinds) == 1 and _may_be_float(kinds[0]):
            return _call(self.out.need("whole_"), node.args[0])
        if name == "float" and len(kinds) == 1 and _has(kinds, "float32"):
            return _call("np_.float64", node.args[0])
        return node

    def math(self, name: str, node: ast.Call, kinds: Sequence[Kinds]) -> ast.expr:
        original = node.args[0] if node.args else None
        is_safe = name == "sqrt" and original is not None and self.is_nonnegative(original)
        self.generic_visit(node)
        if name in _LOOSE_MATH:
            self.out.note(f"math.{name} may differ in the last bit", node)
        # Python computes in 64 bits whatever it is given; the compiler's float() keeps 32.
        node.args = [
            _call("np_.float64", argument) if _has([kind], "float32") else argument
            for argument, kind in zip(node.args, kinds, strict=True)
        ]
        if name in ("floor", "ceil", "trunc") and len(kinds) == 1 and _may_be_float(kinds[0]):
            rounded = _call(f"np_.{name}", node.args[0])
            return _call(self.out.need("whole_"), rounded)
        if name in _CHECKED_MATH and len(node.args) == 1 and not is_safe:
            return _call(self.out.need(f"math_{name}_", _checked_math(name)), node.args[0])
        return node

    def numpy(self, name: str, node: ast.Call, kinds: Sequence[Kinds]) -> ast.expr:
        if name in _SUMS or name in _SAME_REDUCTIONS or name in _PRODUCTS:
            value = node.args[0] if node.args else node
            return self.reduction(name, node, value, kinds[0] if kinds else frozenset(),
                                  len(node.args) == 1)  # fmt: skip
        self.generic_visit(node)
        found = getattr(np, name, None)
        is_same = name in _SAME_UFUNCS and not (name in ("sin", "cos") and _has(kinds, "float32"))
        if isinstance(found, np.ufunc) and not is_same:
            self.out.note(f"np.{name} may differ in the last bit", node)
        elif name.startswith("linalg."):
            self.out.note(f"np.{name} may differ in the last bits", node)
        if isinstance(found, np.ufunc) and found.nin == 2 and _mixed(kinds):
            self.out.note(f"np.{name} is computed in 64 bits", node)
        return node

    def reduction(
        self, name: str, node: ast.Call, value: ast.expr, kinds: Kinds, is_whole: bool
    ) -> ast.expr:
        """Write sums of rows in numpy's order."""
        rows = kinds and all(
            isinstance(k, Arr) and k.rank == 1 and k.dtype in ("float64", "float32") for k in kinds
        )
        exact = all(isinstance(k, Arr) and np.dtype(k.dtype).kind in "biu" for k in kinds)
        if name in _SUMS and rows and is_whole and not node.keywords:
            made = _call(self.out.need(_SUMS[name]), self.visit(value))
            return made
        self.generic_visit(node)
        if name in _PRODUCTS or (name in _SUMS and not (exact and name == "sum")):
            self.out.note(f"{name} is summed in another order than numpy does", node)
        return node


def _checked_math(name: str) -> str:
    infinite = _CHECKED_MATH[name]
    message = "math domain error" if infinite == "ValueError" else "math range error"
    return f'''
@njit(**OPTIONS_)
def math_{name}_(a):
    found = math_.{name}(a)
    if not abs(found) < np_.inf:
        if found != found:
            if a == a:
                raise ValueError("math domain error")
        elif abs(a) < np_.inf:
            raise {infinite}("{message}")
    return found
'''


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.parse(name, mode="eval").body, list(arguments), [])


def _cast(dtype: str, node: ast.expr) -> ast.expr:
    return _call("bool" if dtype == "bool" else f"np_.{dtype}", node)


def _full(dtype: str) -> str:
    return {"int": "int64", "float": "float64", "complex": "complex128"}.get(dtype, dtype)


def _constant(node: ast.expr) -> int | float | None:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return sign * value


def _are(kinds: Kinds, dtype: str) -> bool:
    return all(isinstance(k, Num) and not k.is_python and k.dtype == dtype for k in kinds)


def _may_be_float(kinds: Kinds) -> bool:
    return any(
        not isinstance(kind, Num) or np.dtype(_full(kind.dtype)).kind == "f" for kind in kinds
    )


def _has(kinds: Sequence[Kinds], dtype: str) -> bool:
    return any(getattr(kind, "dtype", "") == dtype for each in kinds for kind in each)


def _mixed(kinds: Sequence[Kinds]) -> bool:
    """True for a 32-bit float with a Python float, which compiled code promotes to 64 bits."""
    return _has(kinds, "float32") and (_has(kinds, "float") or _has(kinds, "int"))


def deviations_of(
    statements: Sequence[ast.stmt], values: Mapping[str, Any], names: Names, *, is_exact: bool
) -> Iterator[Deviation]:
    """Yield the operations whose compiled form may give other bits, in the order of lines."""
    faithful = Faithful(values, names, is_exact)
    faithful.rewrite(statements)
    return iter(sorted(faithful.deviations, key=lambda each: each.line))
