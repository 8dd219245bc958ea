"""Rewrite statements so that compiled code computes the same numbers as Python and numpy.

Adds casts where numpy computes in fewer bits than compiled code, and checks where Python raises (a
divisor of zero, ``math.sqrt(-1)``, ``int(nan)``). Sums follow numpy's pairwise order, and sums of
numpy bools become ``or``. Operations that cannot be made equal are recorded with their line
(`Deviation`).
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from hocket.loops.flow import stored_names
from hocket.loops.form import Refusal
from hocket.loops.names import Names, parsed
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
"""Numpy functions whose compiled form gives the same bits; tests check this."""
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
# Functions whose implementation differs between C libraries and Numba in the last bit.
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
    """True if ``x ** 2`` is numpy's power; ``x * x`` may differ in the last bit."""
    pieces: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, ast.FunctionDef] = field(default_factory=dict)
    deviations: list[Deviation] = field(default_factory=list)
    needs_zero: bool = False
    """True if the kernel uses ``unknown_zero_``, a zero that the compiler cannot fold."""
    assigned: dict[str, Kinds] = field(default_factory=dict)
    """Types of the values that the loop assigns to each name."""

    def rewrite(self, statements: Sequence[ast.stmt], known: Sequence[str] = ()) -> list[ast.stmt]:
        """Rewrite statements for the compiler; ``known`` are source lines that precede them."""
        every = [*ast.parse("\n".join(known)).body, *statements]
        reader = KindReader.of(every, self.values, self.names)
        self.assigned = reader.assigned
        bound = stored_names(every)
        # A number that the statements never rebind is constant, which may prove that a divisor is
        # not 0.
        fixed = {
            name: value for name, value in self.values.items()
            if name not in bound and not isinstance(value, np.ndarray)
        }  # fmt: skip
        made = _FaithfulWriter(self, reader, fixed).block(statements)
        for name, helper in reader.helpers.items():
            self.helpers[name] = copy.copy(helper.function)  # type: ignore[assignment]
            self.helpers[name].body = _FaithfulWriter(self, helper, {}).block(helper.body)
        return made

    def dtype_of(self, name: str) -> str:
        """Numpy dtype of all values that the loop assigns to a name; empty if there is none."""
        return _common_dtype(self.assigned.get(name, frozenset())) or ""

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


