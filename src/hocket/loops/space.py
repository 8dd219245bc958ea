"""The iteration space of a call: how many iterations, which keys, and whether the proofs hold.

The analysis proves things on conditions that only data can tell: subscripts do not count from the
end, runs of cells do not overlap, loops are not empty. They are checked here, in O(iterations).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hocket.base.arrays import LongArray
from hocket.loops.dependence import Segments
from hocket.loops.evaluate import CannotEvaluate, evaluate, number
from hocket.loops.form import Atom, Linear, Refusal
from hocket.loops.nest import Reading

MAX_ITERATIONS = 2**31
"""Most iterations that are listed one by one, in memory."""


@dataclass(frozen=True)
class Space:
    """The iterations of one call."""

    reading: Reading
    values: Mapping[str, Any]
    outer: range

    @staticmethod
    def of(reading: Reading, values: Mapping[str, Any]) -> Space:
        """Raises `Refusal` if the outer range is not known."""
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
        """The outer variable's values, in order."""
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
        """Iterations of the second loop for each outer value."""
        starts, stops, step = self.inner_ranges
        span = stops - starts if step > 0 else starts - stops
        lengths: LongArray = np.maximum(-(-span // abs(step)), 0)
        return lengths

    @cached_property
    def trip_counts(self) -> LongArray:
        """Work of each outer iteration: one, and the lengths of the loops inside it."""
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
        """The loop variables of every iteration, in the loop's own order."""
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
        """Of the whole nest."""
        if self.reading.depth == 1:
            return len(self.outer)
        return int(self.inner_lengths.sum())

    def key(self, atom: Atom) -> LongArray:
        """The value of a dimension, real or virtual, for every iteration."""
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
        """Raise `Refusal` unless everything that the analysis assumed is true of these data."""
        if not self.num_iterations:
            return
        self._check_subscripts()
        for segments in sorted(self.reading.segments, key=repr):
            self._check_segments(segments)
        for text in self.reading.nonempty:
            self._check_nonempty(text)

    def _check_subscripts(self) -> None:
        """Indices of arrays that the loop writes must not count from the end."""
        forms = {
            (sub.index, access)
            for access in self.reading.body.accesses
            if access.array in self.reading.body.written
            for sub in access.subs
            if sub.index is not None and not sub.index.has("inner")
        }
        known: dict[Linear, int] = {}
        for form, access in forms:
            if form not in known:
                known[form] = self._least(form)
            if known[form] < 0:
                raise Refusal(
                    f"{access.label} reaches index {known[form]}, which counts from the end",
                    access.line,
                )

    def _least(self, form: Linear) -> int:
        total = form.const
        rest = Linear(form.terms)
        names = {level.name for level in self.reading.levels}
        for atom, factor in form.terms:
            if atom.kind == "dim" and self.reading.depth == 1:
                total += min(factor * self.outer[0], factor * self.outer[-1])
                rest = rest - Linear(((atom, factor),))
        if not rest.terms:
            return total
        if all(atom.kind == "invariant" for atom, _ in rest.terms):
            return total + self._number(rest.text())
        env = {**self.values, **self._corners(rest, names)}
        try:
            return total + int(np.min(evaluate(rest.text(), env)))
        except CannotEvaluate as error:
            line = self.reading.levels[0].node.lineno
            raise Refusal(f"{rest.text()} is not known before the loop: {error}", line) from error

    def _corners(self, form: Linear, names: set[str]) -> dict[str, LongArray]:
        """Loop variables for evaluating a form: two corners where it is linear, else all values."""
        order = [level.name for level in self.reading.levels]
        linear = all(atom.kind in ("dim", "invariant") for atom, _ in form.terms)
        if linear and self.reading.depth == 2 and len(form.terms) == 1:
            name = form.terms[0][0].name
            if name == order[0]:
                return {name: np.array([self.outer[0], self.outer[-1]], dtype=np.int64)}
            starts, _, step = self.inner_ranges
            kept = self.inner_lengths > 0
            last = starts + (self.inner_lengths - 1) * step
            ends = np.concatenate([starts[kept], last[kept]])
            return {name: np.array([ends.min(), ends.max()], dtype=np.int64)}
        return dict(zip(order, self.columns, strict=True))

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
