"""Decide how a loop of the user's function runs for the values of one call.

The verdict on the source is cached by the types, ranks and aliasing of the values. Its options are
cut into tiles for the data, and the cheapest is chosen. If several workers are predicted to be no
faster than one core, the loop runs on one core: compiled if compiled code behaves like Python, else
in Python.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.base.units import format_seconds
from hocket.loops import memory
from hocket.loops.choice import TiledOption, choose, work_s
from hocket.loops.compile import CompileOptions
from hocket.loops.decision_cache import MAX_ENTRIES, content, sign
from hocket.loops.evaluate import CannotEvaluate, loop_range
from hocket.loops.exits import not_compilable
from hocket.loops.faithful import Faithful
from hocket.loops.flow import bound_by_iteration
from hocket.loops.form import Refusal
from hocket.loops.generate import KernelSource, list_kernel, range_kernel, serial_kernel
from hocket.loops.job import LoopJob
from hocket.loops.names import called_names
from hocket.loops.scope import Scope, data_scope, guessed_scope
from hocket.loops.source import LoopSite, LoopSource
from hocket.loops.space import Space
from hocket.loops.verdict import LoopVerdict, judge

LEAST_SPEED_UP = 1.0
"""Minimum predicted speed-up over one core for which a loop runs on several workers."""
_CHILD_S = 200e-6
"""Seconds to enter a loop from Python."""
_JUDGE_S = 4e-3
"""Seconds to enter a loop that must be analysed anew each time.

