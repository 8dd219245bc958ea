"""The verdict on one loop: all legal parallel schedules, or the reasons why there is none.

For each depth of the nest, and for each set of arrays that may have a replica per worker (scratch
arrays, sums, arrays that the user permits to be buffered), the legal shapes are listed. Choosing
among them needs data and happens when the loop is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hocket.loops.dependence import Vector
from hocket.loops.form import Access, Refusal
from hocket.loops.legal import Shape, legal_shapes
from hocket.loops.nest import Nest, Reading
from hocket.loops.reductions import EXACT
from hocket.loops.scope import Scope


@dataclass(frozen=True)
class LoopOption:
    """One legal schedule of a nest."""

    reading: Reading
    shape: Shape
    private: frozenset[str] = frozenset()
    """Scratch arrays: each worker has a replica, and that of the last iteration is kept."""
    summed: frozenset[str] = frozenset()
    """Arrays of which each worker has a replica, summed at the end."""
    buffered: frozenset[str] = frozenset()
    """Arrays whose changes are exchanged only between steps, by the user's permission."""

    @property
    def is_exact(self) -> bool:
        """True if the result equals that of the loop as written bit for bit."""
        floats = [name for name in self.summed if self.reading_kind(name) != "int"]
        sums = [r for r in self.reading.reductions if not _is_exact_sum(r.op, self.reading, r.name)]
        return self.shape.keeps_order and not floats and not sums and not self.buffered

    def reading_kind(self, array: str) -> str:
        """Kind of the numbers that updates add to an array."""
        kinds = {a.kind for a in self.reading.body.accesses if a.array == array and a.writes}
        return kinds.pop() if len(kinds) == 1 else "unknown"


@dataclass(frozen=True)
class LoopVerdict:
    """All legal options of a loop, and the reasons why others are not."""

    options: tuple[LoopOption, ...]
    refusals: tuple[Refusal, ...]
    readings: tuple[Reading, ...]
    to_permit: tuple[str, ...] = ()
    """Arrays whose late updates, if permitted, would each allow a parallel schedule.

    Empty if the loop has one already.
    """


def judge(
    nest: Nest,
    scope: Scope,
    *,
    ordered: bool = False,
    permit: Iterable[str] = (),
    use_segments: bool = True,
) -> LoopVerdict:
    """Analyse a nest at every depth."""
    options: list[LoopOption] = []
    refusals: list[Refusal] = []
    readings: list[Reading] = []
    buffered = frozenset(scope.arrays[name].owner for name in permit if name in scope.arrays)
    for depth in range(1, len(nest.levels) + 1):
        try:
            reading = nest.read(depth, scope, use_segments=use_segments)
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        readings.append(reading)
        found = list(_options(reading, scope, ordered, buffered))
        options += found
        if not found:
            refusals.append(_conflict(reading, ordered))
    to_permit = () if options or ordered else _to_permit(readings, scope, buffered)
    return LoopVerdict(tuple(options), tuple(refusals), tuple(readings), to_permit)


def _to_permit(
    readings: Sequence[Reading], scope: Scope, buffered: frozenset[str]
) -> tuple[str, ...]:
    meeting = {vector.first.array for reading in readings for vector in reading.vectors}
    return tuple(
        name
        for name in sorted(meeting - buffered)
        if any(
            option.buffered
            for reading in readings
            for option in _options(reading, scope, ordered=False, permitted=buffered | {name})
        )
    )


def _options(
    reading: Reading, scope: Scope, ordered: bool, permitted: frozenset[str]
) -> Iterator[LoopOption]:
    signs = step_signs(reading)
    if signs is None:
        return
    if ordered and not all(_is_exact_sum(r.op, reading, r.name) for r in reading.reductions):
        return
    private = frozenset(reading.private)
    sums = _summable(reading, scope, ordered) - private - permitted
    seen: set[Shape] = set()
    for summed, buffered in _relaxations(sums, permitted):
        vectors = _kept(reading.vectors, private | summed | buffered)
        blocked = {vector.first.array for vector in reading.vectors}
        if not buffered <= blocked or (summed and not summed <= blocked):
            continue
        # What is buffered is out of order anyway; the rest must still keep it.
        for shape in legal_shapes(vectors, reading.dims, signs, ordered=ordered):
            if shape in seen:
                continue
            seen.add(shape)
            yield LoopOption(reading, shape, private & blocked, summed, buffered)


def _relaxations(
    sums: frozenset[str], permitted: frozenset[str]
) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    none: frozenset[str] = frozenset()
    yield none, none
    for name in sorted(sums):
        yield frozenset({name}), none
    if len(sums) > 1:
        yield sums, none
    if permitted:
        yield none, permitted
        if sums:
            yield sums, permitted


def _kept(vectors: Sequence[Vector], arrays: frozenset[str]) -> tuple[Vector, ...]:
    return tuple(vector for vector in vectors if vector.first.array not in arrays)


def step_signs(reading: Reading) -> tuple[int, ...] | None:
    """+1 or -1 per loop; None if a step is not a known constant."""
    signs = []
    for _, _, step in reading.ranges:
        if step.linear is None or not step.linear.is_const or step.linear.const == 0:
            return None
        signs.append(1 if step.linear.const > 0 else -1)
    return tuple(signs)


def _is_exact_sum(op: str, reading: Reading, name: str) -> bool:
    return op in EXACT or reading.reduction_kinds.get(name) in ("int", "bool")


def _summable(reading: Reading, scope: Scope, ordered: bool) -> frozenset[str]:
    """Arrays to which the loop only adds: each worker has a replica, summed in a fixed order."""
    by_array: dict[str, list[Access]] = {}
    for access in reading.body.accesses:
        by_array.setdefault(access.array, []).append(access)
    found = set()
    for array, accesses in by_array.items():
        if not all(a.mode == "update" and a.op in ("Add", "Sub") for a in accesses):
            continue
        kind = scope.info(array).kind
        adds_integers = all(access.kind in ("int", "bool") for access in accesses)
        if (kind == "int" and adds_integers) or (kind != "int" and not ordered):
            found.add(array)
    return frozenset(found)


def _conflict(reading: Reading, ordered: bool) -> Refusal:
    """Describe the two accesses that prevent a schedule."""
    vectors = _kept(reading.vectors, frozenset(reading.private))
    if not vectors:
        names = ", ".join(r.name for r in reading.reductions)
        lines = [r.line for r in reading.reductions]
        return Refusal(f"the sum {names} in floating point depends on the order", *lines)
    worst = min(vectors, key=lambda vector: sum(1 for d in vector.distance.values() if d == 0))
    text = worst.text(reading.atoms)
    return Refusal(
        f"{worst.first.label} and {worst.second.label} may be one cell in different iterations, "
        f"vector {text}",
        worst.first.line,
        worst.second.line,
    )
