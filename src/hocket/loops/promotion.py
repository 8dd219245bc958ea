"""Infer the number types in a loop: Python's or numpy's, and the dtype.

Compiled code has one 64-bit float type. Python has two, its own and numpy's, which differ for a
zero divisor, in operations with 32-bit floats, and in sums of bools. The types of every name are
inferred from the loop's inputs until nothing changes. The type of an operation is that of its
result on sample values, so the rules are those of Python and numpy themselves.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.loops.calls import VIEW_METHODS, pure_call, pure_method
from hocket.loops.names import Helper, Names, Number


@dataclass(frozen=True)
class Num:
    """A number of a Python type (``int``, ``float``, ``bool``) or of a numpy dtype."""

    dtype: str
    is_python: bool


@dataclass(frozen=True)
class Arr:
    """An array of a dtype and rank."""

    dtype: str
    rank: int


@dataclass(frozen=True)
class Tup:
    """A tuple of values."""

    items: tuple[Kinds, ...]


@dataclass(frozen=True)
class Other:
    """A value of any other type, or of an unknown one."""


Kind = Num | Arr | Tup | Other
Kinds = frozenset[Kind]
"""Types that a value may have; empty if no value has been seen yet."""

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: operator.pow, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.MatMult: operator.matmul, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Invert: operator.invert, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_PYTHON: dict[str, Any] = {"int": 1, "float": 1.0, "complex": 1j, "bool": True}
_BUILTINS = ("abs", "int", "float", "bool", "round", "pow")
_ATTRIBUTES = ("shape", "size", "ndim", "T", "real", "imag")
_NONE: Kinds = frozenset()
UNKNOWN: Kinds = frozenset({Other()})
_INT, _FLOAT, _BOOL = (frozenset({Num(name, True)}) for name in ("int", "float", "bool"))
_MAX_ROUNDS = 12


def kind_of(value: Any) -> Kind:
    """The type of a value."""
    if isinstance(value, np.ndarray):
        return Arr(value.dtype.name, value.ndim)
    if isinstance(value, np.generic):
        return Num(value.dtype.name, False)
    if isinstance(value, tuple):
        return Tup(tuple(frozenset({kind_of(item)}) for item in value))
    name = type(value).__name__
    return Num(name, True) if name in _PYTHON else Other()


def _sample(kind: Any) -> Any:
    """Return a sample value of a type; an argument that is no type is returned as it is."""
    match kind:
        case Num(dtype, is_python):
            return _PYTHON[dtype] if is_python else np.dtype(dtype).type(1)
        case Arr(dtype, rank):
            # Ones, because zeros would raise an error if a sample is a divisor.
            return np.ones((2,) * rank, dtype)
        case Tup(items):
            return tuple(_sample(min(item, key=repr, default=Other())) for item in items)
        case Other():
            raise TypeError("no sample of an unknown type")
    return kind


def _kind_of_result(function: Callable[..., Any], operands: tuple[Any, ...]) -> Kind:
    """Type that a function without side effects returns for operands of some types."""
    try:
        with np.errstate(all="ignore"):
            return kind_of(function(*map(_sample, operands)))
    except (TypeError, ValueError, ArithmeticError, IndexError, AttributeError):
        return Other()


_cached_kind_of_result = functools.lru_cache(maxsize=4096)(_kind_of_result)


def applied(function: Callable[..., Any], *operands: Iterable[Any]) -> Kinds:
    """All types that a function may return for operands of some types."""
    return frozenset(
        _cached_kind_of_result(function, each) for each in itertools.product(*operands)
    )


@dataclass
class KindReader:
    """Infers the types of the names in a loop or in a helper function."""

    names: Names
    kinds: dict[str, Kinds]
    body: Sequence[ast.stmt]
    helpers: dict[str, KindReader] = field(default_factory=dict)
    """Called helper functions, with the types of their arguments over all calls."""
    function: ast.FunctionDef | None = None
    """The helper function that is read; None for a loop."""
    returned: Kinds = _NONE
    changed: bool = False
    assigned: dict[str, Kinds] = field(default_factory=dict)
    """Types that the statements assign to each name, without its type before the loop."""

    @staticmethod
    def of(statements: Sequence[ast.stmt], values: Mapping[str, Any], names: Names) -> KindReader:
        """Infer the types of statements that start with some values."""
        kinds = {name: frozenset({kind_of(value)}) for name, value in values.items()}
        reader = KindReader(names, kinds, statements)
        for _ in range(_MAX_ROUNDS):
            if not reader._round():
                break
        else:
            # Tuples may grow without end; types that do not converge are treated as unknown.
            reader.kinds = dict.fromkeys(reader.kinds, UNKNOWN)
        reader.assigned = {}
        reader._read()  # types are final now
        return reader

    def _round(self) -> bool:
        """Read all statements once; True if the possible types of a name have grown."""
        readers = [self, *self.helpers.values()]
        for reader in readers:
            reader.changed = False
        for reader in readers:
            reader._read()
        return any(reader.changed for reader in (self, *self.helpers.values()))

    def _read(self) -> None:
        for statement in self.body:
            self._statement(statement)

    def _add(self, name: str, kinds: Kinds) -> None:
        self.assigned[name] = self.assigned.get(name, _NONE) | kinds
        known = self.kinds.get(name, _NONE)
        self.changed |= not kinds <= known
        self.kinds[name] = known | kinds

    def _statement(self, node: ast.stmt) -> None:
        """Read a statement and those inside it; their order does not matter."""
        match node:
            case ast.Assign(targets, value):
                found = self.of_expression(value)
                for target in targets:
                    self._bind(target, found)
            case ast.AnnAssign(target, _, value) if value is not None:
                self._bind(target, self.of_expression(value))
            case ast.AugAssign(ast.Name(name) as target, op, value):
                left = self.kinds.get(name, _NONE)
                # An array is changed in place and keeps its type.
                if not any(isinstance(kind, Arr) for kind in left):
                    self._bind(target, self.combined(type(op), left, self.of_expression(value)))
            case ast.For(target, ast.Call(function)) if ast.unparse(function).endswith("range"):
                self._bind(target, _INT)
            case ast.For(target, head):
                self._bind(target, applied(operator.getitem, self.of_expression(head), (0,)))
            case ast.Return(value) if value is not None:
                found = self.of_expression(value)
                self.changed |= not found <= self.returned
                self.returned |= found
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child)
            elif isinstance(child, ast.expr):
                for part in ast.walk(child):
                    if isinstance(part, ast.Call):
                        self.of_expression(part)  # helpers are read with the arguments of each call

    def _bind(self, target: ast.expr, found: Kinds) -> None:
        """Add the types of a value to those of an assignment's target."""
        if isinstance(target, ast.Name):
            self._add(target.id, found)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for place, element in enumerate(target.elts):
                self._bind(element, _item(found, place))

    def of_expression(self, node: ast.expr) -> Kinds:
        """Types that an expression may have."""
        match node:
            case ast.Constant(value):
                return frozenset({kind_of(value)})
            case ast.Name(name):
                meaning = self.names.meaning(name)
                value = meaning.value if isinstance(meaning, Number) else None
                return self.kinds.get(name, _NONE if value is None else frozenset({kind_of(value)}))
            case ast.Tuple(elts):
                return frozenset({Tup(tuple(map(self.of_expression, elts)))})
            case ast.Subscript(value, place):
                return self._of_subscript(self.of_expression(value), place)
            case ast.BinOp(left, op, right):
                return self.combined(type(op), self.of_expression(left), self.of_expression(right))
            case ast.UnaryOp(ast.Not()):
                return _BOOL
            case ast.UnaryOp(op, operand):
                return applied(OPERATORS[type(op)], self.of_expression(operand))
            case ast.Compare(left, ops, comparators):
                sides = list(map(self.of_expression, [left, *comparators]))
                found = [
                    applied(OPERATORS[type(op)], *pair) if type(op) in OPERATORS else _BOOL
                    for op, pair in zip(ops, itertools.pairwise(sides), strict=True)
                ]
                return _NONE.union(*found)
            case ast.BoolOp(_, values):
                return _NONE.union(*map(self.of_expression, values))
            case ast.IfExp(_, body, orelse):
                return self.of_expression(body) | self.of_expression(orelse)
            case ast.Attribute(value, name):
                if self.names.library(node) is not None:
                    return _FLOAT
                found_in = self.of_expression(value)
                return applied(getattr, found_in, (name,)) if name in _ATTRIBUTES else UNKNOWN
            case ast.Call():
                return self._of_call(node)
            case _:
                return UNKNOWN

    def combined(self, op: type[ast.operator], left: Kinds, right: Kinds) -> Kinds:
        """All types that a binary operator may return."""
        return applied(OPERATORS[op], left, right)

    def _of_subscript(self, base: Kinds, place: ast.expr) -> Kinds:
        """Types of an element or a view."""
        number = place.value if isinstance(place, ast.Constant) else None
        if isinstance(number, int) and any(isinstance(kind, Tup) for kind in base):
            return _item(base, number)
        parts = place.elts if isinstance(place, ast.Tuple) else [place]
        options: list[Iterable[Any]] = []
        for part in parts:
            if isinstance(part, ast.Slice):
                options.append((slice(None),))
            elif isinstance(part, ast.Constant) and part.value is None:
                options.append((None,))
            else:
                # A name without a type so far is a loop variable that a later statement binds.
                options.append(self.of_expression(part) or _INT)
        return frozenset(
            _element(array, index) for array in base for index in itertools.product(*options)
        )

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _of_call(self, node: ast.Call) -> Kinds:
        """Types of a call: builtins, math, numpy, array methods, plain helpers."""
        arguments = [self._argument(argument) for argument in node.args]
        keywords = {keyword.arg or "**" for keyword in node.keywords}
        module, _, name = (self.names.library(node.func) or "").partition(".")
        if module == "builtins":
            if name in ("min", "max"):  # one of their arguments
                return _NONE.union(*arguments)
            if name not in _BUILTINS:
                return _INT if name == "len" else UNKNOWN
            return applied(getattr(builtins, name), *arguments)
        if module == "math":
            found = applied(getattr(math, name, float), *arguments)
            return found if Other() not in found else _FLOAT
        if module:
            is_pure = pure_call(f"{module}.{name}", len(node.args), keywords)
            return (
                self._called(operator.attrgetter(name)(np), node, arguments) if is_pure else UNKNOWN
            )
        match node.func:
            case ast.Attribute(value, name):
                is_pure_method = pure_method(name, len(node.args), keywords) or name in VIEW_METHODS
                base = self.of_expression(value)
                if is_pure_method:
                    return self._called(_method(name), node, [base, *arguments])
            case ast.Name("dot_"):  # a product of rows, see `rows`
                return applied(np.dot, *arguments)
            case ast.Name(name) if isinstance(meaning := self.names.meaning(name), Helper):
                return self._of_helper(name, meaning, arguments)
        return UNKNOWN

    def _argument(self, node: ast.expr) -> frozenset[Any]:
        """Types of an argument; a dtype or a string is returned as it is."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return frozenset({node.value})
        named = (self.names.library(node) or "").rpartition(".")[2]
        found = getattr(np, named, None)
        is_dtype = isinstance(found, type) and issubclass(found, np.generic)
        if is_dtype or named in _PYTHON:
            return frozenset({np.dtype(named).type})
        return self.of_expression(node)

    def _called(
        self, function: Callable[..., Any], node: ast.Call, arguments: Sequence[frozenset[Any]]
    ) -> Kinds:
        """Types that a function of numpy may return; keywords are literals or dtypes."""
        if not node.keywords:
            return applied(function, *arguments)
        options: dict[str, Any] = {}
        for keyword in node.keywords:
            try:
                options[keyword.arg or ""] = ast.literal_eval(keyword.value)
            except ValueError:
                (options[keyword.arg or ""],) = self._argument(keyword.value) or UNKNOWN
        return frozenset(
            _kind_of_result(functools.partial(function, **options), each)
            for each in itertools.product(*arguments)
        )

    def _of_helper(self, name: str, helper: Helper, arguments: Sequence[Kinds]) -> Kinds:
        """Types that a helper has returned so far, over the arguments of all calls."""
        if name not in self.helpers:
            body, node = helper.node.body, helper.node
            self.helpers[name] = KindReader(helper.names, {}, body, self.helpers, node)
            self.changed = True
        reader = self.helpers[name]
        for argument, kinds in zip(helper.node.args.args, arguments, strict=False):
            reader._add(argument.arg, kinds)
        return reader.returned


@functools.cache
def _method(name: str) -> Callable[..., Any]:
    return lambda base, *arguments, **options: getattr(base, name)(*arguments, **options)


def _element(array: Kind, index: Sequence[Any]) -> Kind:
    """The type of ``array[index]``."""
    try:
        return kind_of(_sample(array)[tuple(map(_sample, index))])
    except (TypeError, IndexError):
        return Other()


def _item(found: Kinds, place: int) -> Kinds:
    """Types of one item of tuples and arrays."""
    return _NONE.union(*(
        kind.items[place] if isinstance(kind, Tup) and -len(kind.items) <= place < len(kind.items)
        else {_element(kind, (0,))}
        for kind in found
    ))  # fmt: skip
