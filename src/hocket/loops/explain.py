"""Describe a function's loops: dependence vectors, schedule, bytes, speed-up and refusals."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base.units import format_bytes, format_seconds
from hocket.loops import memory
from hocket.loops.decide import Decision, Settings
from hocket.loops.evaluate import CannotEvaluate, evaluate
from hocket.loops.faithful import Deviation, deviations_of
from hocket.loops.form import Atom, Refusal
from hocket.loops.nest import Reading
from hocket.loops.scope import Scope, guessed_scope
from hocket.loops.source import LoopSite, LoopSource
from hocket.loops.verdict import LoopOption, judge

if TYPE_CHECKING:
    from hocket.loops.choice import TiledOption
    from hocket.loops.function import ParallelFunction
    from hocket.loops.runner import SiteRunner

_SCHEDULES = {
    "independent": "independent: no two iterations meet; the loop is cut into equal parts",
    "1d": "1-D by {space}: iterations that meet have the same {space}",
    "rotation": "2-D rotation: {space} stays with its worker, {time} goes round",
    "wavefront": "2-D wavefront over ({space}, {time}), in the loop's own order",
    "skewed": "skewed wavefront over ({space}, {time} + {skew} {space}), in the loop's own order",
    "serial": "serial, compiled",
    "inside": "serial in Python; the loops inside it are run in parallel",
    "python": "serial in Python, as written",
}
_MEETING = "independent but for {arrays}, see below; the loop is cut into equal parts"
"""Text for iterations that conflict only in arrays of which each worker has a replica."""


@dataclass(frozen=True)
class LoopExplanation:
    """One loop: its analysis and the chosen schedule."""

    decision: Decision
    option: LoopOption | None
    deviations: tuple[Deviation, ...] = ()
    """Operations whose compiled form may give other bits than the plain loop."""
    rates: Mapping[str, float | None] = field(default_factory=dict)
    """Arrays that are updated through tables."""

    @property
    def candidate(self) -> TiledOption | None:
        """The option with its tiles; None if the loop runs serially or there are no data."""
        return self.decision.candidate

    @property
    def schedule(self) -> str:
        """Name of the schedule: ``rotation``, ``serial``, ..."""
        return self.decision.execution if self.option is None else self.option.shape.kind

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The analysis at the depth of the schedule, or the deepest one."""
        if self.option is not None:
            return (self.option.reading,)
        return self.decision.verdict.readings[-1:]

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``."""
        option, candidate = self.option, self.candidate
        found: dict[str, Any] = {
            "line": self.decision.site.line,
            "schedule": self.schedule,
            "vectors": [
                {
                    "array": vector.first.array,
                    "vector": vector.text(reading.atoms),
                    "dimensions": [atom.name for atom in reading.atoms],
                    "accesses": [vector.first.label, vector.second.label],
                }
                for reading in self.readings
                for vector in reading.vectors
            ],
            "refusals": [
                {"reason": r.reason, "lines": list(r.lines)} for r in self.decision.refusals
            ],
            "deviations": [{"what": d.what, "line": d.line} for d in self.deviations],
        }
        if option is not None:
            found |= {
                "space": _name(option.shape.space),
                "time": _name(option.shape.time),
                "skew": option.shape.skew,
                "exact": option.is_exact,
                "private": sorted(option.private),
                "summed": sorted(option.summed),
                "buffered": sorted(option.buffered),
            }
        if candidate is not None:
            found |= {
                "workers": candidate.tiling.num_workers,
                "iterations": candidate.space.num_iterations,
                "tiles": len(candidate.tiling.tiles),
                "steps": candidate.tiling.num_steps,
                "imbalance": candidate.tiling.imbalance,
                "moved_bytes": candidate.moved_bytes,
                "predicted_s": candidate.predicted_s,
                "predicted_speed_up": candidate.speed_up,
            }
        return found

    def lines(self) -> Iterable[str]:
        """Return the explanation as lines of text."""
        yield f"loop at line {self.decision.site.line}"
        for reading in self.readings:
            dims = ", ".join(atom.name for atom in reading.atoms)
            if reading.vectors:
                yield f"  dependences over ({dims})"
            for vector in reading.vectors:
                pair = f"{vector.first.label} - {vector.second.label}"
                yield f"    {vector.text(reading.atoms):12} {vector.first.array}: {pair}"
        yield f"  schedule: {self._sentence()}"
        for deviation in self.deviations:
            yield f"  other bits: {deviation.what} (line {deviation.line})"
        if self.option is not None:
            yield from self._notes(self.option)
        if self.candidate is not None:
            yield _numbers(self.candidate)
        prefix = "not better because" if self.option else "because"
        for refusal in self.decision.refusals:
            yield f"  {prefix} {refusal.reason}"
        arrays = self.decision.verdict.to_permit
        if self.option is None and arrays:
            written = " or ".join(f'permit={{"{array}": "buffer"}}' for array in arrays)
            yield f"  hint: if the algorithm tolerates late updates: {written}"

    def _sentence(self) -> str:
        text, option = _SCHEDULES[self.schedule], self.option
        if option is not None:
            met = sorted({vector.first.array for vector in option.reading.vectors})
            if option.shape.kind == "independent" and met:
                text = _MEETING.format(arrays=" and ".join(met))
            shape = option.shape
            names = {"space": _name(shape.space), "time": _name(shape.time), "skew": shape.skew}
            text = text.format(**names)
        if self.schedule == "serial" or (option is not None and option.is_exact):
            text += "; same bits as the plain loop"
            text += " but for what is named below" if self.deviations else ""
        return text

    def _notes(self, option: LoopOption) -> Iterator[str]:
        tabled = option.buffered & self.rates.keys()
        revised = {name for name in tabled if self.rates[name] is not None}
        for names, what in (
            (option.private, "scratch, one per worker"),
            (option.summed, "summed per worker, added in a fixed order"),
            (option.buffered - tabled, "buffered: other workers see changes at the next step"),
            (tabled - revised, "through a table: others see changes at most a step late"),
            (revised, "through a table, revised: changes are gradients, steps are AdaGrad's"),
            ({r.name for r in option.reading.reductions}, "reduced in a fixed order"),
        ):
            if names:
                yield f"  {', '.join(sorted(names))}: {what}"


@dataclass(frozen=True)
class FunctionExplanation:
    """Explanations of all loops of a function."""

    name: str
    place: str
    loops: tuple[LoopExplanation, ...]
    with_data: bool

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.place})"]
        if not self.with_data:
            lines[0] += ", from the source alone"
        for loop in self.loops:
            lines += list(loop.lines())
        if not self.with_data and any(loop.option is None for loop in self.loops):
            lines.append(
                "hint: types and ranks of the arguments were guessed; --data arguments.npz gives "
                "them, and more may be proven"
            )
        if not self.loops:
            lines.append("no loop that could be run in parallel")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``."""
        return {
            "function": self.name,
            "file": self.place,
            "with_data": self.with_data,
            "loops": [loop.as_dict() for loop in self.loops],
        }


