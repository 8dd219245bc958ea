"""Decide how a loop of the user's function runs for the values of one call.

The verdict on the source is cached by the types, ranks and aliasing of the values. Its options are
cut into tiles for the data and the cheapest is chosen. The loop runs on one core if several workers
are predicted to be no faster, compiled if compiled code behaves like Python.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hocket.base.units import format_seconds
from hocket.loops import memory
from hocket.loops.choice import TiledOption, choose, work_s
from hocket.loops.compile import CompileOptions
from hocket.loops.evaluate import CannotEvaluate, number
from hocket.loops.exits import Loop, is_evaluable, not_compilable
from hocket.loops.faithful import Faithful
from hocket.loops.flow import exposed_names
from hocket.loops.form import Refusal
from hocket.loops.generate import KernelSource, list_kernel, range_kernel, serial_kernel
from hocket.loops.names import called_names, local_names
from hocket.loops.recall import content, sign, signature
from hocket.loops.rows import lowered
from hocket.loops.scope import Scope, data_scope, guessed_scope
from hocket.loops.settings import Settings
from hocket.loops.source import LoopSite, LoopSource
from hocket.loops.space import Space
from hocket.loops.verdict import LoopVerdict, judge

LEAST_SPEED_UP = 1.0
"""Least predicted speed-up over one core for which a loop runs on several workers."""
_CHILD_S = 200e-6
"""Seconds to enter a loop from Python."""


@dataclass(frozen=True)
class Decision:
    """Decision for a loop: the chosen candidate, or why it runs serially."""

    site: LoopSite
    verdict: LoopVerdict
    candidate: TiledOption | None
    refusals: tuple[Refusal, ...]
    execution: str
    """``parallel``, ``alone`` (one worker is faster), ``serial`` (compiled as written), ``inside``
    (its inner loops are tried) or ``python``."""
    source: KernelSource | None = None
    options: CompileOptions = field(default_factory=CompileOptions)
    through: Mapping[str, str] = field(default_factory=dict)
    """Arrays that are updated through tables, each with its rule."""


class LoopDecider:
    """Decides how one loop of one function runs."""

    def __init__(
        self, source: LoopSource, site: LoopSite, settings: Settings, results: Sequence[str]
    ) -> None:
        self.source, self.site, self.settings, self.results = source, site, settings, results
        node = site.nest.node
        self.knows_emptiness = isinstance(node, ast.For) and is_evaluable(node.iter)
        self._verdicts: dict[Any, LoopVerdict] = {}
        self._sources: dict[Any, KernelSource] = {}

    def decide(self, values: Mapping[str, Any], owners: Mapping[str, str]) -> Decision:
        """Analyse the loop for these values and choose how to run it."""
        site, may_share = self.site, self.settings.num_workers > 1
        scope = data_scope(values, owners, self.source.names)
        refusals: list[Refusal] = []
        verdict = LoopVerdict((), (), ())
        for use_segments in (True, False):
            verdict = self._judged(scope, values, owners, use_segments)
            refusals = list(verdict.refusals)
            candidate, more = self._candidate(verdict, values)
            refusals += more
            if candidate is not None:
                try:
                    alone = self._alone(verdict, candidate, values)
                    if alone is not None and may_share and self._inner_pays(site, values, scope):
                        break
                    return alone or self.parallel(verdict, candidate, refusals)
                except Refusal as refusal:
                    refusals.append(refusal)
                    return Decision(self.site, verdict, None, tuple(refusals), "python")
            if not any(reading.segments for reading in verdict.readings):
                break
        is_inside = may_share and self._inner_pays(site, values, scope)
        execution = "inside" if is_inside else "serial"
        source = None
        options = CompileOptions()
        if execution == "serial":
            source = self._serial_source(values)
            options = self._serial_options(verdict, values)
            execution = "serial" if source is not None else "python"
            different = not_compilable(self.site.nest.node)
            if different is not None:
                what, line = different
                refusals.append(Refusal(f"{what} at line {line} is run by Python only", line))
        return Decision(self.site, verdict, None, tuple(refusals), execution, source, options)

    def _judged(
        self,
        scope: Scope,
        values: Mapping[str, Any],
        owners: Mapping[str, str],
        use_segments: bool,
    ) -> LoopVerdict:
        """Return the verdict, cached by types, ranks and shared arrays: sizes do not matter."""
        key = (signature(values, owners, with_sizes=False), use_segments)
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

    def _alone(
        self, verdict: LoopVerdict, candidate: TiledOption, values: Mapping[str, Any]
    ) -> Decision | None:
        """Return a one-core decision if more workers are predicted to be no faster, or None."""
        num_workers = candidate.tiling.num_workers
        if num_workers == 1 and candidate.option.buffered:
            return None
        if num_workers > 1 and candidate.work_s >= LEAST_SPEED_UP * candidate.predicted_s:
            return None
        reason = (
            f"one core is predicted to take {format_seconds(candidate.work_s)}, "
            f"{num_workers} workers {format_seconds(candidate.predicted_s)}"
            if num_workers > 1
            else "there is one worker"
        )
        refusals = [Refusal(reason, self.site.line)]
        faithful = [option for option in verdict.options if not option.buffered]
        alone, _ = choose(faithful, values, 1, None)
        levels = candidate.option.reading.levels
        if alone is not None and lowered(levels, values, self.source.names) is not None:
            return replace(self.parallel(verdict, alone, refusals), execution="alone")
        source = self._serial_source(values)
        if source is None:
            return (
                replace(self.parallel(verdict, alone, refusals), execution="alone")
                if alone
                else None
            )
        options = self._serial_options(verdict, values)
        return Decision(self.site, verdict, None, tuple(refusals), "serial", source, options)

    def _serial_options(self, verdict: LoopVerdict, values: Mapping[str, Any]) -> CompileOptions:
        """Return compile options, without index checks if all indices are proven to be inside."""
        if not self.settings.check_bounds:
            return CompileOptions(boundscheck=False)
        for reading in verdict.readings[:1]:
            with contextlib.suppress(Refusal):
                space = Space.of(reading, values)
                # Index arrays are compared at every call, which must stay less than the loop.
                used = content([reading], values).values()
                num_compared = sum(each.size for each in used if isinstance(each, np.ndarray))
                if num_compared <= 4 * space.num_iterations and space.all_inside:
                    return CompileOptions(boundscheck=False)
        return CompileOptions()

    def parallel(
        self, verdict: LoopVerdict, candidate: TiledOption, refusals: list[Refusal]
    ) -> Decision:
        """Return the decision to run a candidate, with its kernel."""
        option = candidate.option
        reductions = [reduction.name for reduction in option.reading.reductions]
        given = candidate.space.values
        inputs = [name for name in self.site.inputs if name in given]
        arguments = [name for name in inputs if name not in reductions]
        # Rows that are written as loops depend on lengths and kinds, checks on signs.
        shapes = tuple(
            (value.shape[1:], value.dtype.str, value.ndim)
            if isinstance(value, np.ndarray)
            else (type(value), sign(value))
            for value in (given[name] for name in inputs)
        )
        key = option.reading.depth, option.shape.is_listed, tuple(arguments), shapes
        if key not in self._sources:
            make = list_kernel if option.shape.is_listed else range_kernel
            levels = option.reading.levels
            rows = lowered(levels, given, self.source.names)
            faithful = Faithful(given, self.source.names, self.settings.ordered)
            self._sources[key] = make(levels, [*arguments, *reductions], reductions, faithful, rows)
        source = self._sources[key]
        options = CompileOptions(self.settings.fastmath, self._checks_bounds(candidate))
        return Decision(
            self.site, verdict, candidate, tuple(refusals), "parallel", source, options,
            self.settings.through,
        )  # fmt: skip

    def _checks_bounds(self, candidate: TiledOption) -> bool:
        return self.settings.check_bounds and not candidate.space.all_inside

    def _serial_source(self, values: Mapping[str, Any]) -> KernelSource | None:
        """Return the kernel of the loop as written; None if Python would behave differently."""
        node = self.site.nest.node
        if not_compilable(node) is not None or called_names(node) & local_names(self.source.node):
            return None
        results = frozenset(self.results).union(*(leave.names for leave in self.site.exits))
        if any(isinstance(values.get(name), np.ndarray) for name in _rebound(node, results)):
            return None  # compiled code gives back numbers, and arrays only in place
        arguments = [name for name in self.site.inputs if name in values]
        for leave in self.site.exits:
            if any(name in self.site.inputs and name not in values for name in leave.names):
                return None  # may be unbound where it is returned
        for name in self.results:
            if name in values and name not in arguments:
                arguments.append(name)
            elif name not in values and (not self.knows_emptiness or self._may_stay_unbound(name)):
                return None
        scalars = [name for name in self.results if not isinstance(values.get(name), np.ndarray)]
        try:
            faithful = Faithful(values, self.source.names, self.settings.ordered)
            source = serial_kernel(node, self.site.exits, arguments, scalars, faithful)
        except Refusal:
            return None
        # Compiled code draws from a generator of its own, which the program's seed does not reach.
        return None if "random." in source.text else source

    def _may_stay_unbound(self, name: str) -> bool:
        """True if a name may be unbound after a loop that ran, which compiled code cannot express.

        An empty loop is left to Python, see `SiteRunner`.
        """
        node = self.site.nest.node
        read = ast.Expr(ast.Name(name, ast.Load()))
        return name in exposed_names([node, read], lambda loop: loop is node)

    def _inner_pays(self, site: LoopSite, values: Mapping[str, Any], scope: Scope) -> bool:
        """True if an inner loop is parallel and long enough to be started from Python each time."""
        settings = self.settings
        known = {**values, **_middle(site, values)}
        for child in site.children:
            guess = guessed_scope([child.nest.node], child.inputs, self.source.names)
            arrays = {**guess.arrays, **scope.only(child.inputs)}
            scalars = {k: v for k, v in guess.scalars.items() if k not in arrays}
            inner = judge(
                child.nest, Scope(arrays, scalars, self.source.names),
                ordered=settings.ordered, permit=settings.permit,
            )  # fmt: skip
            # The deepest reading knows the lengths of most loops.
            for option in inner.options[-1:]:
                with contextlib.suppress(Refusal, IndexError, KeyError):
                    if work_s(Space.of(option.reading, known)) > 2 * _CHILD_S:
                        return True
            if self._inner_pays(child, known, scope):
                return True
        return False


def _middle(site: LoopSite, values: Mapping[str, Any]) -> dict[str, int]:
    """Middle value of the loop's variable, used to estimate the lengths of inner loops."""
    node = site.nest.node
    if not isinstance(node, ast.For) or not site.nest.levels:
        return {}
    try:
        head = [number(ast.unparse(part), values) for part in node.iter.args]  # type: ignore[attr-defined]
        outer = range(*head)
    except (CannotEvaluate, AttributeError, TypeError):
        return {}
    return {site.nest.levels[0].name: outer[len(outer) // 2]} if outer else {}


def _rebound(node: Loop, names: frozenset[str]) -> frozenset[str]:
    """Those of ``names`` that a loop binds to a new object instead of updating in place."""
    updated = {id(part.target) for part in ast.walk(node) if isinstance(part, ast.AugAssign)}
    return frozenset(
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name)
        and isinstance(part.ctx, ast.Store)
        and part.id in names
        and id(part) not in updated
    )
