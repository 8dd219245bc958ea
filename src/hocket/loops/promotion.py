"""Kinds of numbers in a loop: which are Python's, which are numpy's, and of which dtype.

Compiled code knows one 64-bit float; Python has two that differ where a divisor is zero, where a
32-bit float meets them, and where bools are added. The kinds of every name are inferred from the
loop's inputs to a fixed point, by numpy's own promotion rules (``ufunc.resolve_dtypes``).
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.loops.names import Helper, Library, Names, Number


@dataclass(frozen=True)
class Num:
    """A number: of Python (``int``, ``float``, ``bool``) or of a numpy dtype."""

    dtype: str
    is_python: bool


@dataclass(frozen=True)
class Arr:
    """An array; rank -1 where it is not known."""

    dtype: str
    rank: int


@dataclass(frozen=True)
class Tup:
    """Several values."""

    items: tuple[Kinds, ...]


@dataclass(frozen=True)
class Other:
    """Anything else, or not known."""


Kind = Num | Arr | Tup | Other
Kinds = frozenset[Kind]
"""Types that a value may have; empty where no value has been seen yet."""

UFUNCS: dict[type[ast.operator], np.ufunc] = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide, ast.Mod: np.remainder, ast.Pow: np.power,
    ast.BitAnd: np.bitwise_and, ast.BitOr: np.bitwise_or, ast.BitXor: np.bitwise_xor,
    ast.LShift: np.left_shift, ast.RShift: np.right_shift,
}  # fmt: skip
_WEAK: dict[str, Any] = {"int": int, "float": float, "complex": complex, "bool": bool}
UNKNOWN: Kinds = frozenset({Other()})
_INT, _FLOAT, _BOOL = (frozenset({Num(name, True)}) for name in ("int", "float", "bool"))
_WHOLE_MATH = frozenset({"floor", "ceil", "trunc", "gcd", "comb", "factorial", "isqrt", "perm"})
_TRUTH_MATH = frozenset({"isnan", "isinf", "isfinite", "isclose"})
_SAME = frozenset({"min", "max", "amin", "amax", "copy", "cumsum", "prod", "sort", "flatten"})
_MEANS = frozenset({"mean", "std", "var", "median"})
_INDICES = frozenset({"argmax", "argmin", "searchsorted", "count_nonzero", "argsort"})
_MADE = frozenset({"zeros", "ones", "empty", "full"})
_MAX_ROUNDS = 12


def kind_of(value: Any) -> Kind:
    """The kind of a value that a loop is reached with."""
    if isinstance(value, np.ndarray):
        return Arr(value.dtype.name, value.ndim)
    if isinstance(value, np.generic):
        return Num(value.dtype.name, False)
    name = type(value).__name__
    return Num(name, True) if name in _WEAK else Other()


@functools.cache
def resolved(ufunc: np.ufunc, operands: tuple[tuple[str, bool], ...]) -> str | None:
    """The dtype of a ufunc's result by numpy's rules; None where it has none."""
    given = [_WEAK[name] if weak and name != "bool" else np.dtype(name) for name, weak in operands]
    try:
        return str(ufunc.resolve_dtypes((*given, *([None] * ufunc.nout)))[ufunc.nin].name)
    except (TypeError, ValueError):
        return None


def of_operator(op: type[ast.operator], left: Kind, right: Kind) -> Kind:
    """The kind of ``left op right``."""
    if isinstance(left, (Tup, Other)) or isinstance(right, (Tup, Other)):
        return Other()
    if op is ast.MatMult:
        return _of_product(left, right)
    if isinstance(left, Num) and isinstance(right, Num) and left.is_python and right.is_python:
        return _of_python(op, left.dtype, right.dtype)
    pairs = tuple((k.dtype, isinstance(k, Num) and k.is_python) for k in (left, right))
    dtype = resolved(UFUNCS[op], pairs) if op in UFUNCS else None
    if dtype is None:
        return Other()
    ranks = [kind.rank for kind in (left, right) if isinstance(kind, Arr)]
    if not ranks:
        return Num(dtype, False)
    return Arr(dtype, -1 if -1 in ranks else max(ranks))


def _of_python(op: type[ast.operator], left: str, right: str) -> Kind:
    if "complex" in (left, right):
        return Num("complex", True)
    if op is ast.Div or "float" in (left, right):
        return Num("float", True)
    if left == right == "bool" and op in (ast.BitAnd, ast.BitOr, ast.BitXor):
        return Num("bool", True)
    return Num("int", True)


def _of_product(left: Num | Arr, right: Num | Arr) -> Kind:
    if not isinstance(left, Arr) or not isinstance(right, Arr):
        return Other()
    dtype = np.result_type(np.dtype(left.dtype), np.dtype(right.dtype)).name
    return Num(dtype, False) if left.rank == right.rank == 1 else Arr(dtype, -1)


@dataclass
class KindReader:
    """Infers the kinds of a loop's names."""

    names: Names
    kinds: dict[str, Kinds]
    helpers: dict[str, KindReader] = field(default_factory=dict)
    """Plain functions that are called, with the kinds of their arguments over all calls."""
    body: Sequence[ast.stmt] = ()
    returned: Kinds = frozenset()
    changed: bool = False
    kinds_given: dict[str, Kinds] = field(default_factory=dict)

    @staticmethod
    def of(statements: Sequence[ast.stmt], values: Mapping[str, Any], names: Names) -> KindReader:
        """Read statements that start with some values."""
        kinds = {name: frozenset({kind_of(value)}) for name, value in values.items()}
        reader = KindReader(names, kinds, body=statements)
        for _ in range(_MAX_ROUNDS):
            if not reader.round():
                return reader
        reader.kinds = dict.fromkeys(reader.kinds, UNKNOWN)
        return reader

    def round(self) -> bool:
        """One pass over everything; True if a name may be something new."""
        for reader in (self, *self.helpers.values()):
            reader.changed = False
        for reader in (self, *list(self.helpers.values())):
            for statement in reader.body:
                reader.statement(statement)
        return any(reader.changed for reader in (self, *self.helpers.values()))

    def assigned(self) -> dict[str, Kinds]:
        """The kinds that the statements give to each name, without those that it came with."""
        self.kinds_given = {}
        for statement in self.body:
            self.statement(statement)
        return self.kinds_given

    def add(self, name: str, kinds: Kinds) -> None:
        """A name may be these, too."""
        self.kinds_given[name] = self.kinds_given.get(name, frozenset()) | kinds
        known = self.kinds.get(name, frozenset())
        if not kinds <= known:
            self.kinds[name] = known | kinds
            self.changed = True

    def statement(self, node: ast.stmt) -> None:
        """Read one statement and those inside it; order does not matter."""
        match node:
            case ast.Assign(targets, value):
                found = self.of_expression(value)
                for target in targets:
                    self.bind(target, found)
            case ast.AnnAssign(target, _, value) if value is not None:
                self.bind(target, self.of_expression(value))
            case ast.AugAssign(ast.Name(name) as target, op, value):
                left = self.kinds.get(name, frozenset())
                if not any(isinstance(kind, Arr) for kind in left):
                    self.bind(target, self.combined(type(op), left, self.of_expression(value)))
            case ast.For(target, head, body, orelse):
                self.bind(target, self.of_element(head))
                for inner in (*body, *orelse):
                    self.statement(inner)
            case ast.If(_, body, orelse) | ast.While(_, body, orelse):
                for inner in (*body, *orelse):
                    self.statement(inner)
            case ast.Return(value) if value is not None:
                found = self.of_expression(value)
                self.changed |= not found <= self.returned
                self.returned |= found
            case _:
                pass
        for call in _own_expressions(node):
            self.of_expression(call)  # helpers are read with the arguments of every call

    def of_element(self, head: ast.expr) -> Kinds:
        """Types that a loop's variable may have."""
        if isinstance(head, ast.Call) and ast.unparse(head.func).endswith("range"):
            return _INT
        found = self.of_expression(head)
        return frozenset(
            Num(kind.dtype, False) if isinstance(kind, Arr) and kind.rank == 1 else Other()
            for kind in found
        )

    def bind(self, target: ast.expr, found: Kinds) -> None:
        """A target takes a value."""
        if isinstance(target, ast.Name):
            self.add(target.id, found)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for place, element in enumerate(target.elts):
                self.bind(element, _items(found, place))

    def of_expression(self, node: ast.expr) -> Kinds:
        """Types that an expression may have."""
        match node:
            case ast.Constant(value):
                return frozenset({kind_of(value)})
            case ast.Name(name):
                return self.of_name(name)
            case ast.Tuple(elts):
                return frozenset({Tup(tuple(map(self.of_expression, elts)))})
            case ast.Subscript(value, place):
                return self.of_subscript(self.of_expression(value), place)
            case ast.BinOp(left, op, right):
                sides = self.of_expression(left), self.of_expression(right)
                return self.combined(type(op), *sides)
            case ast.UnaryOp(ast.Not(), _):
                return _BOOL
            case ast.UnaryOp(op, operand):
                return self.of_sign(op, self.of_expression(operand))
            case ast.Compare(left, ops, comparators):
                return self.of_comparison([left, *comparators], ops)
            case ast.BoolOp(_, values):
                return frozenset[Kind]().union(*map(self.of_expression, values))
            case ast.IfExp(_, body, orelse):
                return self.of_expression(body) | self.of_expression(orelse)
            case ast.Attribute():
                return self.of_attribute(node)
            case ast.Call():
                return self.of_call(node)
            case _:
                return UNKNOWN

    def of_name(self, name: str) -> Kinds:
        """A variable, or a number outside of the function."""
        if name in self.kinds:
            return self.kinds[name]
        meaning = self.names.meaning(name)
        return frozenset({kind_of(meaning.value)}) if isinstance(meaning, Number) else frozenset()

    def combined(self, op: type[ast.operator], left: Kinds, right: Kinds) -> Kinds:
        """All that an operator may give."""
        return frozenset(of_operator(op, a, b) for a, b in itertools.product(left, right))

    def of_sign(self, op: ast.unaryop, found: Kinds) -> Kinds:
        """Signs and inversions keep a number's kind; Python counts its bools as integers."""
        return frozenset(
            Num("int", True) if isinstance(k, Num) and k.is_python and k.dtype == "bool" else k
            for k in found
        )

    def of_comparison(self, sides: Sequence[ast.expr], ops: Sequence[ast.cmpop]) -> Kinds:
        """Comparisons with a number of numpy give its bool."""
        found = [self.of_expression(side) for side in sides]
        if isinstance(ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
            return _BOOL
        kinds: set[Kind] = set()
        for pair in itertools.pairwise(found):
            for one, other in itertools.product(*pair):
                if isinstance(one, Arr) or isinstance(other, Arr):
                    kinds.add(Arr("bool", -1))
                else:
                    is_python = all(isinstance(k, Num) and k.is_python for k in (one, other))
                    kinds.add(Num("bool", is_python))
        return frozenset(kinds)

    def of_subscript(self, base: Kinds, place: ast.expr) -> Kinds:
        """Elements and views."""
        parts = place.elts if isinstance(place, ast.Tuple) else [place]
        plain = [not isinstance(p, ast.Slice) and not _is_none(p) for p in parts]
        fancy = any(
            isinstance(kind, (Arr, Tup))
            for part, is_plain in zip(parts, plain, strict=True)
            if is_plain
            for kind in self.of_expression(part)
        )
        found: set[Kind] = set()
        for kind in base:
            if isinstance(kind, Tup):
                found |= _item(kind, place)
            elif not isinstance(kind, Arr):
                found.add(Other())
            elif fancy or kind.rank < 0 or any(map(_is_none, parts)):
                found.add(Arr(kind.dtype, -1))
            elif sum(plain) == kind.rank:
                found.add(Num(kind.dtype, False))
            else:
                found.add(Arr(kind.dtype, kind.rank - sum(plain)))
        return frozenset(found)

    def of_attribute(self, node: ast.Attribute) -> Kinds:
        """Shapes are Python's; so are the constants of libraries."""
        path = self.library(node)
        if path is not None:
            return _FLOAT
        if node.attr in ("size", "ndim"):
            return _INT
        found = self.of_expression(node.value)
        if node.attr == "shape":
            ranks = {kind.rank for kind in found if isinstance(kind, Arr)}
            rank = ranks.pop() if len(ranks) == 1 else -1
            return frozenset({Tup((_INT,) * rank)}) if rank >= 0 else UNKNOWN
        return found if node.attr == "T" else UNKNOWN

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def of_call(self, node: ast.Call) -> Kinds:
        """Builtins, math, numpy, methods of arrays, plain helpers."""
        arguments = [self.of_expression(argument) for argument in node.args]
        path = self.library(node.func)
        if path is not None:
            module, _, name = path.partition(".")
            if module == "builtins":
                return self.of_builtin(name, arguments)
            if module == "math":
                return _INT if name in _WHOLE_MATH else _BOOL if name in _TRUTH_MATH else _FLOAT
            return self.of_numpy(name, node, arguments)
        if isinstance(node.func, ast.Attribute):
            base = self.of_expression(node.func.value)
            if node.func.attr == "item":
                return UNKNOWN
            return self.of_numpy(node.func.attr, node, [base, *arguments])
        if isinstance(node.func, ast.Name) and node.func.id in ("dot_rows_", "dot_row_", "dot_"):
            arrays = [kind for kind in arguments[0] if isinstance(kind, Arr)]
            return frozenset(Num(kind.dtype, False) for kind in arrays)
        meaning = self.names.meaning(node.func.id) if isinstance(node.func, ast.Name) else None
        if isinstance(node.func, ast.Name) and isinstance(meaning, Helper):
            return self.of_helper(node.func.id, meaning, arguments)
        return UNKNOWN

    def of_helper(self, name: str, helper: Helper, arguments: Sequence[Kinds]) -> Kinds:
        """Types that a plain function returned so far, for all that it is called with."""
        if name not in self.helpers:
            reader = KindReader(helper.names, {}, self.helpers, helper.node.body)
            self.helpers[name] = reader
            self.changed = True
        reader = self.helpers[name]
        for argument, kinds in zip(helper.node.args.args, arguments, strict=False):
            reader.add(argument.arg, kinds)
        return reader.returned

    def of_builtin(self, name: str, arguments: Sequence[Kinds]) -> Kinds:
        """``int``, ``len`` and the like; ``min`` and ``max`` give one of what they are given."""
        if name in ("int", "len"):
            return _INT
        if name in ("float", "bool"):
            return frozenset({Num(name, True)})
        if name == "round" and len(arguments) == 1:
            return _INT
        if name == "pow" and len(arguments) == 2:
            return self.combined(ast.Pow, *arguments)
        if name in ("abs", "min", "max", "round") and arguments:
            return self.of_sign(ast.UAdd(), frozenset[Kind]().union(*arguments))
        return UNKNOWN

    def of_numpy(self, name: str, node: ast.Call, arguments: Sequence[Kinds]) -> Kinds:
        """Functions of numpy by their rules; methods are the functions of their names."""
        found = getattr(np, name, None)
        if isinstance(found, np.ufunc):
            return _of_ufunc(found, arguments)
        if isinstance(found, type) and issubclass(found, np.generic):
            return frozenset({Num(np.dtype(found).name, False)})
        if name in _MADE:
            return frozenset({Arr(_dtype(node), self.rank_of(node))})
        first = arguments[0] if arguments else UNKNOWN
        if name in ("dot", "vdot", "inner") and len(arguments) == 2:
            return self.combined(ast.MatMult, *arguments)
        if name.endswith("_like"):
            return first if not node.keywords else UNKNOWN
        if name == "astype" and node.args:
            rank = {kind.rank for kind in first if isinstance(kind, Arr)}
            return frozenset({Arr(_dtype(node, 0), rank.pop() if len(rank) == 1 else -1)})
        if name in ("reshape", "ravel", "transpose", "swapaxes"):
            return frozenset(Arr(k.dtype, -1) if isinstance(k, Arr) else Other() for k in first)
        return self.of_reduction(name, first, is_whole=not node.keywords and len(arguments) == 1)

    def of_reduction(self, name: str, first: Kinds, *, is_whole: bool) -> Kinds:
        """Sums, means and extremes of an array."""
        found: set[Kind] = set()
        for kind in first:
            dtype = _reduced(name, kind.dtype) if isinstance(kind, Arr) else None
            if dtype is None:
                found.add(Other())
            elif name in ("copy", "sort", "cumsum", "flatten", "argsort") or not is_whole:
                assert isinstance(kind, Arr)
                found.add(Arr(dtype, kind.rank if is_whole else -1))
            else:
                found.add(Num(dtype, False))
        return frozenset(found)

    def rank_of(self, node: ast.Call) -> int:
        """Of an array made with a shape."""
        shape = node.args[0] if node.args else None
        if isinstance(shape, ast.Tuple):
            return len(shape.elts)
        kinds = self.of_expression(shape) if shape is not None else UNKNOWN
        return 1 if kinds and all(isinstance(kind, Num) for kind in kinds) else -1

    def library(self, node: ast.expr) -> str | None:
        """The dotted path of a library name that no variable hides."""
        if isinstance(node, ast.Name):
            meaning = None if node.id in self.kinds else self.names.meaning(node.id)
            return meaning.path if isinstance(meaning, Library) else None
        if isinstance(node, ast.Attribute):
            parent = self.library(node.value)
            return f"{parent}.{node.attr}" if parent else None
        return None


def _of_ufunc(ufunc: np.ufunc, arguments: Sequence[Kinds]) -> Kinds:
    if len(arguments) != ufunc.nin:
        return UNKNOWN
    found: set[Kind] = set()
    for kinds in itertools.product(*arguments):
        numbers = [kind for kind in kinds if isinstance(kind, (Num, Arr))]
        if len(numbers) != len(kinds):
            found.add(Other())
            continue
        # A Python number alone is given to the ufunc as the array that numpy makes of it.
        weak = any(isinstance(k, Arr) or not k.is_python for k in numbers)
        pairs = tuple(
            (k.dtype, weak) if isinstance(k, Num) and k.is_python else (k.dtype, False)
            for k in numbers
        )
        dtype = resolved(ufunc, pairs)
        is_array = any(isinstance(kind, Arr) for kind in kinds)
        made = Arr(dtype, -1) if dtype and is_array else Num(dtype, False) if dtype else Other()
        if isinstance(made, Arr):
            ranks = [kind.rank for kind in kinds if isinstance(kind, Arr)]
            made = Arr(made.dtype, -1 if -1 in ranks else max(ranks))
        found.add(made)
    return frozenset(found)


def _reduced(name: str, dtype: str) -> str | None:
    kind = np.dtype(dtype).kind
    if name in _INDICES:
        return "int64"
    if name in ("any", "all"):
        return "bool"
    if name in _MEANS:
        return dtype if kind in "fc" else "float64"
    if name in ("sum", "prod", "cumsum") and kind in "biu":
        return "uint64" if kind == "u" else "int64"
    return dtype if name in _SAME or name == "sum" else None


def _dtype(node: ast.Call, place: int = 1) -> str:
    """The dtype that a call names; float64 without one."""
    named = [keyword.value for keyword in node.keywords if keyword.arg == "dtype"]
    given = named or node.args[place : place + 1]
    name = ast.unparse(given[0]).rpartition(".")[2] if given else "float64"
    try:
        return np.dtype({"int": "int64", "float": "float64"}.get(name, name)).name
    except TypeError:
        return "object"


def _items(found: Kinds, place: int) -> Kinds:
    kinds: set[Kind] = set()
    for kind in found:
        if isinstance(kind, Tup) and place < len(kind.items):
            kinds |= kind.items[place]
        elif isinstance(kind, Arr) and kind.rank > 0:
            rest = kind.rank - 1
            kinds.add(Arr(kind.dtype, rest) if rest else Num(kind.dtype, False))
        else:
            kinds.add(Other())
    return frozenset(kinds)


def _own_expressions(node: ast.stmt) -> Iterable[ast.expr]:
    """Calls in a statement's own expressions, not in the statements inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from (part for part in ast.walk(child) if isinstance(part, ast.Call))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _item(kind: Tup, place: ast.expr) -> Kinds:
    number = place.value if isinstance(place, ast.Constant) else None
    if isinstance(number, int) and -len(kind.items) <= number < len(kind.items):
        return kind.items[number]
    return UNKNOWN