def _numbers(candidate: TiledOption) -> str:
    tiling = candidate.tiling
    return (
        f"  {candidate.space.num_iterations:,} iterations in {len(tiling.tiles)} tiles on "
        f"{tiling.num_workers} workers, imbalance {tiling.imbalance:.3f}, "
        f"{format_bytes(candidate.moved_bytes)} moved per pass; predicted "
        f"{format_seconds(candidate.predicted_s)} per pass, {candidate.speed_up:.2f}x one worker"
    )


def _name(atom: Atom | None) -> str:
    return atom.name if atom is not None else ""


def explain_source(source: LoopSource, settings: Settings) -> FunctionExplanation:
    """Explain from the source alone; ranks are guessed, and conditions on data are assumed to
    hold."""
    loops = [loop for site in source.sites for loop in _from_source(site, source, settings)]
    return FunctionExplanation(source.node.name, source.place, tuple(loops), with_data=False)


def _from_source(
    site: LoopSite, source: LoopSource, settings: Settings
) -> Iterator[LoopExplanation]:
    scope = guessed_scope([source.node], site.inputs, source.names)
    verdict = judge(site.nest, scope, ordered=settings.ordered, permit=settings.permit)
    option = min(verdict.options, key=_preference, default=None)
    execution = "parallel" if option else "serial"
    decision = Decision(site, verdict, None, verdict.refusals, execution)
    deviations = _guessed_deviations(site, scope, source, settings)
    yield LoopExplanation(decision, option, deviations, settings.rates)
    if option is None:
        for child in site.children:
            yield from _from_source(child, source, settings)


