"""Read expressions: find the number or view that each one is, and the array cells that it reads.

An expression that is not understood raises `Refusal`; nothing is guessed.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.loops.form import (
    ANY_SLICE,
    FRESH,
    UNKNOWN,
    WHOLE,
    Access,
    Array,
    Atom,
    Inner,
    Kind,
    Linear,
    Mode,
    Refusal,
    Scalar,
    Sub,
    Tuple,
    Value,
    View,
    fresh,
)  # fmt: skip
from hocket.loops.names import Library, Names, Number
from hocket.loops.numbers import arithmetic, known_before, merged, result_kind, views_in
from hocket.loops.scope import Scope

_CONSTANTS = frozenset(
    f"{module}.{name}" for module in ("math", "numpy") for name in ("pi", "e", "inf", "nan")
)
Environment = dict[str, Value]
Index = Scalar | Sub | None
"""One part of a subscript: a number, a slice, or None if it changes the shape (``None``, masks)."""


@dataclass
class Expressions(ABC):
    """Evaluates expressions in an environment and records the accesses that they make."""

    scope: Scope
    dims: tuple[str, ...]
    written: frozenset[str]
    names: Names
    accesses: list[Access] = field(default_factory=list)
    inner: dict[str, Inner] = field(default_factory=dict)
    returns: list[Value] = field(default_factory=list)
    call_depth: int = 0
    loop_depth: int = 0
    has_local_arrays: bool = False

    @abstractmethod
    def block(self, statements: Sequence[ast.stmt], environment: Environment) -> None:
        """Run statements; implemented by the reader of statements."""

    # ── values ──────────────────────────────────────────────────────────────────────────────────

    def value(self, node: ast.expr, environment: Environment) -> Value:
        """Evaluate an expression symbolically."""
        match node:
            case ast.Constant(bool()):
                return Scalar(None, None, "bool")
            case ast.Constant(int() as constant):
                return Scalar(Linear(const=constant), str(constant), "int")
            case ast.Constant(constant):
                return Scalar(None, None, "float" if isinstance(constant, float) else "unknown")
            case ast.Name(name):
                return self.lookup(name, environment, node)
            case ast.Tuple(elts):
                return Tuple(tuple(self.value(element, environment) for element in elts))
            case ast.Subscript():
                return self.loaded(self.subscript(node, environment), node)
            case ast.BinOp(left, op, right):
                sides = self.value(left, environment), self.value(right, environment)
                return self.combine(op, *sides, node)
            case ast.UnaryOp(op, operand):
                return self.unary(op, self.value(operand, environment), node)
            case ast.Compare(left, _, comparators):
                for side in (left, *comparators):
                    self.consume(self.value(side, environment), side)
                return Scalar(None, None, "bool")
            case ast.BoolOp(_, values):
                return merged([self.value(value, environment) for value in values])
            case ast.IfExp(test, body, orelse):
                self.consume(self.value(test, environment), test)
                return merged([self.value(body, environment), self.value(orelse, environment)])
            case ast.Attribute():
                return self.attribute(node, environment)
            case ast.Call():
                return self.call(node, environment)
            case _:
                raise not_understood(node)

    def lookup(self, name: str, environment: Environment, node: ast.AST) -> Value:
        """Symbolic value of a name."""
        if name in environment:
            return environment[name]
        line = getattr(node, "lineno", 0)
        if self.call_depth:
            meaning = self.names.meaning(name)
            if isinstance(meaning, Number):
                return Scalar(None, None, "float" if isinstance(meaning.value, float) else "int")
            raise Refusal(f"helper reads the global {name} at line {line}", line)
        if name in self.scope.arrays:
            info = self.scope.arrays[name]
            return Array(frozenset({View(info.owner, (WHOLE,) * info.rank)}))
        if name in self.scope.scalars:
            kind = self.scope.scalars[name]
            return Scalar(Linear.of(Atom("invariant", name)), name, kind)
        raise Refusal(f"name {name} at line {line} is not understood", line)

    def attribute(self, node: ast.Attribute, environment: Environment) -> Value:
        """Value of an attribute: a shape, a transpose or a constant of a library."""
        if self.library(node) in _CONSTANTS:
            return Scalar(None, None, "float")
        value = self.value(node.value, environment)
        if isinstance(value, Array):
            if node.attr in ("size", "ndim"):
                return self.length(f"{ast.unparse(node)}", value)
            if node.attr == "shape":
                return self.shape(value)
            if node.attr == "T":
                return opaque(value)
        raise not_understood(node)

    def whole_input(self, value: Array) -> str:
        """Name of the input array if a value is all of it; empty for other values."""
        view = next(iter(value.views))
        is_whole = (
            len(value.views) == 1 and not view.is_opaque and all(s == WHOLE for s in view.subs)
        )
        return view.base if is_whole else ""

    def length(self, text: str, value: Array) -> Scalar:
        """A length, fixed while the loop runs; known before the loop if it is that of an input."""
        base = self.whole_input(value)
        if not base or self.call_depth:
            return Scalar(None, None, "int")
        return Scalar(Linear.of(Atom("invariant", text)), text, "int")

    def shape(self, value: Array) -> Value:
        """Shape of an input: its lengths, each known before the loop."""
        base = self.whole_input(value)
        if not base:
            return UNKNOWN
        texts = [f"{base}.shape[{axis}]" for axis in range(self.scope.info(base).rank)]
        return Tuple(tuple(Scalar(Linear.of(Atom("invariant", t)), t, "int") for t in texts))

    def combine(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        """Value of a binary operator: a number for numbers, newly allocated memory for arrays."""
        if isinstance(left, Scalar) and isinstance(right, Scalar):
            return arithmetic(op, left, right, self.dims)
        kind = result_kind(op, self.consume(left, node).kind, self.consume(right, node).kind)
        if isinstance(op, ast.MatMult) and _is_row(left) and _is_row(right):
            return Scalar(None, None, kind)
        return fresh(kind)

    def unary(self, op: ast.unaryop, operand: Value, node: ast.AST) -> Value:
        """Value of a unary operator: a sign, an inversion or a negation."""
        if isinstance(operand, Scalar) and isinstance(op, ast.USub):
            zero = Scalar(Linear(), "0", operand.kind)
            return arithmetic(ast.Sub(), zero, operand, self.dims)
        if isinstance(operand, Scalar) and isinstance(op, ast.UAdd):
            return operand
        self.consume(operand, node)
        return FRESH if views_in(operand) else UNKNOWN

    # ── arrays ──────────────────────────────────────────────────────────────────────────────────

    def subscript(self, node: ast.Subscript, environment: Environment) -> Value:
        """Return the view that a subscript selects, without recording a read."""
        base = self.value(node.value, environment)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        indices: list[Index] = []
        for part in parts:
            indices += self.index(part, environment)
        if isinstance(base, Scalar):
            self.has_local_arrays = True
            return FRESH
        if isinstance(base, Array) and any(not view.base for view in base.views):
            self.has_local_arrays = True
        if isinstance(base, Tuple):
            place = node.slice
            number = place.value if isinstance(place, ast.Constant) else None
            if isinstance(number, int) and 0 <= number < len(base.items):
                return base.items[number]
            return merged(base.items) if base.items else UNKNOWN
        return indexed(base, indices)

    def index(self, node: ast.expr, environment: Environment) -> list[Index]:
        """Return the parts of a subscript; a tuple has several."""
        if isinstance(node, ast.Slice):
            return [self.slice(node, environment)]
        value = self.value(node, environment)
        if isinstance(value, Tuple):
            return [item if isinstance(item, Scalar) else None for item in value.items]
        if isinstance(value, Array):
            self.consume(value, node)
            return [None]
        if value.kind == "bool" or (isinstance(node, ast.Constant) and value.linear is None):
            return [None]
        return [value]

    def slice(self, node: ast.Slice, environment: Environment) -> Sub:
        """Return a slice, with those of its ends that are known before the loop."""
        if node.lower is None and node.upper is None and node.step is None:
            return WHOLE
        texts = [
            self.consume(self.value(bound, environment), bound).text if bound else default
            for bound, default in ((node.lower, "0"), (node.upper, None), (node.step, "1"))
        ]
        start, stop, step = texts
        known = start is not None and stop is not None and step == "1"
        return Sub(segment=(start, stop) if known else None, is_slice=True)  # type: ignore[arg-type]

    def loaded(self, value: Value, node: ast.expr) -> Value:
        """Return a number if every position is an index, else the view itself."""
        if not isinstance(value, Array) or any(view.keeps_dimensions for view in value.views):
            return value
        only = next(iter(value.views))
        if not only.base and len(value.views) == 1:
            return value if _has_slice(node) else UNKNOWN
        self.touch(value, "read", node)
        info = self.scope.arrays.get(only.base)
        if len(value.views) > 1 or info is None:
            return UNKNOWN
        text = self.key_text(only) if info.kind in ("int", "unknown") else None
        return known_before(text, info.kind, self.dims) if text else Scalar(None, None, info.kind)

    def key_text(self, view: View) -> str | None:
        """Text of an element if the loop never writes it and its index is known before the loop."""
        if view.base in self.written:
            return None
        indices = [sub.index for sub in view.subs]
        if any(index is None or index.has("inner") for index in indices):
            return None
        return f"{view.base}[{', '.join(index.text() for index in indices if index)}]"

    def consume(self, value: Value, node: ast.AST) -> Scalar:
        """Read all views of a value that is used as a whole."""
        if isinstance(value, Scalar):
            return value
        if isinstance(value, Tuple):
            for item in value.items:
                self.consume(item, node)
            return UNKNOWN
        self.touch(value, "read", node)
        kinds = {self.scope.info(v.base).kind if v.base else v.kind for v in value.views}
        return Scalar(None, None, kinds.pop() if len(kinds) == 1 else "unknown")

    def touch(
        self, value: Value, mode: Mode, node: ast.AST, op: str = "", kind: Kind = "unknown"
    ) -> None:
        """Record an access of all memory that a value may refer to."""
        for view in sorted(views_in(value), key=repr):
            if not view.base:
                continue
            text = ast.unparse(node)
            if isinstance(node, ast.Name) and view.base != node.id:
                text = f"{node.id} of {view.base}"
            subs = tuple(self.segmented(sub) for sub in view.subs)
            line = getattr(node, "lineno", 0)
            self.accesses.append(Access(view.base, subs, mode, line, text, op, kind))

    def segmented(self, sub: Sub) -> Sub:
        """Return a subscript by an inner loop's variable as the run of cells it covers."""
        if sub.index is None or len(sub.index.terms) != 1 or sub.index.const:
            return sub
        ((atom, factor),) = sub.index.terms
        loop = self.inner.get(atom.name) if atom.kind == "inner" and factor == 1 else None
        if loop is None or loop.start is None or loop.stop is None:
            return sub
        return Sub(index=sub.index, segment=(loop.start, loop.stop))

    # ── names of libraries, calls ───────────────────────────────────────────────────────────────

    def library(self, node: ast.expr) -> str | None:
        """Dotted path of a library name; None for any other expression."""
        if isinstance(node, ast.Name):
            meaning = self.names.meaning(node.id)
            return meaning.path if isinstance(meaning, Library) else None
        if isinstance(node, ast.Attribute):
            parent = self.library(node.value)
            return f"{parent}.{node.attr}" if parent else None
        return None

    @abstractmethod
    def call(self, node: ast.Call, environment: Environment) -> Value:
        """Value of a call; implemented by the reader of calls."""


