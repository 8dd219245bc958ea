"""Run one loop of the user's function each time the function reaches it.

The decision for a call is reused while later calls have the same types, sizes and indices.
"""

from __future__ import annotations

import ast
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import numpy as np

from hocket.base.units import format_seconds
from hocket.loops import memory
from hocket.loops.choice import TiledOption
from hocket.loops.compile import compiled
from hocket.loops.decide import Decision, LoopDecider
from hocket.loops.exits import without_values
from hocket.loops.flow import stored_names
from hocket.loops.form import Refusal
from hocket.loops.generate import KernelSource
from hocket.loops.job import LoopJob, run_in_turn
from hocket.loops.names import Number, called_names
from hocket.loops.pace import SKIPPED, CallPace, Entries, SerialCall, sizes_of
from hocket.loops.prefetch import Prefetch, prefetch_of
from hocket.loops.recall import content, same_content, signature
from hocket.loops.settings import Settings
from hocket.loops.source import LoopSite, LoopSource
from hocket.loops.verdict import LoopVerdict

Results = tuple[Any, ...]
"""Values of the names that are read after the loop.

For a loop with exits: the number of the exit taken, and the values of the names that it reads.
"""
_NEUTRAL = {"sum": 0, "product": 1}


@dataclass
class _Memory:
    decision: Decision
    content: dict[str, Any]


