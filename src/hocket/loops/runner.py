"""Run one loop of the user's function each time the function reaches it.

The decision for a call is reused while it holds for later calls, see `decision_cache`.
"""

from __future__ import annotations

import ast
import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hocket.base.units import format_seconds
from hocket.loops import memory
from hocket.loops.choice import TiledOption
from hocket.loops.compile import compiled
from hocket.loops.decide import Decision, LoopDecider, Settings
from hocket.loops.decision_cache import SKIPPED, CallPace, DecisionCache, Entry, Guard, content
from hocket.loops.evaluate import CannotEvaluate, loop_range
from hocket.loops.exits import bound_names
from hocket.loops.form import Refusal
from hocket.loops.generate import KernelSource
from hocket.loops.job import LoopJob
from hocket.loops.names import Number, called_names
from hocket.loops.prefetch import Prefetch, prefetch_of
from hocket.loops.source import LoopSite, LoopSource
from hocket.loops.verdict import LoopVerdict

Results = tuple[Any, ...]
"""Values of the names that are read after the loop.

For a loop with exits: the number of the exit taken, and the values of the names that it reads.
"""
_NEUTRAL = {"sum": 0, "product": 1}


class SiteRunner:
    """Runs one loop of one function."""

    def __init__(self, source: LoopSource, site: LoopSite, settings: Settings) -> None:
        self.source, self.site, self.settings = source, site, settings
        self._stored = bound_names(site.nest.node)
        self.results = tuple(sorted(self._stored & site.nest.live_after))
        self._called = called_names(site.nest.node)
        self._fingerprint: Any = object()
        self._kept: dict[str, Any] = {}
        """State of adaptive tables, which persists between calls."""
        self._timed, self._plain_start = CallPace(), 0.0
        self.is_timing = False
        """True if the current entry, run by Python, is timed; see `end_plain`."""
        self.num_to_skip = 0
        """Number of next entries that the function should run in Python without calling this
        runner.
        """
        self.last: Decision | None = None
        self._forget_if_changed()

    def run(self, variables: Mapping[str, Any]) -> Results | bool | None:
        """Run the loop and return its results, or return who should run it.

        None means that Python runs the loop and inner loops call their runners. False means that
        Python runs the whole loop.
        """
        start = time.perf_counter()
        self.is_timing = False
        self._forget_if_changed()
        given = self._given(variables)
        entry = self._cache.get(given)
        if entry is None:
            try:
                values = self.values(variables)
            except Refusal as unread:
                self.last = Decision(self.site, LoopVerdict(), None, (unread,), "python")
                self.num_to_skip = SKIPPED
                return False
            entry = self._decided(values, given)
        self.last = decision = entry.decision
        if decision.execution == "inside":
            return None
        if decision.execution == "python":
            self.num_to_skip = SKIPPED
            return False
        try:
            if decision.execution == "serial":
                return self._run_serial(entry, given, start)
            return self._run_parallel(decision, self.values(variables))
        except _not_compiled() as error:
            refusal = Refusal(f"the loop cannot be compiled: {_first_line(error)}", self.site.line)
            entry.decision = entry.decision.in_python(refusal)
            entry.guard = None
            return self._left_to_python(entry.decision)
        except IndexError as error:
            raise IndexError(f"{error}, {self._where_outside(decision)}") from error

    def _given(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Current values of the loop's inputs and results, unchecked."""
        given: dict[str, Any] = {}
        for name in self._cache.names:
            value = variables.get(name)
            if value is None and name not in self._stored and self.settings.outside:
                value = self.settings.outside(name)
            if value is None and isinstance(meaning := self.source.names.meaning(name), Number):
                value = meaning.value
            given[name] = value
        return given

    def _decided(self, values: dict[str, Any], given: Mapping[str, Any]) -> Entry:
        """Decide a call, and store the decision with what it relies on."""
        decision = self.decide(values, memory.owners(values))
        # The properties that led to the decision are compared before it is reused.
        readings, source = decision.verdict.readings, decision.source
        guard = None
        if decision.execution == "parallel":
            guard = Guard(memory.layout, memory.layout(given), content(readings, values))
        elif decision.execution == "serial" and source is not None:
            is_proven = not decision.options.boundscheck and self._cache.proves
            if not is_proven:
                decision = replace(decision, options=replace(decision.options, boundscheck=True))
            if is_proven or source.row_lengths:
                look = functools.partial(_serial_look, source, is_proven)
                guard = Guard(look, look(given), content(readings[:1], values) if is_proven else {})
        return self._cache.put(given, decision, guard)

    def _run_serial(self, entry: Entry, given: Mapping[str, Any], start: float) -> Results | bool:
        """Run a serial kernel, or leave the loop to Python if that was faster."""
        decision, pace = entry.decision, entry.pace
        assert decision.source is not None
        if pace.prefers_plain:
            return self._left_to_python(decision.in_python(Refusal(
                f"plain Python takes {format_seconds(pace.plain_s)} for so few iterations, "
                f"compiled code {format_seconds(pace.compiled_s)} with reaching it",
                self.site.line,
            )))  # fmt: skip
        if pace.wants_plain:
            self.is_timing, self._timed, self._plain_start = True, pace, time.perf_counter()
            return False
        if self._leaves_unbound(given):
            return False
        if entry.kernel is None:
            entry.kernel = compiled(decision.source.text, decision.options)
        found = entry.kernel(*[given[name] for name in decision.source.arguments])
        results = self._of_serial(decision, found, given)
        pace.add_compiled(time.perf_counter() - start)
        return results

    def end_plain(self) -> None:
        """Record the time of a loop that was run in plain Python."""
        self.is_timing = False
        self._timed.add_plain(time.perf_counter() - self._plain_start)

    def _left_to_python(self, decision: Decision) -> bool:
        self.num_to_skip, self.last = SKIPPED, decision
        return False

    def _leaves_unbound(self, values: Mapping[str, Any]) -> bool:
        """True if the loop may be empty while a name that is read after it is bound nowhere
        else."""
        node = self.site.nest.node
        if isinstance(node, ast.While) or None not in map(values.get, self.results):
            return False
        try:
            return not loop_range(node, values)
        except CannotEvaluate:
            return True

    def _where_outside(self, decision: Decision) -> str:
        """Describe the accesses that may have caused an IndexError; compiled code does not name
        them.
        """
        where = f"in the loop at line {self.site.line} of {self.source.place}"
        if decision.candidate is None:
            return where
        suspects = dict.fromkeys(access.label for access in decision.candidate.space.may_leave())
        return f"{where}: {' or '.join(suspects)}" if suspects else where

    def _forget_if_changed(self) -> None:
        """Drop all decisions if a helper or a constant that is compiled into kernels has
        changed."""
        called = self.source.names.fingerprint(self._called)
        if called != self._fingerprint:
            self._fingerprint = called
            names = tuple(dict.fromkeys((*self.site.inputs, *self.results)))
            self._cache = DecisionCache(names)
            self.decider = LoopDecider(self.source, self.site, self.settings, self.results)

    def decide(self, values: Mapping[str, Any], owners: Mapping[str, str]) -> Decision:
        """Analyse the loop for these values and choose how to run it."""
        return self.decider.decide(values, owners)

    def values(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The loop's inputs; raises `Refusal` for one that is no array or known number."""
        found: dict[str, Any] = {}
        for name, value in self._given(variables).items():
            problem = _unknown_type(value)
            if not problem:
                found[name] = value
            elif isinstance(value, np.ndarray) or (
                name in self.site.inputs and not (value is None and name in self._stored)
            ):
                raise Refusal(
                    f"{name} {problem}, and loops are read over arrays and numbers", self.site.line
                )
        return found

    def _of_serial(self, decision: Decision, found: Any, values: Mapping[str, Any]) -> Results:
        """Results of a serial kernel, or those of the exit that it took."""
        assert decision.source is not None
        number, *parts = found if self.site.exits else (0, *(found or ()))
        given = _typed(decision.source, parts, values)
        if number:
            return number, tuple(given[name] for name in self.site.exits[number - 1].names)
        results = tuple(given.get(name, values.get(name)) for name in self.results)
        return (0, results) if self.site.exits else results

    def _run_parallel(self, decision: Decision, values: Mapping[str, Any]) -> Results:
        job = self.job(decision, values, memory.owners(values))
        return self._combined(decision, values, self.settings.backend(job))

    def job(
        self, decision: Decision, values: Mapping[str, Any], owners: Mapping[str, str]
    ) -> LoopJob:
        """The call as a job for a back end."""
        assert decision.candidate is not None
        assert decision.source is not None
        option = decision.candidate.option
        started = dict(values)
        for reduction in option.reading.reductions:
            if reduction.op in _NEUTRAL:
                initial = type(values[reduction.name])
                # Tiles start at the neutral element; the value before the loop is added once at the
                # end.
                started[reduction.name] = initial(_NEUTRAL[reduction.op])
        rates = {owners.get(name, name): rate for name, rate in self.settings.rates.items()}
        tabled = {name: rate for name, rate in rates.items() if name in option.buffered}
        return LoopJob(
            decision.source, decision.options, decision.candidate.tiling, started,
            private=tuple(sorted(option.private)), summed=tuple(sorted(option.summed)),
            buffered=tuple(sorted(option.buffered - tabled.keys())), tabled=tabled,
            last_worker=_last_worker(decision.candidate), written=option.reading.body.written,
            aliases=owners, kept=self._kept,
            find_prefetch=functools.cache(lambda: self._prefetch(decision, owners)),
        )  # fmt: skip

    def _prefetch(self, decision: Decision, owners: Mapping[str, str]) -> Prefetch | None:
        """Plan that finds the rows of tables that a tile touches."""
        assert decision.candidate is not None
        assert decision.source is not None
        option = decision.candidate.option
        written = option.reading.body.written
        names = {name for name, owner in owners.items() if owner in written}
        # A slice follows one name, so it would miss accesses by another name of the array.
        twice = {owner for name, owner in owners.items() if name != owner}
        wanted = written - twice - option.private - option.summed
        return prefetch_of(
            option.reading.levels, decision.source.arguments, wanted, names | written,
            self.source.names, is_listed=option.shape.is_listed,
        )  # fmt: skip

    def _combined(
        self, decision: Decision, values: Mapping[str, Any], per_tile: list[tuple[Any, ...]]
    ) -> Results:
        """Combine the reductions of all tiles, in the order of tiles."""
        assert decision.candidate is not None
        assert decision.source is not None
        totals = []
        for place, reduction in enumerate(decision.candidate.option.reading.reductions):
            found = [result[place] for result in per_tile if result]
            totals.append(functools.reduce(_COMBINE[reduction.op], found, values[reduction.name]))
        typed = _typed(decision.source, totals, values)
        return tuple(typed.get(name, values.get(name)) for name in self.results)


def _serial_look(source: KernelSource, is_proven: bool, values: Mapping[str, Any]) -> Any:
    """Properties on which a serial kernel relies: sizes if indices are unchecked, and row
    lengths."""
    sizes = [
        value.shape if isinstance(value, np.ndarray) else value
        for value in (values[name] for name in source.arguments if is_proven)
        if isinstance(value, (np.ndarray, int, np.integer))
    ]
    rows = [values[name].shape[axis] for name, axis in source.row_lengths]
    return sizes, rows, rows and memory.shared_pairs(values)


def _unknown_type(value: Any) -> str:
    """Reason why a loop cannot use a value; empty if it can."""
    if value is None:
        return "is not known"
    if type(value) is np.ndarray and (value.dtype.kind not in "biufc" or value.ndim == 0):
        return f"is an array of {value.dtype}, shape {value.shape}"
    if type(value) is np.ndarray or isinstance(value, (bool, int, float, np.number, np.bool_)):
        return ""
    return f"is a {type(value).__name__}"


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add, "product": operator.mul, "or": operator.or_, "and": operator.and_,
    "max": lambda a, b: b if b > a else a, "min": lambda a, b: b if b < a else a,
}  # fmt: skip


def _typed(source: KernelSource, found: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Results by name, converted to numpy types if the plain loop would return those."""
    given = dict(zip(source.results, found, strict=True))
    for name, dtype in zip(source.results, source.dtypes, strict=True):
        value, before = given[name], values.get(name)
        # Python would still hold the original object with its type.
        if not isinstance(before, np.ndarray) and _is_unchanged(value, before):
            given[name] = before
        elif dtype and isinstance(value, (bool, int, float, complex)):
            given[name] = np.dtype(dtype).type(value)
    return given


def _is_unchanged(value: Any, before: Any) -> bool:
    """True if a number equals the one before the loop; 0.0 and -0.0 differ."""
    if before is None or value != before:
        return False
    return bool(value) or not isinstance(value, float) or repr(value) == repr(float(before))


def _last_worker(candidate: TiledOption) -> int:
    """The worker that runs the last iteration in the serial order of the schedule."""
    tiles = [tile for tile in candidate.tiling.tiles if tile.num_iterations]
    order = candidate.tiling.order
    if not tiles:
        return 0
    if not order or not candidate.option.shape.keeps_order:
        return tiles[-1].worker
    ends = [column[-1] for column in candidate.space.columns]
    is_last = np.all([own == end for own, end in zip(order, ends, strict=True)], axis=0)
    place = int(np.flatnonzero(is_last)[-1])
    return next(t.worker for t in tiles if t.bounds[0] <= place < t.bounds[1])


def _not_compiled() -> tuple[type[Exception], ...]:
    from numba.core.errors import NumbaError

    return (NumbaError, NotImplementedError)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
