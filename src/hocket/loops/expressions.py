"""Read expressions: find the number or view that each one is, and the array cells that it reads.

Numbers are linear forms where possible, otherwise expressions as keys. An expression that is not
understood raises `Refusal`; nothing is guessed.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
from hocket.loops.names import Names, Number
from hocket.loops.scope import Scope

_CONSTANTS = frozenset(
    f"{module}.{name}" for module in ("math", "numpy") for name in ("pi", "e", "inf", "nan")
)
_KEY_OPS = (ast.Mult, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift,
            ast.RShift)  # fmt: skip
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
    positive: tuple[Linear, ...] = ()
    """Forms that enclosing conditions keep at 0 or above."""

    @abstractmethod
    def block(self, statements: Sequence[ast.stmt], environment: Environment) -> None:
        """Run statements; implemented by the subclass in `body.py`."""

    @abstractmethod
    def call(self, node: ast.Call, environment: Environment) -> Value:
        """Return the value of a call; implemented by `Calls`."""

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
            # Two names of one array get the owner's view, so that a conflict between their accesses
            # is found.
            info = self.scope.arrays[name]
            return Array(frozenset({View(info.owner, (WHOLE,) * info.rank)}))
        if name in self.scope.scalars:
            return _invariant(name, self.scope.scalars[name])
        raise Refusal(f"name {name} at line {line} is not understood", line)

    def attribute(self, node: ast.Attribute, environment: Environment) -> Value:
        """Value of an attribute: a shape, a transpose or a constant of a library."""
        if self.names.library(node) in _CONSTANTS:
            return Scalar(None, None, "float")
        value = self.value(node.value, environment)
        if isinstance(value, Array):
            if node.attr in ("size", "ndim"):
                return self.length(ast.unparse(node), value)
            if node.attr == "shape":
                base = _whole_input(value)
                rank = self.scope.arrays[base].rank if base else 0
                lengths = (_invariant(f"{base}.shape[{axis}]", "int") for axis in range(rank))
                return Tuple(tuple(lengths)) if base else UNKNOWN
            if node.attr == "T":
                return opaque(value)
        raise not_understood(node)

    def length(self, text: str, value: Array) -> Scalar:
        """Length of an array; known before the loop if the array is an input."""
        is_known = _whole_input(value) and not self.call_depth
        return _invariant(text, "int") if is_known else Scalar(None, None, "int")

    def combine(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        """Value of a binary operator: a number for numbers, newly allocated memory for arrays."""
        if isinstance(left, Scalar) and isinstance(right, Scalar):
            return self.arithmetic(op, left, right)
        kind = _result_kind(op, self.consume(left, node).kind, self.consume(right, node).kind)
        if isinstance(op, ast.MatMult) and _is_row(left) and _is_row(right):
            return Scalar(None, None, kind)
        return fresh(kind)

    def arithmetic(self, op: ast.operator, left: Scalar, right: Scalar) -> Scalar:
        """Return the number that a binary operator gives: a linear form, a key, or unknown."""
        kind = _result_kind(op, left.kind, right.kind)
        # Floats cannot be indices, and adding numpy bools is not addition.
        if kind in ("float", "bool"):
            return Scalar(None, None, kind)
        text = None
        if left.text is not None and right.text is not None:
            sides = (ast.parse(side.text or "", mode="eval").body for side in (left, right))
            text = ast.unparse(ast.BinOp(next(sides), op, next(sides)))
        one, other = left.linear, right.linear
        if one is not None and other is not None:
            match op:
                case ast.Add():
                    return Scalar(one + other, text, kind)
                case ast.Sub():
                    return Scalar(one - other, text, kind)
                case ast.Mult() if one.is_const or other.is_const:
                    product = other.scaled(one.const) if one.is_const else one.scaled(other.const)
                    return Scalar(product, text, kind)
        if text is None or not isinstance(op, _KEY_OPS):
            return Scalar(None, None, kind)
        return self.known_before(text, kind)

    def known_before(self, text: str, kind: Kind) -> Scalar:
        """A number whose expression can be evaluated before the loop runs."""
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        atom = Atom("key" if names & set(self.dims) else "invariant", text)
        return Scalar(Linear.of(atom), text, kind)

    def unary(self, op: ast.unaryop, operand: Value, node: ast.AST) -> Value:
        """Value of a unary operator: a sign, an inversion or a negation."""
        if isinstance(operand, Scalar) and isinstance(op, ast.USub):
            return self.arithmetic(ast.Sub(), Scalar(Linear(), "0", operand.kind), operand)
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
        if isinstance(base, Tuple):
            match node.slice:
                case ast.Constant(int() as place) if 0 <= place < len(base.items):
                    return base.items[place]
            return merged(base.items) if base.items else UNKNOWN
        # The length of such an array is unknown before the loop, so its indices must be checked at
        # run time.
        if isinstance(base, Scalar) or any(not view.base for view in base.views):
            self.has_local_arrays = True
        return FRESH if isinstance(base, Scalar) else indexed(base, indices)

    def index(self, node: ast.expr, environment: Environment) -> list[Index]:
        """Return the parts of a subscript; a tuple has several."""
        if isinstance(node, ast.Slice):
            return [self.slice(node, environment)]
        value = self.value(node, environment)
        if isinstance(value, Tuple):
            return [item if isinstance(item, Scalar) else None for item in value.items]
        is_constant = isinstance(node, ast.Constant)
        number = self.consume(value, node)
        changes_shape = isinstance(value, Array) or number.kind == "bool"
        return [None if changes_shape or (is_constant and number.linear is None) else number]

    def slice(self, node: ast.Slice, environment: Environment) -> Sub:
        """Return a slice, with those of its ends that are known before the loop."""
        if node.lower is None and node.upper is None and node.step is None:
            return WHOLE
        start, stop, step = (
            self.consume(self.value(bound, environment), bound).text if bound else default
            for bound, default in ((node.lower, "0"), (node.upper, None), (node.step, "1"))
        )
        if start is None or stop is None or step != "1":
            return ANY_SLICE
        return Sub(segment=(start, stop), is_slice=True)

    def loaded(self, value: Value, node: ast.expr) -> Value:
        """Return a number if every position is an index, else the view itself."""
        if not isinstance(value, Array) or any(view.keeps_dimensions for view in value.views):
            return value
        only = next(iter(value.views))
        if not only.base and len(value.views) == 1:
            has_slice = any(isinstance(part, ast.Slice) for part in ast.walk(node))
            return value if has_slice else UNKNOWN
        self.touch(value, "read", node)
        info = self.scope.arrays.get(only.base)
        if len(value.views) > 1 or info is None:
            return UNKNOWN
        # An element is known before the loop if the loop never writes its array and the index is
        # known.
        indices = [sub.index for sub in only.subs]
        known = [index.text() for index in indices if index and not index.has("inner")]
        is_key = only.base not in self.written and info.kind in ("int", "unknown")
        if not is_key or len(known) < len(indices):
            return Scalar(None, None, info.kind)
        return self.known_before(f"{only.base}[{', '.join(known)}]", info.kind)

    def consume(self, value: Value, node: ast.AST) -> Scalar:
        """Read all views of a value that is used as a whole."""
        if isinstance(value, Scalar):
            return value
        if isinstance(value, Tuple):
            for item in value.items:
                self.consume(item, node)
            return UNKNOWN
        self.touch(value, "read", node)
        kinds = {self.scope.arrays[v.base].kind if v.base else v.kind for v in value.views}
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
            subs = tuple(self.guarded(self.segmented(sub)) for sub in view.subs)
            line = getattr(node, "lineno", 0)
            self.accesses.append(Access(view.base, subs, mode, line, text, op, kind))

    def guarded(self, sub: Sub) -> Sub:
        """Mark a subscript as non-negative if a condition such as ``c >= w`` holds for ``c -
        w``."""
        # A form that exceeds a non-negative form by a constant of 0 or more is not negative either.
        gaps = [sub.index - form for form in self.positive] if sub.index is not None else []
        is_guarded = any(gap.is_const and gap.const >= 0 for gap in gaps)
        return replace(sub, is_guarded=True) if is_guarded else sub

    def condition(
        self, test: ast.expr, environment: Environment
    ) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
        """Read a condition; return forms that are 0 or more if it holds, and forms for the case
        that it fails.

        Both are empty unless the condition compares two integers that are known before the loop.
        """
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
            self.consume(self.value(test, environment), test)
            return (), ()
        left, right = (
            self.consume(self.value(side, environment), side).linear
            for side in (test.left, test.comparators[0])
        )
        if left is None or right is None:
            return (), ()
        gap, one = left - right, Linear(const=1)
        match test.ops[0]:
            case ast.GtE():
                return (gap,), (gap.scaled(-1) - one,)
            case ast.Gt():
                return (gap - one,), (gap.scaled(-1),)
            case ast.LtE():
                return (gap.scaled(-1),), (gap - one,)
            case ast.Lt():
                return (gap.scaled(-1) - one,), (gap,)
        return (), ()

    def segmented(self, sub: Sub) -> Sub:
        """Return a subscript by an inner loop's variable as the run of cells it covers."""
        atom = sub.index.variable if sub.index is not None else None
        loop = self.inner.get(atom.name) if atom is not None and atom.kind == "inner" else None
        if loop is None or loop.start is None or loop.stop is None:
            return sub
        return Sub(index=sub.index, segment=(loop.start, loop.stop))


