"""The iteration space of a call: number of iterations, keys, and checks of assumed conditions.

The analysis proves its results under conditions that only data can confirm: subscripts do not count
from the end, runs of cells do not overlap, loops are not empty. They are checked here in
O(iterations), and so is whether every index is inside its array.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hocket.base.arrays import LongArray
from hocket.loops.dependence import Segments
from hocket.loops.evaluate import CannotEvaluate, evaluate, number
from hocket.loops.form import Access, Atom, Linear, Refusal
from hocket.loops.nest import Reading

MAX_ITERATIONS = 2**31
"""Most iterations that are listed one by one in memory."""
Interval = tuple[int, int]
"""Least and greatest value."""


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
        try:
            texts = [part.text for part in reading.ranges[0]]
            if any(text is None for text in texts):
                raise CannotEvaluate(str(reading.levels[0].node.lineno))
            start, stop, step = (number(str(text), values) for text in texts)
        except CannotEvaluate as error:
            line = reading.levels[0].node.lineno
            raise Refusal(f"the range at line {line} is not known: {error}", line) from error
        if step and (stop - start) // step > MAX_ITERATIONS:
            line = reading.levels[0].node.lineno
            raise Refusal(f"the range at line {line} is longer than {MAX_ITERATIONS:,}", line)
        return Space(reading, values, range(start, stop, step))

    @cached_property
    def outer_values(self) -> LongArray:
        """Values of the outer loop variable, in order."""
        return np.arange(self.outer.start, self.outer.stop, self.outer.step, dtype=np.int64)

    @cached_property
    def inner_ranges(self) -> tuple[LongArray, LongArray, int]:
        """Start, stop and step of the second loop for each outer value."""
        name = self.reading.levels[0].name
        start, stop, step = self.reading.ranges[1]
        env = {**self.values, name: self.outer_values}
        try:
            if start.text is None or stop.text is None or step.text is None:
                raise CannotEvaluate("its bounds change in the loop")
            starts, stops = (evaluate(text, env) for text in (start.text, stop.text))
            size = len(self.outer_values)
            return (
                np.broadcast_to(np.asarray(starts, dtype=np.int64), size),
                np.broadcast_to(np.asarray(stops, dtype=np.int64), size),
                number(step.text, self.values),
            )
        except CannotEvaluate as error:
            line = self.reading.levels[1].node.lineno
            raise Refusal(f"the range at line {line} is not known: {error}", line) from error

    @cached_property
    def inner_lengths(self) -> LongArray:
        """Number of iterations of the second loop for each outer value."""
        starts, stops, step = self.inner_ranges
        span = stops - starts if step > 0 else starts - stops
        lengths: LongArray = np.maximum(-(-span // abs(step)), 0)
        return lengths

    @cached_property
    def trip_counts(self) -> LongArray:
        """Work of each outer iteration: 1 plus the lengths of the loops inside it."""
        name = self.reading.levels[0].name
        weights = np.ones(len(self.outer), dtype=np.int64)
        for loop in self.reading.body.inner.values():
            if loop.start is None or loop.stop is None or self.reading.depth > 1:
                continue
            try:
                env = {**self.values, name: self.outer_values}
                length = evaluate(f"({loop.stop}) - ({loop.start})", env)
            except CannotEvaluate:
                continue
            weights = weights + np.maximum(length, 0)
        return weights

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

    @property
    def num_iterations(self) -> int:
        """Number of iterations of the nest."""
        if self.reading.depth == 1:
            return len(self.outer)
        return int(self.inner_lengths.sum())

    def key(self, atom: Atom) -> LongArray:
        """Value of a dimension, real or virtual, in every iteration."""
        names = [level.name for level in self.reading.levels]
        if atom.kind == "dim":
            return self.columns[names.index(atom.name)]
        env = {**self.values, **dict(zip(names, self.columns, strict=True))}
        try:
            found = np.asarray(evaluate(atom.name, env), dtype=np.int64)
        except CannotEvaluate as error:
            line = self.reading.levels[0].node.lineno
            raise Refusal(f"{atom.name} is not known before the loop: {error}", line) from error
        return np.broadcast_to(found, len(self.columns[0]))

    # ── conditions ──────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise `Refusal` unless the data satisfy every condition that the analysis assumed."""
        if not self.num_iterations:
            return
        self._check_subscripts()
        for segments in sorted(self.reading.segments, key=repr):
            self._check_segments(segments)
        for text in self.reading.nonempty:
            self._check_nonempty(text)

    def _check_subscripts(self) -> None:
        """Refuse indices of written arrays that count from the end."""
        for access in self.reading.body.accesses:
            if access.array not in self.reading.body.written:
                continue
            for sub in access.subs:
                if sub.index is None or sub.index.has("inner"):
                    continue
                ends = self.interval(sub.index)
                if ends is not None and ends[0] < 0 and len(sub.index.varying) > 1:
                    ends = self._exact_interval(sub.index)
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
                ends = None if sub.index is None else self.interval(sub.index)
                # Slices are clipped, never out of range.
                if not sub.is_slice and (ends is None or ends[0] < 0 or ends[1] >= length):
                    yield access
                    break

    @property
    def all_inside(self) -> bool:
        """True if no access can leave its array, so the kernel need not check indices."""
        if self.reading.body.has_local_arrays or not self.num_iterations:
            return False
        return next(self.may_leave(), None) is None

    def interval(self, form: Linear) -> Interval | None:
        """Bounds of an index form over all iterations, or None; each atom is bounded separately."""
        if form not in self._intervals:
            try:
                self._intervals[form] = self._interval(form)
            except (CannotEvaluate, Refusal, IndexError):
                self._intervals[form] = None
        return self._intervals[form]

    def _interval(self, form: Linear) -> Interval | None:
        low = high = form.const
        for atom, factor in form.terms:
            ends = self._ends_of(atom)
            if ends is None:
                return None
            low += min(factor * ends[0], factor * ends[1])
            high += max(factor * ends[0], factor * ends[1])
        return low, high

    def _exact_interval(self, form: Linear) -> Interval | None:
        """Bounds of a form without inner variables, such as `i - j` if j stays below i."""
        names = [level.name for level in self.reading.levels]
        try:
            env = {**self.values, **dict(zip(names, self.columns, strict=True))}
            return _ends(evaluate(form.text(), env))
        except CannotEvaluate:
            return None

    def _ends_of(self, atom: Atom) -> Interval | None:
        """Least and greatest value of an atom over all iterations."""
        if atom.kind == "invariant":
            return _ends(evaluate(atom.name, self.values))
        if atom.kind == "key":
            return _ends(self.key(atom))
        if atom.kind == "inner":
            return self._ends_of_inner(atom)
        if atom.name == self.reading.levels[0].name:
            return _ends([self.outer[0], self.outer[-1]])
        starts, _, step = self.inner_ranges
        kept = self.inner_lengths > 0
        last = starts + (self.inner_lengths - 1) * step
        return _ends([starts[kept], last[kept]])

    def _ends_of_inner(self, atom: Atom) -> Interval | None:
        loop = self.reading.body.inner.get(atom.name)
        if loop is None or loop.start is None or loop.stop is None:
            return None
        tree = ast.parse(f"({loop.start}, {loop.stop})")
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        env: dict[str, Any] = dict(self.values)
        for place, level in enumerate(self.reading.levels):
            if level.name in names:
                env[level.name] = self.columns[place]
        start, stop = evaluate(loop.start, env), evaluate(loop.stop, env)
        return _ends(start)[0], max(_ends(stop)[1] - 1, 0)

    def _number(self, text: str) -> int:
        try:
            return number(text, self.values)
        except CannotEvaluate as error:
            line = self.reading.levels[0].node.lineno
            raise Refusal(f"{text} is not known before the loop: {error}", line) from error

    def _check_segments(self, segments: Segments) -> None:
        names = [level.name for level in self.reading.levels]
        line = self.reading.levels[0].node.lineno
        values = np.unique(self.columns[names.index(segments.dim)])
        env = {**self.values, segments.dim: values}
        try:
            size = len(values)
            start, stop = (
                np.broadcast_to(np.asarray(evaluate(text, env), dtype=np.int64), size)
                for text in (segments.start, segments.stop)
            )
        except CannotEvaluate as error:
            raise Refusal(f"the cells of {segments.dim} are not known: {error}", line) from error
        if min(start.min(), stop.min()) < 0:
            raise Refusal(f"{segments.start}:{segments.stop} counts from the end", line)
        order = np.argsort(start, kind="stable")
        filled = order[(stop > start)[order]]
        if np.any(stop[filled][:-1] > start[filled][1:]):
            raise Refusal(
                f"the cells {segments.start}:{segments.stop} of different {segments.dim} overlap",
                line,
            )

    def _check_nonempty(self, text: str) -> None:
        arguments = ast.parse(text, mode="eval").body
        assert isinstance(arguments, ast.Call)
        numbers = [self._number(ast.unparse(argument)) for argument in arguments.args]
        if not len(range(*numbers)):
            line = self.reading.levels[0].node.lineno
            raise Refusal(f"the loop over {text} is empty, and its names are read after it", line)


def _ends(values: Any) -> Interval:
    found = np.asarray(values)
    return int(found.min()), int(found.max())
