"""Running a loop of the user's function when the function reaches it.

What was found for a call is remembered and used again while the next calls look the same: same
kinds of values, and the same content of the arrays that index the others (compared, never assumed).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hocket.loops import memory
from hocket.loops.bounds import all_inside
from hocket.loops.choice import TiledOption, choose, work_s
from hocket.loops.compile import CompileOptions, compiled
from hocket.loops.flow import exposed_names, stored_names
from hocket.loops.form import Refusal
from hocket.loops.generate import KernelSource, list_kernel, range_kernel, serial_kernel
from hocket.loops.job import LoopJob
from hocket.loops.names import Number
from hocket.loops.rows import lowered
from hocket.loops.scope import Scope, data_scope, guessed_scope
from hocket.loops.settings import Settings
from hocket.loops.source import LoopSite, LoopSource
from hocket.loops.verdict import LoopVerdict, judge

Results = tuple[Any, ...]
_NEUTRAL = {"sum": 0, "product": 1}
_CHILD_S = 200e-6
"""What reaching a loop from Python costs."""


@dataclass(frozen=True)
class Decision:
    """What was decided for a loop: the chosen candidate, or why it runs serially."""

    site: LoopSite
    verdict: LoopVerdict
    candidate: TiledOption | None
    refusals: tuple[Refusal, ...]
    way: str
    """``parallel``, ``serial`` (compiled), ``inside`` (its inner loops are tried) or ``python``."""
    source: KernelSource | None = None
    options: CompileOptions = field(default_factory=CompileOptions)


@dataclass
class _Memory:
    decision: Decision
    content: dict[str, Any]


class SiteRunner:
    """One loop of one function."""

    def __init__(self, source: LoopSource, site: LoopSite, settings: Settings) -> None:
        self.source, self.site, self.settings = source, site, settings
        node = site.nest.node
        self._stored = stored_names([node])
        self.results = tuple(sorted(self._stored & site.nest.live_after))
        self._memories: dict[Any, _Memory] = {}
        self._verdicts: dict[Any, LoopVerdict] = {}
        self._sources: dict[Any, KernelSource] = {}
        self.last: Decision | None = None

    def run(self, variables: Mapping[str, Any]) -> Results | bool | None:
        """The loop's results; None: Python runs it and asks for its inner loops; False: alone."""
        values = self.values(variables)
        if values is None:
            return False
        owners = memory.owners(values)
        signature = _signature(values, owners)
        remembered = self._memories.get(signature)
        if remembered is None or not _same_content(remembered.content, values):
            decision = self.decide(values, owners)
            remembered = _Memory(decision, _content(decision, values))
            if len(self._memories) >= 16:
                self._memories.clear()
            self._memories[signature] = remembered
        self.last = decision = remembered.decision
        if decision.way == "inside":
            return None
        if decision.way == "python":
            return False
        try:
            if decision.way == "serial":
                return self._run_serial(decision, values)
            return self._run_parallel(decision, values, owners)
        except _not_compiled() as error:
            refusal = Refusal(f"the loop cannot be compiled: {_first_line(error)}", self.site.line)
            refusals = (*decision.refusals, refusal)
            remembered.decision = self.last = replace(decision, way="python", refusals=refusals)
            return False

    # ── deciding ────────────────────────────────────────────────────────────────────────────────

    def decide(self, values: Mapping[str, Any], owners: Mapping[str, str]) -> Decision:
        """Judge the loop for these values and choose how to run it."""
        scope = data_scope(values, owners, self.source.names)
        refusals: list[Refusal] = []
        verdict = LoopVerdict((), (), ())
        for use_segments in (True, False):
            verdict = self._judged(scope, values, owners, use_segments)
            refusals = list(verdict.refusals)
            candidate, more = self._candidate(verdict, values)
            refusals += more
            if candidate is not None:
                return self._parallel(verdict, candidate, refusals)
            if not any(reading.segments for reading in verdict.readings):
                break
        way = "inside" if self._inner_pays(verdict, values, scope) else "serial"
        source = None
        if way == "serial":
            source = self._serial_source(values)
            way = "serial" if source is not None else "python"
        return Decision(self.site, verdict, None, tuple(refusals), way, source)

    def _judged(
        self,
        scope: Scope,
        values: Mapping[str, Any],
        owners: Mapping[str, str],
        use_segments: bool,
    ) -> LoopVerdict:
        """The verdict depends on ranks, kinds and shared arrays, not on sizes or content."""
        key = (_signature(values, owners, with_sizes=False), use_segments)
        if key not in self._verdicts:
            self._verdicts[key] = judge(
                self.site.nest, scope, ordered=self.settings.ordered,
                permit=self.settings.permit, use_segments=use_segments,
            )  # fmt: skip
        return self._verdicts[key]

    def _candidate(
        self, verdict: LoopVerdict, values: Mapping[str, Any]
    ) -> tuple[TiledOption | None, list[Refusal]]:
        written = frozenset[str]().union(*(r.body.written for r in verdict.readings))
        try:
            memory.check_overlaps(values, written, self.site.line)
        except Refusal as refusal:
            return None, [refusal]
        return choose(verdict.options, values, self.settings.num_workers, self.settings.max_delay)

    def _parallel(
        self, verdict: LoopVerdict, candidate: TiledOption, refusals: list[Refusal]
    ) -> Decision:
        option = candidate.option
        reductions = [reduction.name for reduction in option.reading.reductions]
        given = candidate.space.values
        inputs = [name for name in self.site.inputs if name in given]
        arguments = [name for name in inputs if name not in reductions]
        # Rows that are written as loops depend on lengths and kinds.
        shapes = tuple(
            (value.shape[1:], value.dtype.str) if isinstance(value, np.ndarray) else None
            for value in (given[name] for name in inputs)
        )
        key = option.reading.depth, option.shape.is_listed, tuple(arguments), shapes
        if key not in self._sources:
            make = list_kernel if option.shape.is_listed else range_kernel
            levels = option.reading.levels
            rows = lowered(levels, given, self.source.names)
            self._sources[key] = make(
                levels, [*arguments, *reductions], reductions, self.source.names, rows
            )
        source = self._sources[key]
        options = CompileOptions(self.settings.fastmath, self._checks_bounds(candidate))
        return Decision(self.site, verdict, candidate, tuple(refusals), "parallel", source, options)

    def _checks_bounds(self, candidate: TiledOption) -> bool:
        return self.settings.check_bounds and not all_inside(candidate.space)

    def _serial_source(self, values: Mapping[str, Any]) -> KernelSource | None:
        node = self.site.nest.node
        arguments = [name for name in self.site.inputs if name in values]
        for name in self.results:
            if name in values and name not in arguments:
                arguments.append(name)
            elif name not in values:
                read = ast.Expr(ast.Name(name, ast.Load()))
                target = ast.Assign([node.target], ast.Constant(0))
                if name in exposed_names([target, *node.body, read]):
                    return None  # may stay unbound, which compiled code cannot say
        scalars = [name for name in self.results if not isinstance(values.get(name), np.ndarray)]
        try:
            return serial_kernel(self.site.nest.levels[0], arguments, scalars, self.source.names)
        except Refusal:
            return None

    def _inner_pays(self, verdict: LoopVerdict, values: Mapping[str, Any], scope: Scope) -> bool:
        """Whether a loop inside is parallel and long enough to be started from Python each time."""
        from hocket.loops.space import Space

        for child in self.site.children:
            nodes = [child.nest.node]
            guess = guessed_scope(nodes, child.inputs, self.source.names)
            arrays = {
                **guess.arrays,
                **{k: v for k, v in scope.arrays.items() if k in child.inputs},
            }
            scalars = {k: v for k, v in guess.scalars.items() if k not in arrays}
            known = Scope(arrays, scalars, self.source.names, is_guess=True)
            settings = self.settings
            inner = judge(child.nest, known, ordered=settings.ordered, permit=settings.permit)
            if not inner.is_parallel and not child.children:
                continue
            try:
                outer = len(Space.of(verdict.readings[0], values).outer) if verdict.readings else 0
                typical = self._typical(verdict, values, child)
                work = work_s(Space.of(inner.readings[0], typical))
            except (Refusal, IndexError, KeyError):
                continue
            if outer and work > 2 * _CHILD_S:
                return True
        return False

    def _typical(
        self, verdict: LoopVerdict, values: Mapping[str, Any], child: LoopSite
    ) -> dict[str, Any]:
        """Values in the middle of the outer loop, for guessing how long an inner loop is."""
        from hocket.loops.space import Space

        outer = Space.of(verdict.readings[0], values).outer
        middle = outer[len(outer) // 2]
        return {**values, self.site.nest.levels[0].name: middle}

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def values(self, variables: Mapping[str, Any]) -> dict[str, Any] | None:
        """The loop's inputs; None if one is no array or number of a kind that is understood."""
        found: dict[str, Any] = {}
        for name in dict.fromkeys((*self.site.inputs, *self.results)):
            if name in variables:
                value = variables[name]
            else:
                meaning = self.source.names.meaning(name)
                if not isinstance(meaning, Number):
                    value = None if name in self._stored else self._outside(name)
                    if value is None:
                        if name in self.site.inputs and name not in self._stored:
                            return None
                        continue
                else:
                    value = meaning.value
            if isinstance(value, np.ndarray):
                if (
                    value.dtype.kind not in "biufc"
                    or value.ndim == 0
                    or type(value) is not np.ndarray
                ):
                    return None
            elif not isinstance(value, (bool, int, float, np.number, np.bool_)):
                if name in self.site.inputs:
                    return None
                continue
            found[name] = value
        return found

    def _outside(self, name: str) -> Any:
        """A global array or number that the function reads."""
        return self.settings.outside(name) if self.settings.outside else None

    def _run_serial(self, decision: Decision, values: Mapping[str, Any]) -> Results:
        assert decision.source is not None
        options = replace(decision.options, fastmath=self.settings.fastmath)
        kernel = compiled(decision.source.text, options)
        found = kernel(*(values[name] for name in decision.source.arguments))
        given = dict(zip(decision.source.results, found if found else (), strict=True))
        return tuple(given.get(name, values.get(name)) for name in self.results)

    def _run_parallel(
        self, decision: Decision, values: Mapping[str, Any], owners: Mapping[str, str]
    ) -> Results:
        job = self.job(decision, values, owners)
        per_tile = self.settings.backend(job)
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
            neutral = _NEUTRAL.get(reduction.op)
            if neutral is not None:
                initial = values[reduction.name]
                started[reduction.name] = type(initial)(neutral)
        return LoopJob(
            decision.source, decision.options, tiling, started,
            tuple(sorted(option.private)), tuple(sorted(option.summed)),
            tuple(sorted(option.buffered)), _last_worker(decision.candidate),
            option.reading.body.written, owners,
        )  # fmt: skip

    def _combined(
        self, decision: Decision, values: Mapping[str, Any], per_tile: list[tuple[Any, ...]]
    ) -> Results:
        """Reductions of all tiles, in the order of tiles."""
        assert decision.candidate is not None
        totals: dict[str, Any] = {}
        for place, reduction in enumerate(decision.candidate.option.reading.reductions):
            total = values[reduction.name]
            combine = _COMBINE[reduction.op]
            for result in per_tile:
                if result:
                    total = combine(total, result[place])
            totals[reduction.name] = total
        return tuple(totals.get(name, values.get(name)) for name in self.results)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "max": lambda a, b: b if b > a else a,
    "min": lambda a, b: b if b < a else a,
    "or": lambda a, b: a | b,
    "and": lambda a, b: a & b,
}