def indexed(base: Array, indices: Sequence[Index]) -> Array:
    """Return the views that ``indices`` select from an array's views."""
    views: set[View] = set()
    for view in base.views:
        free = [position for position, sub in enumerate(view.subs) if sub.is_slice]
        if not view.base:
            views.add(view)
        elif view.is_opaque or any(index is None for index in indices) or len(indices) > len(free):
            views |= opaque(Array(frozenset({view}))).views
        else:
            subs = list(view.subs)
            for position, index in zip(free, indices, strict=False):
                subs[position] = _narrowed(subs[position], index)
            views.add(View(view.base, tuple(subs)))
    return Array(frozenset(views))


def _narrowed(sub: Sub, index: Index) -> Sub:
    """Apply one more subscript to a position of a view; the result stays within that position."""
    if isinstance(index, Sub):
        return index if sub.whole else sub
    assert index is not None
    linear = index.linear if sub.whole else None
    if linear is not None and linear.is_const and linear.const < 0:
        linear = None  # counts from the end: another cell than the same number elsewhere
    return Sub(index=linear, segment=sub.segment)


def _is_row(value: Value) -> bool:
    """True if a value is a view of rank one."""
    return isinstance(value, Array) and all(
        view.base and not view.is_opaque and sum(sub.is_slice for sub in view.subs) == 1
        for view in value.views
    )


def _has_slice(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Slice) for part in ast.walk(node))


def opaque(array: Array) -> Array:
    """Return a view in another shape: it may refer to any cell of the array."""
    return Array(
        frozenset(
            View(view.base, (ANY_SLICE,) * len(view.subs), is_opaque=True) if view.base else view
            for view in array.views
        )
    )


def not_understood(node: ast.expr | ast.stmt) -> Refusal:
    """Return the refusal of a construct that the analysis does not know."""
    text = ast.unparse(node).partition("\n")[0]
    return Refusal(f"{text!r} at line {node.lineno} is not understood", node.lineno)