class SiteRunner:
    """Runs one loop of one function."""

    def __init__(self, source: LoopSource, site: LoopSite, settings: Settings) -> None:
        self.source, self.site, self.settings = source, site, settings
        self._stored = stored_names([without_values(site.nest.node)])
        self.results = tuple(sorted(self._stored & site.nest.live_after))
        self.decider = LoopDecider(source, site, settings, self.results)
        self._called = called_names(site.nest.node)
        self._fingerprint: Any = source.names.fingerprint(self._called)
        self._memories: dict[Any, _Memory] = {}
        self._kept: dict[str, Any] = {}
        self._entries = Entries(tuple(dict.fromkeys((*site.inputs, *self.results))))
        self._timed, self._plain_start = CallPace(), 0.0
        self._may_leave_unbound = isinstance(site.nest.node, ast.For) and bool(self.results)
        self.is_timing = False
        """True if the entry that Python runs now is timed, see `end_plain`."""
        self.num_to_skip = 0
        """Next entries that the function should leave to Python without calling this runner."""
        self.last: Decision | None = None

    def run(self, variables: Mapping[str, Any]) -> Results | bool | None:
        """Run the loop and return its results, or return who should run it.

        None: Python runs it, and its inner loops call their runners. False: Python runs all of
        it.
        """
        start = time.perf_counter()
        self.is_timing = False
        self._forget_if_changed()
        given = self._given(variables)
        entry = self._entries.get(given)
        if entry is not None:
            return self._run_entry(entry, given, start)
        try:
            values = self.values(variables)
        except Refusal as unread:
            self.last = Decision(self.site, LoopVerdict((), (), ()), None, (unread,), "python")
            self.num_to_skip = SKIPPED
            return False
        owners = memory.owners(values)
        looks = signature(values, owners), memory.shared_pairs(values)
        remembered = self._memories.get(looks)
        if remembered is None or not same_content(remembered.content, values):
            decision = self.decide(values, owners)
            remembered = _Memory(decision, content(decision.verdict.readings, values))
            if len(self._memories) >= 16:
                self._memories.clear()
            self._memories[looks] = remembered
        self.last = decision = remembered.decision
        if decision.execution == "inside":
            return None
        if decision.execution == "python":
            self.num_to_skip = SKIPPED
            return False
        try:
            if decision.execution == "serial":
                return self._run_entry(self._new_entry(decision, values), given, start)
            return self._run_parallel(decision, values, owners)
        except _not_compiled() as error:
            remembered.decision = self._left_to_python(decision, error)
            return False
        except IndexError as error:
            raise IndexError(f"{error}, {self._where_outside(decision)}") from error

    def _given(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Current values of the loop's inputs and results, unchecked."""
        given: dict[str, Any] = {}
        for name in self._entries.names:
            value = variables.get(name)
            if value is None and name not in self._stored and self.settings.outside:
                value = self.settings.outside(name)
            if value is None and isinstance(meaning := self.source.names.meaning(name), Number):
                value = meaning.value
            given[name] = value
        return given

    def _new_entry(self, decision: Decision, values: Mapping[str, Any]) -> SerialCall:
        assert decision.source is not None
        options = replace(decision.options, fastmath=self.settings.fastmath)
        if not self._entries.proves:
            options = replace(options, boundscheck=self.settings.check_bounds)
        arguments = decision.source.arguments
        is_proven = self.settings.check_bounds and not options.boundscheck
        sizes, indices = None, {}
        if is_proven:
            sizes = sizes_of(arguments, values)
            indices = content(decision.verdict.readings[:1], values)
        kernel = compiled(decision.source.text, options)
        return self._entries.put(values, SerialCall(decision, kernel, arguments, sizes, indices))

    def _run_entry(
        self, entry: SerialCall, given: Mapping[str, Any], start: float
    ) -> Results | bool:
        """Run a serial kernel, or leave the loop to Python if that was faster."""
        decision, pace = entry.decision, entry.pace
        self.last = decision
        if pace.prefers_plain:
            self.num_to_skip = SKIPPED
            self.last = _plain_is_faster(decision, pace)
            return False
        if pace.wants_plain:
            pace.is_measured = True
            self._timed = pace
            self.is_timing, self._plain_start = True, time.perf_counter()
            return False
        if self._leaves_unbound(given):
            return False
        try:
            found = entry.kernel(*[given[name] for name in entry.arguments])
        except _not_compiled() as error:
            entry.decision = self.last = self._left_to_python(decision, error)
            for each in self._memories.values():
                if each.decision is decision:
                    each.decision = entry.decision
            self._entries.found.clear()
            return False
        except IndexError as error:
            raise IndexError(f"{error}, {self._where_outside(decision)}") from error
        results = self._of_serial(decision, found, given)
        pace.add_compiled(time.perf_counter() - start)
        return results

    def end_plain(self) -> None:
        """Record the time of a loop that was run in plain Python."""
        self.is_timing = False
        self._timed.plain_s = time.perf_counter() - self._plain_start

    def _left_to_python(self, decision: Decision, error: BaseException) -> Decision:
        refusal = Refusal(f"the loop cannot be compiled: {_first_line(error)}", self.site.line)
        refusals = (*decision.refusals, refusal)
        self.num_to_skip = SKIPPED
        self.last = replace(
            decision, execution="python", refusals=refusals, candidate=None, source=None
        )
        return self.last

    def _leaves_unbound(self, values: Mapping[str, Any]) -> bool:
        """True if the loop is empty and a name read after it is bound nowhere else."""
        if not self._may_leave_unbound:
            return False
        if all(values.get(name) is not None for name in self.results):
            return False
        space = {"range": range, "len": len, "min": min, "max": max, "prange": range}
        # The user's own range, which the function would evaluate next.
        return not len(eval(self._head, space, dict(values)))  # noqa: S307

    @functools.cached_property
    def _head(self) -> CodeType:
        node = self.site.nest.node
        assert isinstance(node, ast.For)
        return compile(ast.Expression(node.iter), self.source.place or "<loop>", "eval")

    def _where_outside(self, decision: Decision) -> str:
        """Accesses that may have caused an IndexError, which compiled code does not name."""
        where = f"in the loop at line {self.site.line} of {self.source.place}"
        if decision.candidate is None:
            return where
        suspects = dict.fromkeys(access.label for access in decision.candidate.space.may_leave())
        return f"{where}: {' or '.join(suspects)}" if suspects else where

    def _forget_if_changed(self) -> None:
        """Drop all decisions if a helper or one of its constants, compiled in, has changed."""
        called = self.source.names.fingerprint(self._called)
        if called != self._fingerprint:
            self._fingerprint = called
            self._memories.clear()
            self._entries.found.clear()
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

    def _run_parallel(
        self, decision: Decision, values: Mapping[str, Any], owners: Mapping[str, str]
    ) -> Results:
        job = self.job(decision, values, owners)
        run = run_in_turn if decision.execution == "alone" else self.settings.backend
        per_tile = run(job)
        return self._combined(decision, values, per_tile)

    def job(
        self, decision: Decision, values: Mapping[str, Any], owners: Mapping[str, str]
    ) -> LoopJob:
        """The call as a job for a back end."""
        assert decision.candidate is not None
        assert decision.source is not None
        option, tiling = decision.candidate.option, decision.candidate.tiling
        started = dict(values)
        for reduction in option.reading.reductions:
            initial = values[reduction.name]
            if reduction.op in _NEUTRAL:
                started[reduction.name] = type(initial)(_NEUTRAL[reduction.op])
        through = {owners.get(name, name): rule for name, rule in self.settings.through.items()}
        tabled = {name: rule for name, rule in through.items() if name in option.buffered}
        return LoopJob(
            decision.source, decision.options, tiling, started,
            tuple(sorted(option.private)), tuple(sorted(option.summed)),
            tuple(sorted(option.buffered - tabled.keys())), _last_worker(decision.candidate),
            option.reading.body.written, owners, tabled, self.settings.rate, self._kept,
            functools.cache(lambda: self._prefetch(decision, owners)),
        )  # fmt: skip

    def _prefetch(self, decision: Decision, owners: Mapping[str, str]) -> Prefetch | None:
        """Plan that finds the rows of tables that a tile touches."""
        if decision.candidate is None or decision.source is None:
            return None
        option = decision.candidate.option
        written = option.reading.body.written
        names = {name for name, owner in owners.items() if owner in written}
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
        totals: dict[str, Any] = {}
        reading = decision.candidate.option.reading
        for place, reduction in enumerate(reading.reductions):
            total = values[reduction.name]
            combine = _COMBINE[reduction.op]
            for result in per_tile:
                if result:
                    total = combine(total, result[place])
            totals[reduction.name] = total
        assert decision.source is not None
        totals = _typed(decision.source, [totals[name] for name in decision.source.results], values)
        return tuple(totals.get(name, values.get(name)) for name in self.results)


def _unknown_type(value: Any) -> str:
    """Return why a loop cannot use a value; empty if it can."""
    if value is None:
        return "is not known"
    if type(value) is np.ndarray and (value.dtype.kind not in "biufc" or value.ndim == 0):
        return f"is an array of {value.dtype}, shape {value.shape}"
    if type(value) is np.ndarray or isinstance(value, (bool, int, float, np.number, np.bool_)):
        return ""
    return f"is a {type(value).__name__}"


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "max": lambda a, b: b if b > a else a,
    "min": lambda a, b: b if b < a else a,
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
}