def _last_worker(candidate: TiledOption) -> int:
    """Who runs the iteration that comes last in the serial order of the schedule."""
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


def _signature(
    values: Mapping[str, Any], owners: Mapping[str, str], *, with_sizes: bool = True
) -> Any:
    parts: list[Any] = []
    for name in sorted(values):
        value = values[name]
        if isinstance(value, np.ndarray):
            sizes = (value.shape, value.strides) if with_sizes else value.ndim
            parts.append((name, value.dtype.str, sizes, owners[name]))
        else:
            parts.append((name, type(value)))
    return tuple(parts)


def _content(decision: Decision, values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of all that the decision read: integer scalars, and arrays that are indices."""
    texts: set[str] = set()
    for reading in decision.verdict.readings:
        texts |= {str(part.text) for each in reading.ranges for part in each}
        texts |= {
            str(end) for loop in reading.body.inner.values() for end in (loop.start, loop.stop)
        }
        texts |= {atom.name for a in reading.body.accesses for s in a.subs
                  if s.index is not None for atom, _ in s.index.terms}  # fmt: skip
        texts |= {text for each in reading.segments for text in (each.start, each.stop)}
        texts |= {covers.stop for covers in reading.private.values() if covers is not None}
        texts |= set(reading.nonempty)
    used = {
        node.id
        for text in texts
        if "@" not in text
        for node in ast.walk(ast.parse(text, mode="eval"))
        if isinstance(node, ast.Name)
    }
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            if name in used and value.dtype.kind in "iub":
                found[name] = value.copy()
        elif name in used:
            found[name] = value
    return found


def _same_content(content: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(
        np.array_equal(value, values[name])
        if isinstance(value, np.ndarray)
        else value == values[name]
        for name, value in content.items()
    )


def _not_compiled() -> tuple[type[Exception], ...]:
    from numba.core.errors import NumbaError

    return (NumbaError, NotImplementedError)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
