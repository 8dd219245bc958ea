"""Read a loop body by abstract interpretation: turn its statements into array accesses.

Every name is mapped to an abstract value: a number with its index form, or the views of arrays to
which it may refer. Inner loops are read repeatedly until no value changes, and branches are joined.
The accesses found therefore cover every possible execution.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.loops.calls import Calls
from hocket.loops.expressions import Environment, indexed, merged, not_understood
from hocket.loops.form import (
    UNKNOWN,
    Access,
    Array,
    Atom,
    Body,
    Inner,
    Linear,
    Refusal,
    Scalar,
    Tuple,
    Value,
)  # fmt: skip
from hocket.loops.scope import Scope

# Values only grow more general, so few rounds suffice; a loop that needs more is refused.
_MAX_ROUNDS = 6
Range = tuple[Scalar, Scalar, Scalar]
"""Start, stop and step of a loop."""


@dataclass(frozen=True)
class LoopLevel:
    """One loop of a nest, and the statements between it and the next inner loop."""

    node: ast.For
    prelude: tuple[ast.stmt, ...] = ()

    @property
    def name(self) -> str:
        """Name of the loop's variable."""
        assert isinstance(self.node.target, ast.Name)
        return self.node.target.id


def parts_of(levels: Sequence[LoopLevel]) -> list[Sequence[ast.stmt]]:
    """Statements of a nest per level: those between the loops, then the innermost body."""
    return [*(level.prelude for level in levels[:-1]), levels[-1].node.body]


def read_nest(
    levels: Sequence[LoopLevel], scope: Scope, carried: Iterable[str]
) -> tuple[Body, tuple[Range, ...], tuple[Access, ...], dict[str, str]]:
    """Accesses of one iteration, ranges of the loops, accesses between the loops, and number kinds.

    ``carried`` names the scalars that one iteration passes to the next (reductions). The last
    result maps each of them to the kind of number that is added to it.
    """
    dims = tuple(level.name for level in levels)
    written: frozenset[str] = frozenset()
    # An element of an index array can be a key only if the loop never writes that array. The first
    # pass finds the written arrays, the second uses them.
    for _ in range(2):
        reader = _Reader(scope, dims, written, scope.names)
        reader.added = {name: [] for name in carried}
        # A carried name differs from iteration to iteration, so it has no index form.
        environment: Environment = dict.fromkeys(carried, UNKNOWN)
        ranges: list[Range] = []
        for level, part in zip(levels, parts_of(levels), strict=True):
            ranges.append(reader.range_of(level.node.iter, environment))
            if level is levels[0]:
                reader.accesses.clear()  # the outermost range is taken once, before the loop
            heads = tuple(reader.accesses)
            environment[level.name] = Scalar(Linear.of(Atom("dim", level.name)), level.name, "int")
            reader.block(part, environment)
        accesses = tuple(dict.fromkeys(reader.accesses))
        found = Body(dims, accesses, reader.inner, reader.has_local_arrays)
        written = found.written
    kinds = {
        name: kinds[0] if len(set(kinds)) == 1 else "unknown"
        for name, kinds in reader.added.items()
    }
    return found, tuple(ranges), heads, kinds