def indexed(base: Array, indices: Sequence[Index]) -> Array:
    """Return the views that ``indices`` select from an array's views."""
    views: set[View] = set()
    for view in base.views:
        free = [position for position, sub in enumerate(view.subs) if sub.is_slice]
        if not view.base:
            views.add(view)
        # The shape is lost here, so the result may refer to any cell of the array.
        elif view.is_opaque or None in indices or len(indices) > len(free):
            views |= opaque(Array(frozenset({view}))).views
        else:
            subs = list(view.subs)
            for position, index in zip(free, indices, strict=False):
                assert index is not None
                subs[position] = _narrowed(subs[position], index)
            views.add(View(view.base, tuple(subs)))
    return Array(frozenset(views))


def _narrowed(sub: Sub, index: Scalar | Sub) -> Sub:
    """Apply one more subscript to a position of a view; the result stays within that position."""
    if isinstance(index, Sub):
        return index if sub.whole else sub
    linear = index.linear if sub.whole else None
    if linear is not None and linear.is_const and linear.const < 0:
        linear = None  # counts from the end: another cell than the same number elsewhere
    return Sub(index=linear, segment=sub.segment)


def _invariant(text: str, kind: Kind) -> Scalar:
    """A number that the loop does not change."""
    return Scalar(Linear.of(Atom("invariant", text)), text, kind)


