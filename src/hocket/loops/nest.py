"""Analyse a loop nest at one depth: dimensions, carried names, and dependence vectors."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.loops.body import LoopLevel, Range, read_nest
from hocket.loops.dependence import Segments, Vector, dependence_vectors
from hocket.loops.flow import exposed_names, loaded_names, mentions, stored_names
from hocket.loops.form import Access, Atom, Body, Refusal
from hocket.loops.reductions import Reduction, find_reduction, refuse_order
from hocket.loops.scope import Scope

# Scratch arrays: overwritten by every iteration before it reads them, so each worker has its own.
#
# An array is private if the first statement of the iteration that mentions it fills it: ``p[:] =
# e``, ``p.fill(e)`` or ``for k in range(E): p[k] = e``, one loop in another for each dimension,
# where E covers the array (checked when called). It must appear under its own name only, never as a
# whole, so that no alias can see it.


@dataclass(frozen=True)
class Covers:
    """Condition: no dimension of the array is longer than the loop that fills it."""

    array: str
    stops: tuple[str, ...]


def private_arrays(
    statements: Sequence[ast.stmt], written: frozenset[str], scope: Scope
) -> dict[str, Covers | None]:
    """Return the private arrays, each with the condition that must hold."""
    found: dict[str, Covers | None] = {}
    for name in sorted(written):
        names = [other for other, info in scope.arrays.items() if info.owner == name]
        if names != [name] or not _only_subscripted(statements, name):
            continue
        first = next(node for node in statements if mentions(node, name))
        if _fills_at_once(first, name):
            found[name] = None
        else:
            stops = _fills_in_loops(first, name, stored_names(statements))
            if stops is not None and len(stops) == scope.info(name).rank:
                found[name] = Covers(name, stops)
    return found


def _only_subscripted(statements: Sequence[ast.stmt], name: str) -> bool:
    """True if every mention is ``name[...]`` of a number, ``name[:] =``, ``len`` or ``fill``."""
    allowed: set[int] = set()
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.Subscript(ast.Name(base) as root, place) if base == name:
                    if not any(isinstance(part, ast.Slice) for part in ast.walk(place)):
                        allowed.add(id(root))
                case ast.Assign([ast.Subscript(ast.Name(base) as root)], _) if base == name:
                    allowed.add(id(root))
                case ast.Attribute(ast.Name(base) as root, "fill" | "shape") if base == name:
                    allowed.add(id(root))
                case ast.Call(ast.Name("len"), [ast.Name(base) as root]) if base == name:
                    allowed.add(id(root))
                case _:
                    pass
    return all(
        id(node) in allowed
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == name
    )


def _fills_at_once(node: ast.stmt, name: str) -> bool:
    match node:
        case ast.Assign([ast.Subscript(ast.Name(base), place)], value):
            slices = place.elts if isinstance(place, ast.Tuple) else [place]
            is_whole = all(ast.unparse(each) == ":" for each in slices)
            return base == name and is_whole and not mentions(value, name)
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(base), "fill"), [value], [])):
            return base == name and not mentions(value, name)
        case _:
            return False


def _fills_in_loops(
    node: ast.stmt, name: str, stored: frozenset[str], variables: tuple[str, ...] = ()
) -> tuple[str, ...] | None:
    """Stops of the nested loops ``for k in range(E)`` that first assign ``name[k]``."""
    match node:
        case ast.For(ast.Name(variable), ast.Call(ast.Name("range"), [stop], []) as head, body, []):
            if loaded_names([head]) & stored or variable in stored_names(body):
                return None
            variables = (*variables, variable)
            if len(body) == 1 and isinstance(body[0], ast.For):
                inside = _fills_in_loops(body[0], name, stored, variables)
                return None if inside is None else (ast.unparse(stop), *inside)
            for statement in body:
                if mentions(statement, name):
                    is_filled = _assigns(statement, name, variables, body)
                    return (ast.unparse(stop),) if is_filled else None
                if any(isinstance(n, (ast.Break, ast.Continue)) for n in ast.walk(statement)):
                    return None
        case _:
            pass
    return None


def _assigns(
    node: ast.stmt, name: str, variables: tuple[str, ...], body: Sequence[ast.stmt]
) -> bool:
    here = f"{name}[{', '.join(variables)}]"
    match node:
        case ast.Assign([ast.Subscript() as target], value):
            if ast.unparse(target) != here or mentions(value, name):
                return False
        case _:
            return False
    # Later reads in the same round may only be of what this round has assigned.
    return not any(isinstance(part, ast.Break) for item in body for part in ast.walk(item)) and all(
        ast.unparse(part) == here
        for statement in body
        for part in ast.walk(statement)
        if isinstance(part, ast.Subscript) and mentions(part.value, name)
    )


MAX_DEPTH = 2
"""Loops that span the grid of tiles; deeper ones run inside an iteration."""


@dataclass(frozen=True)
class Reading:
    """Analysis of a nest when its first ``depth`` loops are the iteration space."""

    levels: tuple[LoopLevel, ...]
    statements: tuple[ast.stmt, ...]
    """Statements of one iteration: those between the loops, then the innermost body."""
    body: Body
    ranges: tuple[Range, ...]
    vectors: tuple[Vector, ...]
    reductions: tuple[Reduction, ...]
    reduction_kinds: dict[str, str]
    private: dict[str, Covers | None]
    segments: frozenset[Segments] = frozenset()
    nonempty: tuple[str, ...] = ()
    """Ranges that must not be empty: a name is assigned in such a loop and read after it."""

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
            current = levels[-1].node
            *before, last = current.body
            if (
                not isinstance(last, ast.For)
                or last.orelse
                or not isinstance(last.target, ast.Name)
            ):
                break
            assigned = all(
                isinstance(item, ast.Assign) and all(_is_names(t) for t in item.targets)
                for item in before
            )
            if not assigned or stored_names(before) & stored_names([last]):
                break
            if {level.name for level in levels} & stored_names([*before, last]):
                break  # the variable of a loop that is assigned again is no dimension
            levels[-1] = LoopLevel(current, before)
            levels.append(LoopLevel(last))
        return Nest(node, live_after, tuple(levels))

    def read(self, depth: int, scope: Scope, *, use_segments: bool = True) -> Reading:
        """Analyse the nest at a depth; raises `Refusal`."""
        levels = self.levels[:depth]
        innermost = levels[-1].node.body
        between = [item for level in levels[:-1] for item in level.prelude]
        statements = [*between, *innermost]
        used = (*levels[:-1], LoopLevel(levels[-1].node))
        in_place = _updated_in_place(statements, scope)
        carried, nonempty = self._carried(statements, levels, in_place)
        carried |= self._flags(statements, scope) - in_place
        reductions = tuple(
            find_reduction(name, statements, scope.names) for name in sorted(carried)
        )
        self._refuse_heads(carried, levels)
        self._refuse_last_values(statements, levels, carried | in_place)
        body, ranges, heads, kinds = read_nest(used, innermost, scope, carried)
        for reduction in reductions:
            refuse_order(reduction, kinds[reduction.name])
        _refuse_changed_heads(heads, body)
        vectors, segments = dependence_vectors(body, ranges, use_segments=use_segments)
        return Reading(
            used, tuple(statements), body, ranges, vectors, reductions, kinds,
            private_arrays(statements, body.written, scope), segments, nonempty,
        )  # fmt: skip

    def _carried(
        self, statements: Sequence[ast.stmt], levels: Sequence[LoopLevel], in_place: frozenset[str]
    ) -> tuple[frozenset[str], tuple[str, ...]]:
        """Names that an iteration may read before it assigns them."""
        stored = stored_names(statements) - in_place
        dims = {level.name for level in levels}
        careful = (exposed_names(statements) & stored) - dims
        if not careful:
            return careful, ()
        used: list[str] = []

        def surely_runs(loop: ast.For) -> bool:
            elements = [
                node
                for node in ast.walk(loop.iter)
                if isinstance(node, ast.Subscript)
                and not (isinstance(node.value, ast.Attribute) and node.value.attr == "shape")
            ]
            if elements or loaded_names([loop.iter]) & (stored | dims):
                return False
            used.append(ast.unparse(loop.iter))
            return True

        hopeful = (exposed_names(statements, surely_runs) & stored) - dims
        return (careful, ()) if hopeful == careful else (hopeful, tuple(dict.fromkeys(used)))

    def _flags(self, statements: Sequence[ast.stmt], scope: Scope) -> frozenset[str]:
        """Names read after the loop that it never reads and only sets to True, or only to False."""
        found = set()
        for name in (stored_names(statements) & self.live_after) - loaded_names(statements):
            with contextlib.suppress(Refusal):
                found.add(find_reduction(name, statements, scope.names).name)
        return frozenset(found)

    def _refuse_heads(self, carried: frozenset[str], levels: Sequence[LoopLevel]) -> None:
        for level in levels[1:]:
            used = loaded_names([level.node.iter]) & carried
            if used:
                name, line = min(used), level.node.lineno
                raise Refusal(f"{name} is carried and bounds the loop at line {line}", line)

    def _refuse_last_values(
        self, statements: Sequence[ast.stmt], levels: Sequence[LoopLevel], carried: frozenset[str]
    ) -> None:
        names = stored_names([*statements, *(level.node.target for level in levels)])
        for name in sorted((names & self.live_after) - carried):
            line = self.node.lineno
            raise Refusal(
                f"{name} is used after the loop at line {line}, which leaves in it the value of "
                "its last iteration",
                line,
            )


def _updated_in_place(statements: Sequence[ast.stmt], scope: Scope) -> frozenset[str]:
    """Arrays whose cells ``a += e`` changes in place, instead of binding the name again."""
    updates, others = set(), set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                updates.add(node.target.id)
            elif not isinstance(node, ast.AugAssign):
                others |= {
                    child.id
                    for child in ast.iter_child_nodes(node)
                    if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
                }
    return frozenset((updates - others) & scope.arrays.keys())


def _is_names(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(_is_names(element) for element in target.elts)
    return isinstance(target, ast.Name)


def _refuse_changed_heads(heads: Sequence[Access], body: Body) -> None:
    """Refuse statements between the loops that access an array which the nest writes.

    A kernel runs these statements once per inner iteration, so their values must not change.
    """
    for access in heads:
        if access.array in body.written:
            other = next(a for a in body.accesses if a.writes and a.array == access.array)
            raise Refusal(
                f"{access.label} between the loops meets {other.label}", access.line, other.line
            )