class _Reader(Calls):
    added: dict[str, list[str]]
    """Kinds of the numbers that are added to each carried name."""

    def block(self, statements: Sequence[ast.stmt], environment: Environment) -> None:
        for statement in statements:
            self.statement(statement, environment)

    def statement(self, node: ast.stmt, environment: Environment) -> None:
        match node:
            case ast.Assign([ast.Subscript() as target], ast.BinOp() as value) if (
                added := _added(target, value)
            ) is not None:
                self.update(target, value.op, added, environment)
            case ast.Assign(targets, value):
                result = self.value(value, environment)
                self.note_carried(targets[0], value, environment)
                for bound in targets:
                    self.assign(bound, result, environment)
            case ast.AnnAssign(target, _, value) if value is not None:
                self.assign(target, self.value(value, environment), environment)
            case ast.AugAssign(target, op, value):
                self.update(target, op, value, environment)
            case ast.If(test, body, orelse):
                holding, failing = self.condition(test, environment)
                other, outside = dict(environment), self.positive
                # Index forms refer to values before the loop, so a condition holds in the whole
                # branch.
                self.positive = (*outside, *holding)
                self.block(body, environment)
                self.positive = (*outside, *failing)
                self.block(orelse, other)
                self.positive = outside
                _join(environment, other)
            case ast.For():
                self.for_loop(node, environment)
            case ast.While(test, body, []):
                self.loop(node, body, environment)
            case ast.Expr(value):
                self.value(value, environment)
            case ast.Pass() | ast.Continue():
                pass
            # A break of an inner loop only shortens that loop, which the joined accesses already
            # cover.
            case ast.Break() if self.loop_depth:
                pass
            case ast.Return(value) if self.call_depth:
                self.returns.append(self.value(value, environment) if value else UNKNOWN)
            case ast.Break() | ast.Return():
                what = type(node).__name__.lower()
                raise Refusal(
                    f"{what} at line {node.lineno} makes later iterations depend on earlier ones",
                    node.lineno,
                )
            case _:
                raise not_understood(node)

    def for_loop(self, node: ast.For, environment: Environment) -> None:
        if node.orelse or not isinstance(node.target, ast.Name):
            raise not_understood(node)
        self.protect(node.target)
        start, stop, step = self.range_of(node.iter, environment)
        atom = inner_atom(node)
        # Only a step of 1 covers a contiguous run of cells.
        is_plain = step.linear == Linear(const=1)
        self.inner[atom] = (
            Inner(start.text, stop.text, start.linear, stop.linear)
            if is_plain
            else Inner(None, None)
        )
        environment[node.target.id] = Scalar(Linear.of(Atom("inner", atom)), None, "int")
        self.loop(node, node.body, environment)

    def range_of(self, node: ast.expr, environment: Environment) -> Range:
        path = self.names.library(node.func) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or path not in ("builtins.range", "numba.prange"):
            raise Refusal(
                f"loop over {ast.unparse(node)} at line {node.lineno} is not understood: only "
                "range() and arrays are",
                node.lineno,
            )
        values = [self.consume(self.value(arg, environment), arg) for arg in node.args]
        zero, one = Scalar(Linear(), "0", "int"), Scalar(Linear(const=1), "1", "int")
        start, stop, step = [zero, *values, one] if len(values) == 1 else [*values, one][:3]
        return start, stop, step

    def loop(
        self, node: ast.For | ast.While, body: Sequence[ast.stmt], environment: Environment
    ) -> None:
        """Read a loop's body until the environment is stable; keep the last pass's accesses."""
        kept = list(self.accesses)
        variable = node.target.id if isinstance(node, ast.For) else None  # type: ignore[attr-defined]
        self.loop_depth += 1
        for _ in range(_MAX_ROUNDS):
            # Each round starts anew, because the values of the last round cover those of all
            # earlier ones.
            self.accesses = list(kept)
            after = dict(environment)
            if isinstance(node, ast.While):
                self.consume(self.value(node.test, after), node.test)
            self.block(body, after)
            last = after.get(variable) if variable is not None else None
            if variable is not None:
                # The next iteration starts with the loop's own value, whatever the body assigned to
                # the variable.
                after[variable] = environment[variable]
            before = dict(environment)
            _join(environment, after)
            if environment == before:
                break
        else:
            raise Refusal(f"names keep changing in the loop at line {node.lineno}", node.lineno)
        self.loop_depth -= 1
        if variable is not None and last is not None:
            # After the loop the variable is either the last number of the range or what the body
            # assigned.
            environment[variable] = merged([Scalar(None, None, "int"), last])

    def note_carried(self, target: ast.expr, value: ast.expr, environment: Environment) -> None:
        """Record the kind of ``e`` in ``s = s + e`` or ``s = max(s, e)`` for a carried name
        ``s``."""
        if not isinstance(target, ast.Name) or target.id not in self.added or self.call_depth:
            return
        sides = (
            [value.left, value.right] if isinstance(value, ast.BinOp)
            else value.args if isinstance(value, ast.Call) else [value]
        )  # fmt: skip
        for side in sides:
            if not (isinstance(side, ast.Name) and side.id == target.id):
                self.added[target.id].append(self.consume(self.value(side, environment), side).kind)

    def protect(self, target: ast.Name) -> None:
        if target.id in self.dims and not self.call_depth:
            raise Refusal(
                f"loop variable {target.id} is assigned at line {target.lineno}", target.lineno
            )

    def assign(self, target: ast.expr, value: Value, environment: Environment) -> None:
        match target:
            case ast.Name(name):
                self.protect(target)
                is_carried = name in self.added and not self.call_depth
                environment[name] = UNKNOWN if is_carried else value
            case ast.Tuple(elts) | ast.List(elts):
                for element, item in zip(elts, self.items(target, elts, value), strict=True):
                    self.assign(element, item, environment)
            case ast.Subscript():
                kind = self.consume(value, target).kind
                self.touch(self.subscript(target, environment), "write", target, "", kind)
            case _:
                raise not_understood(target)

    def items(self, target: ast.expr, elts: list[ast.expr], value: Value) -> Sequence[Value]:
        """Values that the targets of a tuple assignment receive."""
        if any(isinstance(element, ast.Starred) for element in elts):
            raise not_understood(target)
        if isinstance(value, Tuple) and len(value.items) == len(elts):
            return value.items
        if isinstance(value, Array):
            numbers = [Scalar(Linear(const=k), str(k), "int") for k in range(len(elts))]
            return [self.loaded(indexed(value, [number]), target) for number in numbers]
        return [UNKNOWN] * len(elts)

    def update(
        self, target: ast.expr, op: ast.operator, value: ast.expr, environment: Environment
    ) -> None:
        right = self.value(value, environment)
        name = type(op).__name__
        if isinstance(target, ast.Subscript):
            kind = self.consume(right, value).kind
            self.touch(self.subscript(target, environment), "update", target, name, kind)
            return
        if not isinstance(target, ast.Name):
            raise not_understood(target)
        self.protect(target)
        if target.id in self.added and not self.call_depth:
            self.added[target.id].append(self.consume(right, value).kind)
            return
        left = self.lookup(target.id, environment, target)
        if isinstance(left, Array):
            self.touch(left, "update", target, name, self.consume(right, value).kind)
        else:
            environment[target.id] = self.combine(op, left, right, target)


def inner_atom(loop: ast.For) -> str:
    """Name that identifies the variable of an inner loop, by its position in the source."""
    return f"{ast.unparse(loop.target)}@{loop.lineno}:{loop.col_offset}"


def _added(target: ast.Subscript, value: ast.BinOp) -> ast.expr | None:
    """Return ``e`` if an assignment is an update such as ``A[k] = A[k] + e``; None otherwise."""
    text = ast.unparse(target)
    if isinstance(value.op, (ast.Add, ast.Sub)) and ast.unparse(value.left) == text:
        return value.right
    if isinstance(value.op, ast.Add) and ast.unparse(value.right) == text:
        return value.left
    return None


def _join(environment: Environment, other: Environment) -> None:
    for name, value in other.items():
        environment[name] = merged([environment[name], value]) if name in environment else value