def _guessed_deviations(
    site: LoopSite, scope: Scope, source: LoopSource, settings: Settings
) -> tuple[Deviation, ...]:
    """Deviations for arrays of 64-bit floats, which are assumed because types are unknown without
    data.
    """
    arrays = {name: np.zeros((1,) * info.rank) for name, info in scope.arrays.items()}
    is_exact = settings.ordered
    with contextlib.suppress(Refusal):
        return tuple(deviations_of([site.nest.node], arrays, source.names, is_exact=is_exact))
    return ()


def _preference(option: LoopOption) -> tuple[bool, bool, int]:
    return bool(option.buffered), not option.is_exact, list(_SCHEDULES).index(option.shape.kind)


def explain_call(
    function: ParallelFunction[Any, Any], args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]
) -> FunctionExplanation:
    """Explain with data: the given arguments, or those of the last call if ``args`` is None."""
    if args is None:
        return _explained(function.source, function.decisions(), function.settings)
    bound = inspect.signature(function.function).bind(*args, **kwargs)
    bound.apply_defaults()
    return explain_data(function.source, function.settings, function.runners, bound.arguments)


def explain_data(
    source: LoopSource,
    settings: Settings,
    runners: Mapping[int, SiteRunner],
    variables: Mapping[str, Any],
) -> FunctionExplanation:
    """Decide each loop whose inputs follow from the arguments alone; nothing is executed."""
    decisions = []
    for site in source.sites:
        known = {**_set_before(source, site, variables), **variables}
        with contextlib.suppress(Refusal):  # what is made before the loop is not made here
            values = runners[site.number].values(known)
            decisions.append(runners[site.number].decide(values, memory.owners(values)))
    return _explained(source, decisions, settings)


def _explained(
    source: LoopSource, decisions: Iterable[Decision], settings: Settings
) -> FunctionExplanation:
    loops = tuple(
        LoopExplanation(
            decision,
            decision.candidate.option if decision.candidate is not None else None,
            decision.source.deviations if decision.source is not None else (),
            settings.rates,
        )
        for decision in decisions
    )
    return FunctionExplanation(source.node.name, source.place, loops, with_data=True)


def _set_before(source: LoopSource, site: LoopSite, known: Mapping[str, Any]) -> dict[str, Any]:
    """Values of plain assignments before the loop (shapes, lengths, numbers), without calls."""
    found: dict[str, Any] = {}
    for statement in source.node.body:
        if statement is site.nest.node:
            break
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(value)):
                found[name] = value
            case ast.Assign([ast.Name(name)], value):
                with contextlib.suppress(CannotEvaluate):
                    found[name] = evaluate(value, {**known, **found})
            case ast.Assign([ast.Tuple(elts)], ast.Attribute(ast.Name(base), "shape")):
                shape = getattr(known.get(base), "shape", ())
                for element, length in zip(elts, shape, strict=False):
                    if isinstance(element, ast.Name):
                        found[element.id] = length
            case _:
                pass
    return found
