"""The iteration space of a call: number of iterations, keys, and checks of assumed conditions.

The analysis proves its results under conditions that only data can confirm: subscripts do not count
from the end, and runs of cells do not overlap. These conditions are checked here in O(iterations).
Another check finds out if every index is inside its array.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hocket.base.arrays import LongArray
from hocket.loops.dependence import Segments
from hocket.loops.evaluate import CannotEvaluate, evaluate, loop_range, number
from hocket.loops.form import Access, Atom, Linear, Refusal, Sub
from hocket.loops.nest import Reading

MAX_ITERATIONS = 2**31
"""Maximum number of iterations that are listed in memory one by one."""
Interval = tuple[int, int]
"""Smallest and largest value."""


@dataclass(frozen=True)
class Space:
    """The iterations of one call."""

    reading: Reading
    values: Mapping[str, Any]
    outer: range
    _intervals: dict[Linear, Interval | None] = field(default_factory=dict)

    @staticmethod
    def of(reading: Reading, values: Mapping[str, Any]) -> Space:
        """Return the space of a call; raises `Refusal` if the outer range is not known."""
        outer = loop_range(reading.levels[0].node, values)
        if (outer.stop - outer.start) // outer.step > MAX_ITERATIONS:
            raise Refusal(
                f"the range at line {reading.line} is longer than {MAX_ITERATIONS:,}", reading.line
            )
        return Space(reading, values, outer)

    @cached_property
    def outer_values(self) -> LongArray:
        """Values of the outer loop variable, in order."""
        return np.arange(self.outer.start, self.outer.stop, self.outer.step, dtype=np.int64)

    @cached_property
    def by_outer(self) -> dict[str, Any]:
        """Names with the values that they have in each iteration of the outer loop."""
        return {**self.values, self.reading.levels[0].name: self.outer_values}

    @cached_property
    def inner_ranges(self) -> tuple[LongArray, LongArray, int]:
        """Start, stop and step of the second loop for each outer value."""
        start, stop, step = (part.text for part in self.reading.ranges[1])
        if start is None or stop is None or step is None:
            line = self.reading.levels[1].node.lineno
            raise Refusal(f"the range at line {line} changes in the loop", line)
        size = len(self.outer_values)
        return (
            np.broadcast_to(np.asarray(evaluate(start, self.by_outer), dtype=np.int64), size),
            np.broadcast_to(np.asarray(evaluate(stop, self.by_outer), dtype=np.int64), size),
            number(step, self.values),
        )

    @cached_property
    def inner_lengths(self) -> LongArray:
        """Number of iterations of the second loop for each outer value."""
        starts, stops, step = self.inner_ranges
        span = stops - starts if step > 0 else starts - stops
        lengths: LongArray = np.maximum(-(-span // abs(step)), 0)
        return lengths

    @cached_property
    def trip_counts(self) -> LongArray | None:
        """Work of each outer iteration: 1 plus the lengths of the loops inside it.

        None if all iterations have the same work.
        """
        lengths = [self.length_of(atom) for atom in self.reading.body.inner]
        if not any(np.ndim(length) for length in lengths):
            return None
        known = sum(length for length in lengths if length is not None)
        return np.broadcast_to(np.asarray(1 + known, np.int64), len(self.outer))

    def length_of(self, atom: str) -> Any:
        """Length of a loop inside the iteration for each outer value; None if it is not known."""
        loop = self.reading.body.inner.get(atom)
        if loop is None or loop.start is None or loop.stop is None:
            return None
        try:
            return np.maximum(evaluate(f"({loop.stop}) - ({loop.start})", self.by_outer), 0)
        except CannotEvaluate:
            return None

    @cached_property
    def columns(self) -> tuple[LongArray, ...]:
        """Values of each loop variable for all iterations, in the loop's own order."""
        if self.reading.depth == 1:
            return (self.outer_values,)
        starts, _, step = self.inner_ranges
        lengths = self.inner_lengths
        first = np.repeat(self.outer_values, lengths)
        begin = np.cumsum(lengths) - lengths
        place = np.arange(len(first), dtype=np.int64) - np.repeat(begin, lengths)
        return first, np.repeat(starts, lengths) + place * step

    @cached_property
    def by_iteration(self) -> dict[str, Any]:
        """Names with the values that they have in each iteration."""
        return _ByIteration(self)

    @property
    def num_iterations(self) -> int:
        """Number of iterations of the nest."""
        return len(self.outer) if self.reading.depth == 1 else int(self.inner_lengths.sum())

    def key(self, atom: Atom) -> LongArray:
        """Value of a dimension, real or virtual, in every iteration."""
        found = np.asarray(evaluate(atom.name, self.by_iteration), dtype=np.int64)
        return np.broadcast_to(found, len(self.columns[0]))

    # ── conditions ──────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise `Refusal` unless the data satisfy every condition that the analysis assumed."""
        if self.num_iterations:
            self._check_subscripts()
            for segments in sorted(self.reading.segments, key=repr):
                self._check_segments(segments)

    def _check_subscripts(self) -> None:
        """Refuse indices of written arrays that count from the end."""
        for access in self.reading.body.accesses:
            for sub in access.subs if access.array in self.reading.body.written else ():
                if sub.index is None or sub.index.has("inner"):
                    continue
                ends = self.reach(sub)
                if ends is not None and ends[0] < 0 and len(sub.index.varying) > 1:
                    # Bounds of each variable alone are too wide for `i - j` if j is always below i.
                    ends = _ends(evaluate(sub.index.text(), self.by_iteration))
                if ends is None:
                    text = sub.index.text()
                    raise Refusal(f"{text} is not known before the loop", access.line)
                if ends[0] < 0:
                    raise Refusal(
                        f"{access.label} reaches index {ends[0]}, which counts from the end",
                        access.line,
                    )

    def may_leave(self) -> Iterator[Access]:
        """Accesses whose indices are not proven to be inside their array."""
        for access in self.reading.body.accesses:
            shape = self.values[access.array].shape
            for length, sub in zip(shape, access.subs, strict=True):
                ends = self.reach(sub)
                # Slices are clipped to the array, so they are never out of range.
                if not sub.is_slice and (ends is None or ends[0] < 0 or ends[1] >= length):
                    yield access
                    break

    @property
    def all_inside(self) -> bool:
        """True if no access can leave its array, so the kernel need not check indices."""
        if self.reading.body.has_local_arrays or not self.num_iterations:
            return False
        return next(self.may_leave(), None) is None

    def reach(self, sub: Sub) -> Interval | None:
        """Bounds of a subscript over all iterations that reach it; None if unknown."""
        ends = None if sub.index is None else self.interval(sub.index)
        return (max(ends[0], 0), ends[1]) if ends is not None and sub.is_guarded else ends

    def interval(self, form: Linear) -> Interval | None:
        """Bounds of an index form over all iterations, or None; each atom is bounded separately."""
        if form not in self._intervals:
            try:
                low = high = form.const
                for atom, factor in form.terms:
                    ends = self._ends_of(atom)
                    low += min(factor * ends[0], factor * ends[1])
                    high += max(factor * ends[0], factor * ends[1])
                self._intervals[form] = low, high
            except (Refusal, IndexError):
                self._intervals[form] = None
        return self._intervals[form]

    def _ends_of(self, atom: Atom) -> Interval:
        """Least and greatest value of an atom over all iterations."""
        if atom.kind == "invariant":
            return _ends(evaluate(atom.name, self.values))
        if atom.kind == "key":
            return _ends(self.key(atom))
        if atom.kind == "inner":
            loop = self.reading.body.inner[atom.name]
            if loop.start is None or loop.stop is None:
                raise CannotEvaluate(f"the range of {atom.name} is not known")
            start, stop = (evaluate(text, self.by_iteration) for text in (loop.start, loop.stop))
            return _ends(start)[0], max(_ends(stop)[1] - 1, 0)
        if atom.name == self.reading.levels[0].name:
            return _ends([self.outer[0], self.outer[-1]])
        starts, _, step = self.inner_ranges
        kept = self.inner_lengths > 0
        last = starts + (self.inner_lengths - 1) * step
        return _ends([starts[kept], last[kept]])

    def _check_segments(self, segments: Segments) -> None:
        """Refuse runs of cells that overlap for different values of a loop variable."""
        runs, line = f"{segments.start}:{segments.stop}", self.reading.line
        # One run per value, however many iterations share the value.
        values = np.unique(self.key(Atom("dim", segments.dim)))
        start, stop = (
            np.broadcast_to(evaluate(text, {**self.values, segments.dim: values}), len(values))
            for text in (segments.start, segments.stop)
        )
        if min(start.min(), stop.min()) < 0:
            raise Refusal(f"{runs} counts from the end", line)
        order = np.argsort(start, kind="stable")
        filled = order[(stop > start)[order]]
        if np.any(stop[filled][:-1] > start[filled][1:]):
            raise Refusal(f"the cells {runs} of different {segments.dim} overlap", line)


class _ByIteration(dict[str, Any]):
    """Names with their values; those of loop variables are listed when they are first needed."""

    def __init__(self, space: Space) -> None:
        self.space, self.dims = space, [level.name for level in space.reading.levels]
        super().__init__({k: v for k, v in space.values.items() if k not in self.dims})

    def __missing__(self, name: str) -> LongArray:
        if name not in self.dims:
            raise KeyError(name)
        return self.space.columns[self.dims.index(name)]


def _ends(values: Any) -> Interval:
    found = np.asarray(values)
    if not found.size:
        raise CannotEvaluate("there are no iterations")
    return int(found.min()), int(found.max())
