"""The verdict on one loop: all legal parallel schedules, or the reasons why there are none.

The legal shapes are listed for each depth of the nest, and for each set of arrays that may have a
replica per worker: scratch arrays, sums, arrays that the user permits to be buffered. Choosing
among the shapes needs data and happens when the loop is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hocket.loops.dependence import Vector
from hocket.loops.form import Refusal
from hocket.loops.legal import Shape, legal_shapes
from hocket.loops.nest import Nest, Reading
from hocket.loops.scope import Scope

_Names = frozenset[str]


@dataclass(frozen=True)
class LoopOption:
    """One legal schedule of a nest."""

    reading: Reading
    shape: Shape
    private: _Names = frozenset()
    """Scratch arrays with a replica per worker; the replica of the last iteration is kept."""
    summed: _Names = frozenset()
    """Arrays with a replica per worker, which are summed at the end."""
    buffered: _Names = frozenset()
    """Arrays whose changes are exchanged only between steps, by the user's permission."""

    @property
    def is_exact(self) -> bool:
        """True if the result equals that of the loop as written bit for bit."""
        floats = any(
            access.kind != "int"
            for access in self.reading.body.accesses
            if access.array in self.summed
        )
        sums_are_exact = all(reduction.is_exact for reduction in self.reading.reductions)
        return self.shape.keeps_order and sums_are_exact and not floats and not self.buffered


@dataclass(frozen=True)
class LoopVerdict:
    """All legal options of a loop, and the reasons why others are not."""

    options: tuple[LoopOption, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    readings: tuple[Reading, ...] = ()
    to_permit: tuple[str, ...] = ()
    """Arrays for which a permission of late updates would each allow a parallel schedule.

    Empty if the loop already has a parallel schedule.
    """


def judge(
    nest: Nest, scope: Scope, *, ordered: bool = False, permit: Iterable[str] = ()
) -> LoopVerdict:
    """Analyse a nest at every depth."""
    options: list[LoopOption] = []
    refusals: list[Refusal] = []
    readings: list[Reading] = []
    buffered = frozenset(scope.arrays[name].owner for name in permit if name in scope.arrays)
    for depth in range(1, len(nest.levels) + 1):
        try:
            reading = nest.read(depth, scope)
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        readings.append(reading)
        found = list(_options(reading, scope, ordered, buffered))
        options += found
        if not found:
            refusals.append(_conflict(reading))
    to_permit = []
    if not options and not ordered:
        meeting = {vector.first.array for reading in readings for vector in reading.vectors}
        for name in sorted(meeting - buffered):
            found = [
                each for r in readings for each in _options(r, scope, False, buffered | {name})
            ]
            if any(option.buffered for option in found):
                to_permit.append(name)
    return LoopVerdict(tuple(options), tuple(refusals), tuple(readings), tuple(to_permit))


def _options(
    reading: Reading, scope: Scope, ordered: bool, permitted: _Names
) -> Iterator[LoopOption]:
    signs = step_signs(reading)
    if signs is None or (ordered and not all(each.is_exact for each in reading.reductions)):
        return
    private = frozenset(reading.private)
    sums = _summable(reading, scope, ordered) - private - permitted
    blocked = {vector.first.array for vector in reading.vectors}
    seen: set[Shape] = set()
    for summed, buffered in _relaxations(sums, permitted):
        # A replica of an array without conflicts would only cost copies.
        if not buffered | summed <= blocked:
            continue
        # Buffered arrays are updated out of order in any case; all other arrays must keep their
        # order.
        vectors = _kept(reading, private | summed | buffered)
        for shape in legal_shapes(vectors, reading.dims, signs, ordered=ordered):
            if shape not in seen:
                seen.add(shape)
                yield LoopOption(reading, shape, private & blocked, summed, buffered)


def _relaxations(sums: _Names, permitted: _Names) -> Iterator[tuple[_Names, _Names]]:
    """Sets of summed and buffered arrays to try, the fewest first."""
    none: _Names = frozenset()
    yield none, none
    for name in sorted(sums):
        yield frozenset({name}), none
    if len(sums) > 1:
        yield sums, none
    if permitted:
        yield none, permitted
        if sums:
            yield sums, permitted


def _kept(reading: Reading, arrays: _Names) -> tuple[Vector, ...]:
    """The vectors that remain if some arrays have a replica per worker."""
    return tuple(vector for vector in reading.vectors if vector.first.array not in arrays)


def step_signs(reading: Reading) -> tuple[int, ...] | None:
    """+1 or -1 per loop; None if a step is not a known constant."""
    steps = [step.linear for _, _, step in reading.ranges]
    known = [step.const for step in steps if step is not None and step.is_const and step.const]
    return tuple(1 if step > 0 else -1 for step in known) if len(known) == len(steps) else None


def _summable(reading: Reading, scope: Scope, ordered: bool) -> _Names:
    """Arrays to which the loop only adds: each worker has a replica, summed in a fixed order."""
    found = set()
    for array in {access.array for access in reading.body.accesses}:
        accesses = [access for access in reading.body.accesses if access.array == array]
        only_adds = all(a.mode == "update" and a.op in ("Add", "Sub") for a in accesses)
        adds_integers = all(access.kind in ("int", "bool") for access in accesses)
        holds_integers = scope.arrays[array].kind == "int"
        if only_adds and (adds_integers if holds_integers else not ordered):
            found.add(array)
    return frozenset(found)


def _conflict(reading: Reading) -> Refusal:
    """Describe the two accesses that prevent a schedule."""
    vectors = _kept(reading, frozenset(reading.private))
    if not vectors:
        names = ", ".join(r.name for r in reading.reductions)
        lines = [r.line for r in reading.reductions]
        return Refusal(f"the sum {names} in floating point depends on the order", *lines)
    # The vector with the fewest dimensions fixed at 0 is the hardest to order, so it is reported.
    worst = min(vectors, key=lambda vector: sum(1 for d in vector.distance.values() if d == 0))
    first, second = worst.first, worst.second
    return Refusal(
        f"{first.label} and {second.label} may be one cell in different iterations, "
        f"vector {worst.text(reading.atoms)}",
        first.line,
        second.line,
    )