def _typed(source: KernelSource, found: Sequence[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Results by name, converted to numpy types if the plain loop would return those."""
    given = dict(zip(source.results, found, strict=True))
    for name, dtype in zip(source.results, source.dtypes, strict=True):
        value, before = given[name], values.get(name)
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


def _plain_is_faster(decision: Decision, pace: CallPace) -> Decision:
    reason = (
        f"plain Python takes {format_seconds(pace.plain_s)} for so few iterations, compiled code "
        f"{format_seconds(pace.compiled_s)} with reaching it"
    )
    return replace(
        decision, execution="python", source=None, candidate=None,
        refusals=(*decision.refusals, Refusal(reason, decision.site.line)),
    )  # fmt: skip


def _last_worker(candidate: TiledOption) -> int:
    """The worker that runs the last iteration in the serial order of the schedule."""
    tiles = [tile for tile in candidate.tiling.tiles if tile.num_iterations]
    if not tiles:
        return 0
    if candidate.tiling.order and candidate.option.shape.keeps_order:
        columns = candidate.space.columns
        order = candidate.tiling.order
        last = np.ones(len(order[0]), dtype=bool)
        for column, ordered in zip(columns, order, strict=True):
            last &= ordered == column[-1]
        place = int(np.flatnonzero(last)[-1])
        return next(t.worker for t in tiles if t.bounds[0] <= place < t.bounds[1])
    return tiles[-1].worker


def _not_compiled() -> tuple[type[Exception], ...]:
    from numba.core.errors import NumbaError

    return (NumbaError, NotImplementedError)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
