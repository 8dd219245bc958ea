"""Compute dependence vectors: which iterations may access the same cell.

After Banerjee and Wolfe, with the virtual dimensions of Orion (Wei et al., EuroSys 2019): for each
pair of accesses of one array, at least one of them a write, every subscript position gives an
equation between the two iterations. Equal linear forms fix the distance along a dimension, real or
virtual; different constants or disjoint ranges prove that there is no conflict; in any other case
the distance is unknown. O(accesses² × rank).
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hocket.loops.body import Range
from hocket.loops.flow import loaded_names
from hocket.loops.form import Access, Atom, Body, Inner, Linear


@dataclass(frozen=True)
class Segments:
    """Condition that the cells ``[start, stop)`` of different values of ``dim`` do not overlap."""

    dim: str
    start: str
    stop: str


@dataclass(frozen=True)
class Vector:
    """Iterations whose dimensions differ by ``distance`` may access the same cell.

    ``distance[x]`` is x at the iteration of ``second`` minus x at the iteration of ``first``. A
    dimension without an entry may differ by any amount.
    """

    first: Access
    second: Access
    distance: Mapping[Atom, int]

    def text(self, dims: Sequence[Atom]) -> str:
        """Format the distances, such as ``(0, *)``; * means unknown."""
        found = [self.distance.get(dim) for dim in dims]
        return f"({', '.join('*' if d is None else f'{d:+d}' if d else '0' for d in found)})"


def dependence_vectors(
    body: Body, ranges: Sequence[Range]
) -> tuple[tuple[Vector, ...], frozenset[Segments]]:
    """Vectors between different iterations, and the conditions on which they rely.

    Vectors within one iteration (0 along every loop) are omitted, because its statements run in
    order.
    """
    dims = [Atom("dim", name) for name in body.dims]
    bounds = _Bounds(dict(zip(body.dims, ranges, strict=True)), body.dims, body.inner)
    vectors: dict[tuple[str, tuple[tuple[Atom, int], ...]], Vector] = {}
    needs: set[Segments] = set()
    for first, second in itertools.combinations_with_replacement(body.accesses, 2):
        if first.array != second.array or not (first.writes or second.writes):
            continue
        distance = _between(first, second, bounds)
        if distance is None or bounds.skips(distance):
            continue
        distance |= _mirrored(first, second, bounds)
        if any(distance.get(dim) != 0 for dim in dims):
            segments = _segments(first, second, body.dims)
            needs |= segments
            distance |= {Atom("dim", each.dim): 0 for each in segments}
        if any(distance.get(dim) != 0 for dim in dims):
            key = (first.array, tuple(sorted(distance.items())))
            vectors.setdefault(key, Vector(first, second, distance))
    return tuple(vectors.values()), frozenset(needs)


def _between(first: Access, second: Access, bounds: _Bounds) -> dict[Atom, int] | None:
    """Distances at which two accesses may touch the same cell; None if they never do."""
    distance: dict[Atom, int] = {}
    for one, other in zip(first.subs, second.subs, strict=True):
        found = _equation(one.index, other.index, bounds)
        if found is None or any(distance.setdefault(*item) != item[1] for item in found.items()):
            return None
    return distance


def _mirrored(first: Access, second: Access, bounds: _Bounds) -> dict[Atom, int]:
    """Distances between symmetric accesses ``a[i, j]`` and ``a[j, i]`` if j is never below i.

    Iterations 1 and 2 touch the same cell only if i1 = j2 and j1 = i2. With j1 >= i1 and j2 >= i2,
    all four are then equal. The same holds if j is never above i.
    """
    atoms = [
        tuple(sub.index.variable if sub.index else None for sub in pair)
        for pair in zip(first.subs, second.subs, strict=True)
    ]
    found: dict[Atom, int] = {}
    for (dim, mine), (other, same) in itertools.permutations(atoms, 2):
        if dim is None or dim.kind != "dim" or dim != same or not mine or not other:
            continue
        side = bounds.side(other, dim)
        if side and mine != dim and bounds.side(mine, dim) == side:
            found[dim] = 0
            if mine == other and mine.kind == "dim":
                found[mine] = 0
    return found


def _segments(first: Access, second: Access, dims: Sequence[str]) -> frozenset[Segments]:
    """Conditions for positions at which both accesses touch the same run of cells."""
    found = set()
    for one, other in zip(first.subs, second.subs, strict=True):
        if one.segment is not None and one.segment == other.segment:
            start, stop = one.segment
            names = loaded_names([ast.parse(f"({start}, {stop})")]) & set(dims)
            found |= {Segments(name, start, stop) for name in names if len(names) == 1}
    return frozenset(found)


def _equation(left: Linear | None, right: Linear | None, bounds: _Bounds) -> dict[Atom, int] | None:
    """Dimension and distance that ``left`` = ``right`` implies, if any; None if never equal."""
    # An inner variable takes many values in one iteration, so nothing follows for the outer loops.
    if left is None or right is None or left.has("inner") or right.has("inner"):
        return {}
    shift = left.invariant - right.invariant
    if left.varying != right.varying or not shift.is_const:
        return None if bounds.apart(left, right) else {}
    if not left.varying:
        return None if shift.const else {}
    if len(left.varying) > 1:
        # Several terms together are one virtual dimension, such as a diagonal i + j.
        return {Atom("key", Linear(left.varying).text()): shift.const}
    ((atom, factor),) = left.varying
    # Without remainder the equation has one solution; with a remainder no integer solves it.
    return None if shift.const % factor else {atom: shift.const // factor}


def _remainder_rates(text: str, dims: Sequence[str], step: int) -> dict[str, int] | None:
    """Factors of the loop variables in ``(…) % modulus``; None if they are unknown.

    They are known if ``step`` divides the modulus: up to multiples of such a step, a remainder
    changes by as much as its dividend.
    """
    match ast.parse(text, mode="eval").body:
        case ast.BinOp(dividend, ast.Mod(), ast.Constant(int() as modulus)):
            return None if modulus % step else _rates(dividend, dims)
        case ast.BinOp(dividend, ast.BitAnd(), ast.Constant(1)):
            return None if 2 % step else _rates(dividend, dims)
    return None


def _rates(node: ast.expr, dims: Sequence[str]) -> dict[str, int] | None:
    """Factors of the loop variables in a sum; None if they occur in any other expression."""
    match node:
        case ast.Name(name) if name in dims:
            return {name: 1}
        case ast.BinOp(left, (ast.Add() | ast.Sub()) as op, right):
            one, other = _rates(left, dims), _rates(right, dims)
            if one is None or other is None:
                return None
            sign = 1 if isinstance(op, ast.Add) else -1
            return {name: one.get(name, 0) + sign * other.get(name, 0) for name in one | other}
    return None if loaded_names([node]) & set(dims) else {}


@dataclass(frozen=True)
class _Bounds:
    """The ranges of the loop variables, as linear forms."""

    ranges: Mapping[str, Range]
    dims: Sequence[str]
    inner: Mapping[str, Inner]

    def side(self, atom: Atom, dim: Atom) -> int:
        """1 if variable ``atom`` is never below loop variable ``dim``, -1 if never above, else 0.

        Both variables are compared within one iteration.
        """
        if atom.kind == "inner":
            low, end = self.inner[atom.name].first, self.inner[atom.name].end
        else:
            low, end, step = (part.linear for part in self.ranges[atom.name])
            low = low if step == Linear(const=1) else None
        if low is None or end is None:
            return 0
        above, below = low - Linear.of(dim), end - Linear.of(dim)
        if above.is_const and above.const >= 0:
            return 1
        return -1 if below.is_const and below.const <= 1 else 0

    def skips(self, distance: Mapping[Atom, int]) -> bool:
        """True if no two iterations of a strided loop differ by this distance.

        The start of the loop may depend on outer loops. In a red-black sweep, for example, which
        starts at ``1 + (i + c) % 2`` with step 2, a cell and its neighbours are never in the same
        sweep.
        """
        for name in self.dims:
            start, _, step = (part.linear for part in self.ranges[name])
            apart = distance.get(Atom("dim", name))
            if apart is None or start is None or step is None or not (step.is_const and step.const):
                continue
            moved = self.start_moves(start, distance, step.const)
            if moved is not None and (apart - moved) % step.const:
                return True
        return False

    def start_moves(self, start: Linear, distance: Mapping[Atom, int], step: int) -> int | None:
        """Difference of a loop's start between two iterations, modulo the loop's step; None if
        unknown.
        """
        total = 0
        for atom, factor in start.varying:
            rates: Mapping[str, int] | None = {atom.name: 1}
            if atom.kind == "key":
                rates = _remainder_rates(atom.name, self.dims, step)
            if rates is None or any(Atom("dim", name) not in distance for name in rates):
                return None
            total += factor * sum(rate * distance[Atom("dim", n)] for n, rate in rates.items())
        return total

    def apart(self, left: Linear, right: Linear) -> bool:
        """True if the two forms are never equal in any two iterations."""
        for one, other in ((left, right), (right, left)):
            low, high = self.extreme(one, -1), self.extreme(other, +1)
            gap = low - high if low is not None and high is not None else Linear()
            if gap.is_const and gap.const > 0:
                return True
        return False

    def extreme(self, form: Linear, side: int) -> Linear | None:
        """Least (-1) or greatest (+1) value of a form, as a form of invariants; None if unknown."""
        # The range of an inner loop may depend on outer variables, so inner variables are
        # eliminated first.
        for name in reversed(self.dims):
            factor = dict(form.terms).get(Atom("dim", name), 0)
            if not factor:
                continue
            end = self.end_of(name, side if factor > 0 else -side)
            if end is None:
                return None
            form = form + (end - Linear.of(Atom("dim", name))).scaled(factor)
        return None if form.varying else form

    def end_of(self, name: str, side: int) -> Linear | None:
        start, stop, step = (part.linear for part in self.ranges[name])
        if start is None or stop is None or step is None or not step.is_const or not step.const:
            return None
        if step.const > 0:
            return start if side < 0 else stop - Linear(const=1)
        return stop + Linear(const=1) if side < 0 else start