@dataclass
class _Operation:
    """``left op right`` with the types of both sides, and both sides as they are rewritten."""

    node: ast.AST
    op: type[ast.operator]
    kinds: tuple[Kinds, Kinds]
    sides: tuple[ast.expr, ast.expr]

    @property
    def plain(self) -> ast.BinOp:
        return ast.BinOp(self.sides[0], self.op(), self.sides[1])


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
        kinds = self.reader.of_expression(node.left), self.reader.of_expression(node.right)
        sides = self.visit(node.left), self.visit(node.right)
        made = self.operator(_Operation(node, type(node.op), kinds, sides))
        return ast.copy_location(made, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        loaded = copy.copy(node.target)
        loaded.ctx = ast.Load()
        kinds = self.reader.of_expression(loaded), self.reader.of_expression(node.value)
        value, target = self.visit(node.value), self.visit(node.target)
        work = _Operation(node, type(node.op), kinds, (loaded, value))
        if any(isinstance(kind, (Arr, Other)) for kind in kinds[0] | kinds[1]):
            self.note_arrays(work)
        # Written as an assignment, because the checked form of an operator is a function call.
        elif isinstance(target, ast.Name):
            return ast.copy_location(ast.Assign([target], self.operator(work)), node)
        elif (dtype := self.computed_in(work)) in ("float32", "complex64"):
            value = _cast(dtype, value)
        return ast.copy_location(ast.AugAssign(target, node.op, value), node)

    def operator(self, work: _Operation) -> ast.expr:
        """Write an operation so that it is computed as in numpy or Python."""
        op, node = work.op, work.node
        found = self.reader.combined(op, *work.kinds)
        if op is ast.MatMult:
            self.out.note("a product of rows is summed in another order than BLAS does", node)
            return work.plain
        if not found or any(isinstance(kind, (Arr, Other)) for kind in found):
            self.note_arrays(work)
            return work.plain
        numbers = cast("frozenset[Num]", found)
        # Numpy raises OverflowError for these constants, but compiled code would wrap around.
        self.refuse_lost(work)
        if any(kind.is_python for kind in numbers) and op in _DIVISIONS:
            if self.is_nonzero(work.sides[1]):
                return work.plain
            return _call(self.out.need(_DIVISIONS[op]), *work.sides)
        if op is ast.Pow:
            return self.power(numbers, work)
        dtype = self.computed_in(work)
        if dtype is not None:
            return self.narrowed(dtype, work)
        if any(_full(kind.dtype) not in (*_NATIVE, "bool") for kind in numbers):
            self.out.note("computed in 64 bits, where numpy may take fewer", node)
        return work.plain

    def computed_in(self, work: _Operation) -> str | None:
        """The dtype in which numpy computes, if compiled code would use another, else None."""
        dtype = _common_dtype(self.reader.combined(work.op, *work.kinds))
        return dtype if dtype not in _NATIVE else None

    def narrowed(self, dtype: str, work: _Operation) -> ast.expr:
        """Write an operation that is computed in a dtype of fewer bits."""
        if dtype == "bool":
            # Numpy adds bools by `or` and multiplies them by `and`.
            logical = {ast.Add: ast.BitOr, ast.Mult: ast.BitAnd}.get(work.op, work.op)
            return ast.BinOp(_cast(dtype, work.sides[0]), logical(), _cast(dtype, work.sides[1]))
        # Integers may be truncated after the operation, but floats would be rounded twice.
        if dtype not in ("float32", "complex64", "uint64", "float16"):
            return _cast(dtype, work.plain)
        one, other = (
            side if _common_dtype(kinds) == dtype else _cast(dtype, side)
            for kinds, side in zip(work.kinds, work.sides, strict=True)
        )
        return ast.BinOp(one, work.op(), other)

    def power(self, numbers: frozenset[Num], work: _Operation) -> ast.expr:
        """Write a power; floats use the library's ``pow``, as in Python and numpy."""
        constant = _constant(work.sides[1])
        dtypes = {_full(kind.dtype) for kind in numbers}
        if dtypes == {"int64"}:
            is_whole = constant is not None and constant >= 0
            return work.plain if is_whole else _call(self.out.need("whole_power_"), *work.sides)
        if any(np.dtype(dtype).kind != "f" for dtype in dtypes):
            return work.plain
        is_python = any(kind.is_python for kind in numbers)
        if is_python and not (constant is not None and constant >= 0 and constant % 1 == 0):
            return _call(self.out.need("power_"), *work.sides)
        if constant is None:
            return work.plain
        if not self.out.is_exact:
            # One multiplication in place of a call; 6 of 12,000 squares differ in the last bit.
            self.out.note(f"a power of {constant:g} is made of products", work.node)
            return work.plain
        # The compiler turns a constant exponent into multiplications, so a zero that it cannot fold
        # is added.
        self.out.needs_zero = True
        zero = ast.Name("unknown_zero_", ast.Load())
        exponent = ast.BinOp(ast.Constant(float(constant)), ast.Add(), zero)
        dtype = "float32" if dtypes == {"float32"} else "float64"
        return ast.BinOp(_cast(dtype, work.sides[0]), ast.Pow(), _cast(dtype, exponent))

    def refuse_lost(self, work: _Operation) -> None:
        """Refuse a constant that a small integer type cannot hold, for which numpy raises."""
        for kinds, side in zip(work.kinds, reversed(work.sides), strict=True):
            value = _constant(side)
            for kind in kinds if isinstance(value, int) else ():
                if not isinstance(kind, Num) or kind.is_python:
                    continue
                if np.dtype(kind.dtype).kind in "iu":
                    info = np.iinfo(kind.dtype)
                    if not info.min <= cast("int", value) <= info.max:
                        line = getattr(work.node, "lineno", 0)
                        raise Refusal(f"{value} at line {line} is no {kind.dtype}", line)

    def note_arrays(self, work: _Operation) -> None:
        """Record expressions of arrays of small types, which compiled code computes in 64 bits."""
        for pair in itertools.product(*work.kinds):
            dtypes = {_full(kind.dtype) for kind in pair if isinstance(kind, (Num, Arr))}
            if any(not isinstance(kind, (Num, Arr)) for kind in pair):
                if self.has_narrow_types:
                    self.out.note(
                        "numbers of a type that is not known are computed in 64 bits", work.node
                    )
            elif dtypes == {"bool"} and work.op in (ast.Add, ast.Mult, ast.Sub):
                line = getattr(work.node, "lineno", 0)
                raise Refusal(
                    f"arithmetic on arrays of bools at line {line} gives bools in numpy and "
                    "integers in compiled code",
                    line,
                )
            elif dtypes - _NATIVE - {"bool"} and len(dtypes) > 1:
                self.out.note("an expression of arrays is computed in 64 bits", work.node)

    def is_nonzero(self, node: ast.expr) -> bool:
        value = self.fixed.get(node.id) if isinstance(node, ast.Name) else _constant(node)
        return value is not None and bool(value != 0)

    def is_nonnegative(self, node: ast.expr) -> bool:
        """True if an expression is a square, or a sum of numbers that are never negative."""
        match node:
            case ast.BinOp(left, ast.Mult(), right) if ast.unparse(left) == ast.unparse(right):
                return True
            case ast.BinOp(_, ast.Pow(), ast.Constant(2)) | ast.Call(ast.Name("abs" | "len")):
                return True
            case ast.BinOp(left, ast.Add() | ast.Mult() | ast.Div(), right):
                return self.is_nonnegative(left) and self.is_nonnegative(right)
            case ast.Name(name) if name in self.fixed:
                return bool(self.fixed[name] >= 0)
        value = _constant(node)
        return value is not None and value >= 0

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def visit_Call(self, node: ast.Call) -> ast.expr:
        module, _, name = (self.reader.names.library(node.func) or "").partition(".")
        kinds = [self.reader.of_expression(argument) for argument in node.args]
        made: ast.expr = node
        if not module and isinstance(node.func, ast.Attribute):
            made = self.reduction(node.func.attr, node, node.func.value, is_whole=not node.args)
        elif module == "numpy" and name in (*_SUMS, *_SAME_REDUCTIONS, *_PRODUCTS):
            value = node.args[0] if node.args else node
            made = self.reduction(name, node, value, is_whole=len(node.args) == 1)
        elif module == "math":
            made = self.math(name, node, kinds)
        else:
            self.generic_visit(node)
            if module == "numpy":
                self.note_numpy(name, node, kinds)
            elif module == "builtins" and len(kinds) == 1:
                if name == "int" and _may_be_float(kinds[0]):
                    made = _call(self.out.need("whole_"), node.args[0])
                elif name == "float" and _has(kinds, "float32"):
                    made = _cast("float64", node.args[0])
        return ast.copy_location(made, node)

    def math(self, name: str, node: ast.Call, kinds: Sequence[Kinds]) -> ast.expr:
        is_safe = name == "sqrt" and bool(node.args) and self.is_nonnegative(node.args[0])
        self.generic_visit(node)
        if name in _LOOSE_MATH:
            self.out.note(f"math.{name} may differ in the last bit", node)
        # Python's math functions compute in 64 bits for any argument; compiled ones would keep 32
        # bits.
        node.args = [
            _cast("float64", argument) if _has([kind], "float32") else argument
            for argument, kind in zip(node.args, kinds, strict=True)
        ]
        if len(kinds) == 1:
            if name in ("floor", "ceil", "trunc") and _may_be_float(kinds[0]):
                return _call(self.out.need("whole_"), _call(f"np_.{name}", *node.args))
            if name in _CHECKED_MATH and not is_safe:
                return _call(self.out.need(f"math_{name}_", _checked_math(name)), *node.args)
        return node

    def note_numpy(self, name: str, node: ast.Call, kinds: Sequence[Kinds]) -> None:
        """Record a function of numpy whose compiled form may give other bits."""
        found = getattr(np, name, None)
        is_same = name in _SAME_UFUNCS and not (name in ("sin", "cos") and _has(kinds, "float32"))
        if (isinstance(found, np.ufunc) and not is_same) or name.startswith("linalg."):
            self.out.note(f"np.{name} may differ in the last bit", node)
        is_mixed = _has(kinds, "float32") and (_has(kinds, "float") or _has(kinds, "int"))
        if isinstance(found, np.ufunc) and found.nin == 2 and is_mixed:
            self.out.note(f"np.{name} is computed in 64 bits", node)

    def reduction(self, name: str, node: ast.Call, value: ast.expr, *, is_whole: bool) -> ast.expr:
        """Write sums of rows in numpy's order."""
        kinds = self.reader.of_expression(value)
        rows = kinds and all(
            isinstance(k, Arr) and k.rank == 1 and k.dtype in ("float64", "float32") for k in kinds
        )
        is_integer = all(isinstance(k, Arr) and np.dtype(k.dtype).kind in "biu" for k in kinds)
        if name in _SUMS and rows and is_whole and not node.keywords:
            return _call(self.out.need(_SUMS[name]), self.visit(value))
        self.generic_visit(node)
        if name in _PRODUCTS or (name in _SUMS and not (is_integer and name == "sum")):
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
    return ast.Call(parsed(name), list(arguments), [])


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


def _common_dtype(kinds: Kinds) -> str | None:
    """The numpy dtype that all types have; None if one is of Python, or they differ."""
    dtypes = {k.dtype if isinstance(k, Num) and not k.is_python else None for k in kinds}
    return dtypes.pop() if len(dtypes) == 1 else None


def _may_be_float(kinds: Kinds) -> bool:
    return any(
        not isinstance(kind, Num) or np.dtype(_full(kind.dtype)).kind == "f" for kind in kinds
    )


def _has(kinds: Sequence[Kinds], dtype: str) -> bool:
    return any(getattr(kind, "dtype", "") == dtype for each in kinds for kind in each)


def deviations_of(
    statements: Sequence[ast.stmt], values: Mapping[str, Any], names: Names, *, is_exact: bool
) -> list[Deviation]:
    """Return the operations whose compiled form may give other bits, in the order of lines."""
    faithful = Faithful(values, names, is_exact)
    faithful.rewrite(statements)
    return sorted(faithful.deviations, key=lambda each: each.line)