The analysis takes 0.6 ms, but the time of a loop that the compiler vectorises may be overestimated
eightfold.
"""


@dataclass(frozen=True)
class Settings:
    """The arguments of ``parallel_for``, checked and with defaults filled in."""

    num_workers: int
    backend: Callable[[LoopJob], list[tuple[Any, ...]]]
    ordered: bool = False
    """True if dependent iterations must run in the order of the loop."""
    permit: tuple[str, ...] = ()
    """Arrays whose updates other workers may see late."""
    rates: Mapping[str, float | None] = field(default_factory=dict)
    """Permitted arrays that are updated through tables, with the step size of adaptive revision;
    None means plain addition.
    """
    max_delay: int | None = None
    """Iterations of one worker between two exchanges of buffered arrays; None for a default."""
    fastmath: bool = False
    outside: Callable[[str], Any] | None = None
    """Returns the current value of a name outside the function."""


@dataclass(frozen=True)
class Decision:
    """Decision for a loop: the chosen candidate, or the reasons to run it serially."""

    site: LoopSite
    verdict: LoopVerdict
    candidate: TiledOption | None
    refusals: tuple[Refusal, ...]
    execution: str
    """``parallel``, ``serial`` (compiled as written), ``inside`` (inner loops are tried) or
    ``python``.
    """
    source: KernelSource | None = None
    options: CompileOptions = field(default_factory=CompileOptions)

    def in_python(self, reason: Refusal) -> Decision:
        """Copy of the decision that runs the loop in Python, with one more reason."""
        refusals = (*self.refusals, reason)
        return Decision(self.site, self.verdict, None, refusals, "python")


class LoopDecider:
    """Decides how one loop of one function runs."""

    def __init__(
        self, source: LoopSource, site: LoopSite, settings: Settings, results: Sequence[str]
    ) -> None:
        self.source, self.site, self.settings, self.results = source, site, settings, results
        self._verdicts: dict[Any, LoopVerdict] = {}
        self._sources: dict[Any, KernelSource] = {}

    def decide(self, values: Mapping[str, Any], owners: Mapping[str, str]) -> Decision:
        """Analyse the loop for these values and choose how to run it."""
        scope = data_scope(values, owners, self.source.names)
        verdict = self._judged(scope)
        refusals = list(verdict.refusals)
        candidate, more = self._candidate(verdict, values)
        refusals += more
        if candidate is not None:
            slow = self._too_slow(candidate)
            try:
                if slow is None:
                    return self.parallel(verdict, candidate, refusals)
                refusals = [slow]
            except Refusal as refusal:
                refusals.append(refusal)
        # Inner loops on all cores are faster than the whole loop compiled on one core.
        if self.settings.num_workers > 1 and self._inner_pays(self.site, values, scope):
            return Decision(self.site, verdict, None, tuple(refusals), "inside")
        different = not_compilable(self.site.nest.node)
        if different is not None:
            what, line = different
            refusals.append(Refusal(f"{what} at line {line} is run by Python only", line))
        source = None if different else self._serial_source(values)
        options = self._serial_options(verdict, values)
        execution = "serial" if source is not None else "python"
        return Decision(self.site, verdict, None, tuple(refusals), execution, source, options)

    def _judged(self, scope: Scope) -> LoopVerdict:
        """Verdict for a scope, cached by types, ranks and shared arrays; sizes do not matter for
        it.
        """
        key = tuple(scope.arrays.items()), tuple(scope.scalars.items())
        if key not in self._verdicts:
            self._verdicts[key] = judge(
                self.site.nest, scope, ordered=self.settings.ordered, permit=self.settings.permit
            )
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

    def _too_slow(self, candidate: TiledOption) -> Refusal | None:
        """Reason to use one core, if more workers are predicted to be no faster; None otherwise."""
        num_workers, alone_s = candidate.tiling.num_workers, candidate.work_s
        if num_workers == 1:
            is_needed = candidate.option.buffered
            return None if is_needed else Refusal("there is one worker", self.site.line)
        if alone_s >= LEAST_SPEED_UP * candidate.predicted_s:
            return None
        return Refusal(
            f"one core is predicted to take {format_seconds(alone_s)}, "
            f"{num_workers} workers {format_seconds(candidate.predicted_s)}",
            self.site.line,
        )

    def _serial_options(self, verdict: LoopVerdict, values: Mapping[str, Any]) -> CompileOptions:
        """Compile options; index checks are omitted if all indices are proven to be in range."""
        checks_bounds = True
        for reading in verdict.readings[:1]:
            with contextlib.suppress(Refusal):
                space = Space.of(reading, values)
                # Reusing the decision compares index arrays at every call, which must take less
                # time than the loop itself.
                used = content([reading], values).values()
                num_compared = sum(each.size for each in used if isinstance(each, np.ndarray))
                checks_bounds = num_compared > 4 * space.num_iterations or not space.all_inside
        return CompileOptions(self.settings.fastmath, checks_bounds)

    def parallel(
        self, verdict: LoopVerdict, candidate: TiledOption, refusals: list[Refusal]
    ) -> Decision:
        """Decision to run a candidate, with its kernel."""
        option, values = candidate.option, candidate.space.values
        reductions = [reduction.name for reduction in option.reading.reductions]
        inputs = [name for name in self.site.inputs if name in values]
        arguments = [name for name in inputs if name not in reductions]
        # Row loops in the kernel depend on lengths and dtypes, and omitted checks on the signs of
        # numbers.
        shapes = tuple(
            (value.shape[1:], value.dtype.str, value.ndim)
            if isinstance(value, np.ndarray)
            else (type(value), sign(value))
            for value in (values[name] for name in inputs)
        )
        key = option.reading.depth, option.shape.is_listed, tuple(arguments), shapes
        if key not in self._sources:
            make = list_kernel if option.shape.is_listed else range_kernel
            faithful = Faithful(values, self.source.names, self.settings.ordered)
            names = [*arguments, *reductions]
            self._sources[key] = make(option.reading.levels, names, reductions, faithful)
        options = CompileOptions(self.settings.fastmath, not candidate.space.all_inside)
        source = self._sources[key]
        found = tuple(refusals)
        return Decision(self.site, verdict, candidate, found, "parallel", source, options)

    def _serial_source(self, values: Mapping[str, Any]) -> KernelSource | None:
        """Kernel of the loop as written; None if compiled code would behave differently from
        Python.
        """
        node, site = self.site.nest.node, self.site
        # The kernel's module cannot see functions that are defined inside this one.
        if called_names(node) & self.source.names.local:
            return None
        leaving = {name for leave in site.exits for name in leave.names}
        if any(isinstance(values.get(name), np.ndarray) for name in self._rebound(leaving)):
            return None  # compiled code gives back numbers, and arrays only in place
        if (leaving & set(site.inputs)) - values.keys():
            return None  # may be unbound where it is returned
        unbound = set(self.results) - values.keys()
        if unbound:
            # Python runs an empty loop, which binds nothing; see `SiteRunner`.
            bound = bound_by_iteration(node) if isinstance(node, ast.For) else frozenset()
            if bound is not None and not unbound <= bound:
                return None
        arguments = [name for name in (*site.inputs, *self.results) if name in values]
        scalars = [name for name in self.results if not isinstance(values.get(name), np.ndarray)]
        faithful = Faithful(values, self.source.names, self.settings.ordered)
        try:
            source = serial_kernel(
                node, site.exits, list(dict.fromkeys(arguments)), scalars, faithful,
                has_row_loops=not memory.shared_pairs(values),
            )  # fmt: skip
        except Refusal:
            return None
        # Compiled code has a random generator of its own, which the program's seed does not set.
        return None if "random." in source.text else source

    def _rebound(self, leaving: set[str]) -> set[str]:
        """Names read later that the loop binds to new objects, in contrast to in-place updates."""
        every = list(ast.walk(self.site.nest.node))
        updated = [part.target for part in every if isinstance(part, ast.AugAssign)]
        bound = {
            part.id
            for part in every
            if isinstance(part, ast.Name)
            and isinstance(part.ctx, ast.Store)
            and part not in updated
        }
        return bound & {*self.results, *leaving}

    def _inner_pays(
        self, site: LoopSite, values: Mapping[str, Any], scope: Scope,
        changing: frozenset[str] = frozenset(),
    ) -> bool:  # fmt: skip
        """True if an inner loop is parallel and long enough to be started from Python each time.

        ``changing`` are variables of outer loops that take more values than there are cached
        decisions.
        """
        settings = self.settings
        known = dict(values)
        node = site.nest.node
        with contextlib.suppress(CannotEvaluate):
            if isinstance(node, ast.For) and (outer := loop_range(node, values)):
                # The middle value of the variable gives typical lengths of inner loops.
                known[ast.unparse(node.target)] = outer[len(outer) // 2]
                changing |= {ast.unparse(node.target)} if len(outer) > MAX_ENTRIES else set()
        for child in site.children:
            guess = guessed_scope([child.nest.node], child.inputs, self.source.names)
            # Names that the outer loop binds have no value yet, so their ranks are guessed.
            arrays = {**guess.arrays, **scope.only(child.inputs)}
            scalars = {k: v for k, v in guess.scalars.items() if k not in arrays}
            inner = judge(
                child.nest, Scope(arrays, scalars, self.source.names),
                ordered=settings.ordered, permit=settings.permit,
            )  # fmt: skip
            # The deepest analysis knows the lengths of most loops.
            for option in inner.options[-1:]:
                with contextlib.suppress(Refusal, IndexError, KeyError):
                    is_judged = changing & content([option.reading], known).keys()
                    enter_s = _JUDGE_S if is_judged else _CHILD_S
                    if work_s(Space.of(option.reading, known)) > 2 * enter_s:
                        return True
            if self._inner_pays(child, known, scope, changing):
                return True
        return False