def _result_kind(op: ast.operator, left: Kind, right: Kind) -> Kind:
    """Kind of number that a binary operator returns."""
    if isinstance(op, ast.Div) or "float" in (left, right):
        return "float"
    return "unknown" if "unknown" in (left, right) else "int"


def _whole_input(value: Array) -> str:
    """Name of the input array if a value is all of it; empty for other values."""
    view = next(iter(value.views))
    is_whole = len(value.views) == 1 and not view.is_opaque
    return view.base if is_whole and all(sub == WHOLE for sub in view.subs) else ""


def _is_row(value: Value) -> bool:
    """True if a value is a view of rank one."""
    return isinstance(value, Array) and all(
        view.base and not view.is_opaque and sum(sub.is_slice for sub in view.subs) == 1
        for view in value.views
    )


def views_in(value: Value) -> frozenset[View]:
    """All memory that a value may refer to."""
    if isinstance(value, Array):
        return value.views
    if isinstance(value, Tuple):
        return frozenset[View]().union(*map(views_in, value.items))
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
    views = frozenset[View]().union(*map(views_in, values))
    if views:
        return Array(views)
    kinds = {value.kind if isinstance(value, Scalar) else "unknown" for value in values}
    return Scalar(None, None, kinds.pop()) if len(kinds) == 1 else UNKNOWN


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
