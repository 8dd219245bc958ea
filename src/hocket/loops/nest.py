"""Analyse a loop nest at one depth: dimensions, carried names, scratch arrays, dependence vectors.

A scratch array is overwritten by every iteration before it is read, so each worker can have its own
copy.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hocket.loops.body import LoopLevel, Range, parts_of, read_nest
from hocket.loops.dependence import Segments, Vector, dependence_vectors
from hocket.loops.flow import exposed_names, loaded_names, mentions, stored_names
from hocket.loops.form import Access, Atom, Body, Refusal
from hocket.loops.reductions import Reduction, find_reduction, refuse_order
from hocket.loops.scope import Scope

# An array is private if the first statement of the iteration that mentions it fills it: ``p[:] =
# e``, ``p.fill(e)`` or ``for k in range(E): p[k] = e``, with one nested loop per dimension, where E
# covers the array (checked at the call). It must appear under its own name only and never as a
# whole, so that no alias can refer to it.

Stops = tuple[str, ...]
"""Stops of the loops that fill an array, one per dimension; empty if one statement fills it."""


def private_arrays(
    statements: Sequence[ast.stmt], written: frozenset[str], scope: Scope
) -> dict[str, Stops]:
    """The private arrays; no dimension may be longer than the loop that fills it."""
    found: dict[str, Stops] = {}
    for name in sorted(written):
        names = [other for other, info in scope.arrays.items() if info.owner == name]
        if names != [name] or not _only_subscripted(statements, name):
            continue
        first = next(node for node in statements if mentions(node, name))
        stops = _filled(first, name, stored_names(statements))
        if stops is not None and len(stops) in (0, scope.arrays[name].rank):
            found[name] = stops
    return found


def _only_subscripted(statements: Sequence[ast.stmt], name: str) -> bool:
    """True if every mention is ``name[...]`` of a number, ``name[:] =``, ``len`` or ``fill``."""
    every = [node for statement in statements for node in ast.walk(statement)]
    allowed: set[int] = set()
    for node in every:
        match node:
            case ast.Subscript(ast.Name() as root, place):
                if not any(isinstance(part, ast.Slice) for part in ast.walk(place)):
                    allowed.add(id(root))
            case (
                ast.Assign([ast.Subscript(ast.Name() as root)])
                | ast.Attribute(ast.Name() as root, "fill" | "shape")
                | ast.Call(ast.Name("len"), [ast.Name() as root])
            ):
                allowed.add(id(root))
            case _:
                pass
    return all(
        id(node) in allowed for node in every if isinstance(node, ast.Name) and node.id == name
    )


def _filled(
    node: ast.stmt, name: str, stored: frozenset[str], variables: tuple[str, ...] = ()
) -> Stops | None:
    """Stops of the nested loops ``for k in range(E)`` that assign ``name[k]``; None if none do."""
    match node:
        case ast.Assign([ast.Subscript(ast.Name(base), place)], value) if not variables:
            slices = place.elts if isinstance(place, ast.Tuple) else [place]
            is_whole = all(ast.unparse(each) == ":" for each in slices)
            # An array that is filled from its own values passes them from one iteration to the
            # next.
            return () if base == name and is_whole and not mentions(value, name) else None
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(base), "fill"), [value], [])):
            return () if base == name and not mentions(value, name) else None
        case ast.For(ast.Name(variable), ast.Call(ast.Name("range"), [stop], []) as head, body, []):
            if loaded_names([head]) & stored or variable in stored_names(body):
                return None
            variables = (*variables, variable)
            inner: Stops | None = ()
            if len(body) == 1 and isinstance(body[0], ast.For):
                inner = _filled(body[0], name, stored, variables)
            elif not _assigns_first(body, name, f"{name}[{', '.join(variables)}]"):
                return None
            return None if inner is None else (ast.unparse(stop), *inner)
    return None


def _assigns_first(body: Sequence[ast.stmt], name: str, cell: str) -> bool:
    """True if each iteration of a loop assigns ``cell`` and accesses no other cell of its array."""
    place = next((k for k, node in enumerate(body) if mentions(node, name)), len(body))
    match body[place : place + 1]:
        case [ast.Assign([ast.Subscript() as target], value)]:
            if ast.unparse(target) != cell or mentions(value, name):
                return False
        case _:
            return False
    skipping = [part for node in body[:place] for part in ast.walk(node)]
    every = [part for node in body for part in ast.walk(node)]
    return (
        not any(isinstance(part, ast.Continue) for part in skipping)
        and not any(isinstance(part, ast.Break) for part in every)
        and all(
            ast.unparse(part) == cell
            for part in every
            if isinstance(part, ast.Subscript) and mentions(part.value, name)
        )
    )


MAX_DEPTH = 2
"""Maximum number of loops that form the grid of tiles; deeper loops run inside an iteration."""


@dataclass(frozen=True)
class Reading:
    """Analysis of a nest when its first ``depth`` loops are the iteration space."""

    levels: tuple[LoopLevel, ...]
    body: Body
    ranges: tuple[Range, ...]
    vectors: tuple[Vector, ...]
    reductions: tuple[Reduction, ...]
    private: dict[str, Stops]
    segments: frozenset[Segments] = frozenset()

    @property
    def statements(self) -> list[ast.stmt]:
        """Statements of one iteration: those between the loops, then the innermost body."""
        return [statement for part in parts_of(self.levels) for statement in part]

    @property
    def line(self) -> int:
        """First line of the nest."""
        return self.levels[0].node.lineno

    @property
    def depth(self) -> int:
        """Number of loops in the iteration space."""
        return len(self.levels)

    @property
    def dims(self) -> tuple[Atom, ...]:
        """The loop variables."""
        return tuple(Atom("dim", level.name) for level in self.levels)

    @property
    def atoms(self) -> tuple[Atom, ...]:
        """All dimensions, real and virtual."""
        keys = {atom for vector in self.vectors for atom in vector.distance if atom.kind == "key"}
        return (*self.dims, *sorted(keys))


@dataclass(frozen=True)
class Nest:
    """A nest of loops: its levels, outermost first, and the names read after it."""

    node: ast.For | ast.While
    live_after: frozenset[str]
    levels: tuple[LoopLevel, ...] = field(default=())
    """Loops of the nest; empty for a ``while`` loop, whose iterations are unknown."""

    @staticmethod
    def of(node: ast.For | ast.While, live_after: frozenset[str]) -> Nest:
        """Find the nested loops with nothing but assignments of plain names between them."""
        if isinstance(node, ast.While):
            return Nest(node, live_after)
        levels = [LoopLevel(node)]
        while len(levels) < MAX_DEPTH:
            *before, last = levels[-1].node.body
            match last:
                case ast.For(ast.Name(), _, _, []):
                    pass
                case _:
                    break
            # A kernel repeats these statements in every tile and iteration, so they may only bind
            # names.
            assigned = all(
                isinstance(item, ast.Assign) and all(map(_is_names, item.targets))
                for item in before
            )
            inside = stored_names([last])
            # A loop variable that is assigned again is no dimension.
            again = {level.name for level in levels} & (inside | stored_names(before))
            if not assigned or again or stored_names(before) & inside:
                break
            levels[-1] = LoopLevel(levels[-1].node, tuple(before))
            levels.append(LoopLevel(last))
        return Nest(node, live_after, tuple(levels))

    def read(self, depth: int, scope: Scope) -> Reading:
        """Analyse the nest at a depth; raises `Refusal`."""
        levels = (*self.levels[: depth - 1], LoopLevel(self.levels[depth - 1].node))
        statements = [statement for part in parts_of(levels) for statement in part]
        # ``a += e`` on an array changes it in place and binds no new object, so the name is not
        # carried.
        in_place = _updated_in_place(statements, scope)
        variables = {level.name for level in levels}
        stored = stored_names(statements) - in_place
        carried = (exposed_names(statements) & stored) - variables
        carried |= self._flags(statements, scope) - in_place
        found = [find_reduction(name, statements, scope.names) for name in sorted(carried)]
        for level in levels[1:]:
            for name in sorted(loaded_names([level.node.iter]) & carried):
                line = level.node.lineno
                raise Refusal(f"{name} is carried and bounds the loop at line {line}", line)
        for name in sorted(((stored | variables) & self.live_after) - carried):
            raise Refusal(
                f"{name} is used after the loop at line {self.node.lineno}, which leaves in it the "
                "value of its last iteration",
                self.node.lineno,
            )
        body, ranges, heads, kinds = read_nest(levels, scope, carried)
        reductions = tuple(replace(each, kind=kinds[each.name]) for each in found)
        for reduction in reductions:
            refuse_order(reduction)
        _refuse_changed_heads(heads, body)
        vectors, segments = dependence_vectors(body, ranges)
        private = private_arrays(statements, body.written, scope)
        return Reading(levels, body, ranges, vectors, reductions, private, segments)

    def _flags(self, statements: Sequence[ast.stmt], scope: Scope) -> frozenset[str]:
        """Flags: names read after the loop that the loop only sets, always to True or always to
        False.
        """
        found = set()
        for name in (stored_names(statements) & self.live_after) - loaded_names(statements):
            with contextlib.suppress(Refusal):
                found.add(find_reduction(name, statements, scope.names).name)
        return frozenset(found)


def _updated_in_place(statements: Sequence[ast.stmt], scope: Scope) -> frozenset[str]:
    """Arrays whose cells ``a += e`` changes in place, instead of binding the name again."""
    every = [node for statement in statements for node in ast.walk(statement)]
    updates = [node.target for node in every if isinstance(node, ast.AugAssign)]
    bound = {
        node.id
        for node in every
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in updates
    }
    updated = {target.id for target in updates if isinstance(target, ast.Name)}
    return frozenset((updated - bound) & scope.arrays.keys())


def _is_names(target: ast.expr) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(part, ast.Name) for part in parts)


def _refuse_changed_heads(heads: Sequence[Access], body: Body) -> None:
    """Refuse statements between the loops that access an array which the nest writes.

    A kernel runs these statements once per inner iteration, so their values must not change.
    """
    for access in heads:
        for other in body.accesses:
            if other.writes and other.array == access.array:
                raise Refusal(
                    f"{access.label} between the loops meets {other.label}",
                    access.line,
                    other.line,
                )
