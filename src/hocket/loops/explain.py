"""Describe a function's loops: dependence vectors, schedule, bytes, speed-up and refusals."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base.units import format_bytes, format_seconds
from hocket.loops import memory
from hocket.loops.choice import TiledOption
from hocket.loops.evaluate import CannotEvaluate, evaluate
from hocket.loops.faithful import Deviation, deviations_of
from hocket.loops.form import Refusal
from hocket.loops.nest import Reading
from hocket.loops.scope import Scope, guessed_scope
from hocket.loops.source import LoopSite, LoopSource
from hocket.loops.verdict import LoopOption, LoopVerdict, judge

if TYPE_CHECKING:
    from hocket.loops.decide import Decision
    from hocket.loops.function import ParallelFunction
    from hocket.loops.runner import SiteRunner

_WORDS = {
    "independent": "independent: no two iterations meet; the loop is cut into equal parts",
    "1d": "1-D by {space}: iterations that meet have the same {space}",
    "rotation": "2-D rotation: {space} stays with its worker, {time} goes round",
    "wavefront": "2-D wavefront over ({space}, {time}), in the loop's own order",
    "skewed": "skewed wavefront over ({space}, {time} + {skew} {space}), in the loop's own order",
}
_MEETING = "independent but for {arrays}, see below; the loop is cut into equal parts"
"""Text for iterations that conflict only in arrays replicated per worker."""


@dataclass(frozen=True)
class LoopExplanation:
    """One loop: its analysis and the chosen schedule."""

    line: int
    verdict: LoopVerdict
    option: LoopOption | None
    candidate: TiledOption | None
    refusals: tuple[Refusal, ...]
    execution: str
    through: Mapping[str, str] = field(default_factory=dict)
    """Arrays that are updated through tables."""
    deviations: tuple[Deviation, ...] = ()
    """Operations whose compiled form may give other bits than the plain loop."""

    @property
    def schedule(self) -> str:
        """Name of the schedule: ``rotation``, ``serial``, ..."""
        if self.option is None:
            return self.execution
        return self.option.shape.kind

    def as_dict(self) -> dict[str, Any]:
        """Return the data for ``--json``."""
        found: dict[str, Any] = {
            "line": self.line,
            "schedule": self.schedule,
            "vectors": [
                {
                    "array": vector.first.array,
                    "vector": vector.text(reading.atoms),
                    "dimensions": [atom.name for atom in reading.atoms],
                    "accesses": [vector.first.label, vector.second.label],
                }
                for reading in self._readings()
                for vector in reading.vectors
            ],
            "refusals": [{"reason": r.reason, "lines": list(r.lines)} for r in self.refusals],
            "deviations": [{"what": d.what, "line": d.line} for d in self.deviations],
        }
        if self.option is not None:
            found |= {
                "space": _name(self.option.shape.space),
                "time": _name(self.option.shape.time),
                "skew": self.option.shape.skew,
                "exact": self.option.is_exact,
                "private": sorted(self.option.private),
                "summed": sorted(self.option.summed),
                "buffered": sorted(self.option.buffered),
            }
        if self.candidate is not None:
            found |= {
                "workers": self.candidate.tiling.num_workers,
                "iterations": self.candidate.space.num_iterations,
                "tiles": len(self.candidate.tiling.tiles),
                "steps": self.candidate.tiling.num_steps,
                "imbalance": self.candidate.tiling.imbalance,
                "moved_bytes": self.candidate.moved_bytes,
                "predicted_s": self.candidate.predicted_s,
                "predicted_speed_up": self.candidate.speed_up,
            }
        return found

    def _readings(self) -> Iterable[Reading]:
        if self.option is not None:
            return [self.option.reading]
        return self.verdict.readings[-1:]

    def lines(self) -> Iterable[str]:
        """Return the explanation as lines of text."""
        yield f"loop at line {self.line}"
        for reading in self._readings():
            dims = ", ".join(atom.name for atom in reading.atoms)
            if reading.vectors:
                yield f"  dependences over ({dims})"
            for vector in reading.vectors:
                pair = f"{vector.first.label} - {vector.second.label}"
                yield f"    {vector.text(reading.atoms):12} {vector.first.array}: {pair}"
        yield f"  schedule: {self._sentence()}"
        for deviation in self.deviations:
            yield f"  other bits: {deviation.what} (line {deviation.line})"
        yield from self._notes()
        if self.candidate is not None:
            yield _numbers(self.candidate)
        for refusal in self.refusals:
            yield (
                f"  not better because {refusal.reason}"
                if self.option
                else (f"  because {refusal.reason}")
            )
        if self.option is None and self.verdict.to_permit:
            yield f"  hint: {_permission(self.verdict.to_permit)}"

    def _sentence(self) -> str:
        if self.option is None:
            return {
                "serial": f"serial, compiled{self._same_bits()}",
                "inside": "serial in Python; the loops inside it are run in parallel",
                "python": "serial in Python, as written",
            }[self.execution]
        shape = self.option.shape
        names = {"space": _name(shape.space), "time": _name(shape.time), "skew": shape.skew}
        exact = self._same_bits() if self.option.is_exact else ""
        met = sorted({vector.first.array for vector in self.option.reading.vectors})
        if shape.kind == "independent" and met:
            words = _MEETING.format(arrays=" and ".join(met))
        else:
            words = _WORDS[shape.kind].format(**names)
        return words + exact

    def _same_bits(self) -> str:
        where = " but for what is named below" if self.deviations else ""
        return f"; same bits as the plain loop{where}"

    def _notes(self) -> Iterable[str]:
        if self.option is None:
            return
        tabled = {name for name in self.option.buffered if name in self.through}
        revised = {name for name in tabled if self.through[name] == "revise"}
        for names, what in (
            (self.option.private, "scratch, one per worker"),
            (self.option.summed, "summed per worker, added in a fixed order"),
            (
                self.option.buffered - tabled,
                "buffered: other workers see changes at the next step",
            ),
            (tabled - revised, "through a table: others see changes at most a step late"),
            (revised, "through a table, revised: changes are gradients, steps are AdaGrad's"),
            ({r.name for r in self.option.reading.reductions}, "reduced in a fixed order"),
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


def _permission(arrays: tuple[str, ...]) -> str:
    written = " or ".join(f'permit={{"{array}": "buffer"}}' for array in arrays)
    return f"if the algorithm tolerates late updates: {written}"


def _numbers(candidate: TiledOption) -> str:
    tiling = candidate.tiling
    return (
        f"  {candidate.space.num_iterations:,} iterations in {len(tiling.tiles)} tiles on "
        f"{tiling.num_workers} workers, imbalance {tiling.imbalance:.3f}, "
        f"{format_bytes(candidate.moved_bytes)} moved per pass; predicted "
        f"{format_seconds(candidate.predicted_s)} per pass, {candidate.speed_up:.2f}x one worker"
    )


def _name(atom: Any) -> str:
    return atom.name if atom is not None else ""


def explain_source(
    source: LoopSource,
    *,
    ordered: bool = False,
    permit: Iterable[str] = (),
    through: Mapping[str, str] | None = None,
) -> FunctionExplanation:
    """Explain from the source alone: ranks are guessed, conditions on data are assumed to hold."""
    loops: list[LoopExplanation] = []
    for site in source.sites:
        loops += _from_source(site, source, ordered, tuple(permit))
    loops = [replace(loop, through=through or {}) for loop in loops]
    return FunctionExplanation(source.name, source.place, tuple(loops), with_data=False)


def _from_source(
    site: LoopSite, source: LoopSource, ordered: bool, permit: tuple[str, ...]
) -> list[LoopExplanation]:
    scope = guessed_scope([source.node], site.inputs, source.names)
    verdict = judge(site.nest, scope, ordered=ordered, permit=permit)
    option = min(verdict.options, key=_preference, default=None)
    execution = "parallel" if option else "serial"
    deviations = _guessed_deviations(site, scope, source, ordered)
    loops = [
        LoopExplanation(
            site.line, verdict, option, None, verdict.refusals, execution, deviations=deviations
        )
    ]
    if option is None:
        for child in site.children:
            loops += _from_source(child, source, ordered, permit)
    return loops


def _guessed_deviations(
    site: LoopSite, scope: Scope, source: LoopSource, ordered: bool
) -> tuple[Deviation, ...]:
    """Deviations if all arrays hold 64-bit floats, as types are unknown without data."""
    arrays = {name: np.zeros((1,) * info.rank) for name, info in scope.arrays.items()}
    try:
        return tuple(deviations_of([site.nest.node], arrays, source.names, is_exact=ordered))
    except Refusal:
        return ()


def _preference(option: LoopOption) -> tuple[bool, bool, int]:
    order = ["independent", "1d", "rotation", "wavefront", "skewed"]
    return bool(option.buffered), not option.is_exact, order.index(option.shape.kind)


def explain_call(
    function: ParallelFunction[Any, Any], args: tuple[Any, ...] | None, kwargs: Mapping[str, Any]
) -> FunctionExplanation:
    """Explain with data: the given arguments, or those of the last call if ``args`` is None."""
    if args is None:
        return _explained(function.source, function.decisions())
    bound = inspect.signature(function.function).bind(*args, **kwargs)
    bound.apply_defaults()
    return explain_data(function.source, function.runners, bound.arguments)


def explain_data(
    source: LoopSource, runners: Mapping[int, SiteRunner], variables: Mapping[str, Any]
) -> FunctionExplanation:
    """Decide each loop whose inputs follow from the arguments alone; nothing is run."""
    decisions = []
    for site in source.sites:
        known = {**_set_before(source, site, variables), **variables}
        try:
            values = runners[site.number].values(known)
        except Refusal:
            continue  # what is made before the loop is not made here
        decisions.append(runners[site.number].decide(values, memory.owners(values)))
    return _explained(source, decisions)


def _explained(source: LoopSource, decisions: Iterable[Decision]) -> FunctionExplanation:
    loops = tuple(_of_decision(decision) for decision in decisions)
    return FunctionExplanation(source.name, source.place, loops, with_data=True)


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
                try:
                    found[name] = evaluate(ast.unparse(value), {**known, **found})
                except CannotEvaluate:
                    continue
            case ast.Assign([ast.Tuple(elts)], ast.Attribute(ast.Name(base), "shape")):
                shape = getattr(known.get(base), "shape", ())
                for element, length in zip(elts, shape, strict=False):
                    if isinstance(element, ast.Name):
                        found[element.id] = length
            case _:
                pass
    return found


def _of_decision(decision: Decision) -> LoopExplanation:
    is_alone = decision.execution == "alone"
    candidate = None if is_alone else decision.candidate
    option = candidate.option if candidate is not None else None
    execution = "serial" if is_alone else decision.execution
    line, verdict = decision.site.line, decision.verdict
    deviations = decision.source.deviations if decision.source is not None else ()
    return LoopExplanation(
        line, verdict, option, candidate, decision.refusals, execution, decision.through,
        tuple(sorted(deviations, key=lambda each: each.line)),
    )  # fmt: skip
