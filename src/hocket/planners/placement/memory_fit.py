"""Plans that fit into little memory: repair a placement, or split the model from scratch.

`memory_split` cuts the model into contiguous blocks, one per device. Blocks are sized by the bytes
that ops keep on their device for most of the step (weights, optimizer states, saved activations);
the split is simulated, and each device's limit is lowered by the bytes that the simulated peak
exceeds this estimate. Among splits that fit, bisection finds the one with the smallest load of the
busiest device.

`spread_memory` repairs a given placement: first another order, then ParDNN's memory heuristics
(`pardnn.memory_moves`), then a new split. If no split fits, `memory_split` adds a local search,
whose score counts missing bytes before seconds. The plan with the fewest missing bytes is returned,
so a repair never makes a plan worse. O(devices · splits · units), plus a few dozen simulations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.coarsen import anchor_of
from hocket.graph.coarsen.ties import Ties, followers, hard_ties, optimizers, partners, views
from hocket.graph.coarsen.units import joined
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.devices import elsewhere, runnable, workers
from hocket.planners.max_load.load_pieces import staying_bytes
from hocket.planners.placement.local_search import local_search
from hocket.planners.placement.pardnn.memory_moves import emulate, fit_memory, relieve
from hocket.planners.shared import is_large
from hocket.simulate.engine import simulate
from hocket.simulate.timeline import Timeline

_MAX_CORRECTIONS = 6
"""Simulations per split; after each, the limits are corrected by the simulated peaks."""
_BISECTIONS = 5
_STEP_UP = 1.2
"""Factor by which a limit grows until a split exists; bisection starts there."""
_MAX_REPAIRED = 4
"""Number of best splits that are repaired if no split fits by itself."""
_UNLIMITED_S = 1e300


class Attempt(NamedTuple):
    """A plan and its simulated timeline."""

    plan: Plan
    timeline: Timeline
    overflow_bytes: int
    """Bytes missing, summed over devices; 0 if the plan fits."""

    def rank(self) -> tuple[int, float]:
        """Sort key: less overflow first, then the shorter step."""
        return self.overflow_bytes, self.timeline.makespan_s


def attempt(problem: Problem, plan: Plan) -> Attempt:
    """Simulate a plan."""
    timeline = simulate(problem, plan)
    lacking = np.maximum(timeline.peak_bytes - problem.memory_bytes, 0)
    return Attempt(plan, timeline, int(lacking.sum()))


def spread_memory(problem: Problem, plan: Plan) -> Plan:
    """Return a plan near the given one that fits; if none does, the one that lacks least."""
    best = attempt(problem, plan)
    if best.overflow_bytes:
        best = _backward_first(problem, best)
    if not best.overflow_bytes or problem.contiguous:
        return best.plan
    best = min(best, _relieved(problem, best), key=Attempt.rank)
    if best.overflow_bytes and best.plan.by_device is None:
        assert best.plan.device_of is not None
        device_of = fit_memory(problem, best.plan.device_of, best.plan.priority)
        moved = best.plan.having(Placement(device_of.astype(np.int32)))
        best = min(best, attempt(problem, moved), key=Attempt.rank)
    if best.overflow_bytes:
        best = min(best, _split(problem, plan), key=Attempt.rank)
    return best.plan


def memory_split(problem: Problem, plan: Plan) -> Plan:
    """Return contiguous blocks that fit; if none do, the tried plan that lacks the fewest bytes."""
    best = _split(problem, plan)
    if best.overflow_bytes and not problem.contiguous:
        best = min(best, attempt(problem, local_search(problem, best.plan)), key=Attempt.rank)
    # A strict order limits the peak but may delay ops: try free orders, too.
    if best.plan.by_device is not None:
        freely = attempt(problem, best.plan.ordered(priority=best.plan.priority))
        best = min(best, freely, key=Attempt.rank)
    return best.plan


def _split(problem: Problem, plan: Plan) -> Attempt:
    """Return the best split; if none fits, the best after repairs."""
    tried = sorted(_splits(problem, plan.ordered()), key=Attempt.rank)
    best = tried[0]
    for start in tried[: 1 if is_large(problem.graph.num_ops) else _MAX_REPAIRED]:
        if not best.overflow_bytes or problem.contiguous:
            break
        best = min(best, _relieved(problem, start), key=Attempt.rank)
    return best


# ── orders and moves ─────────────────────────────────────────────────────────────────────────────


def _backward_first(problem: Problem, start: Attempt) -> Attempt:
    """Return the plan with backward ops prioritised, if that alone makes it fit; else ``start``.

    Backward ops end the life of saved activations, forward ops begin new ones.
    """
    is_forward = problem.graph.op_phase == Phase.FORWARD
    position = np.arange(problem.graph.num_ops, dtype=np.float64)
    tried = attempt(problem, start.plan.ordered(priority=position + len(position) * is_forward))
    return start if tried.overflow_bytes else tried


def _in_graph_order(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with each device bound to the graph's order of its ops."""
    assert plan.device_of is not None
    order = tuple(
        np.flatnonzero(plan.device_of == device).astype(np.int32)
        for device in range(problem.cluster.num_devices)
    )
    return plan.ordered(by_device=order)


def _relieved(problem: Problem, start: Attempt) -> Attempt:
    """Move units off devices that overflow; a strict order is replaced by that of the graph."""
    plan = start.plan
    assert plan.device_of is not None
    is_strict = plan.by_device is not None
    run = emulate(problem, plan.device_of, plan.priority, is_strict=is_strict)
    found = plan.having(Placement(relieve(problem, run).device_of.astype(np.int32)))
    return attempt(problem, _in_graph_order(problem, found) if is_strict else found)


# ── contiguous blocks ────────────────────────────────────────────────────────────────────────────


def _splits(problem: Problem, plan: Plan) -> Iterator[Attempt]:
    """Yield simulated splits: each order of units over each order of devices."""
    line = _UnitLine(problem)
    # Simulations of large graphs take long: only even splits are tried there.
    kinds = (True,) if is_large(problem.graph.num_ops) else (True, False)
    for device_lines in _device_lines(problem):
        fits = False
        for sequence in line.sequences:
            for devices in device_lines:
                for is_even in kinds:
                    split = partial(line.split, sequence, devices, is_even)
                    for tried in _corrected(problem, plan, line, split):
                        yield tried
                        fits = fits or not tried.overflow_bytes
        # Devices that are not workers are used only if the workers alone have too little memory.
        if fits:
            return


def _corrected(
    problem: Problem, plan: Plan, line: _UnitLine, split: Callable[[LongArray], IntArray]
) -> Iterator[Attempt]:
    """Yield splits of one order of units, each with limits corrected by the peaks of the last."""
    free = problem.memory_bytes
    for _ in range(_MAX_CORRECTIONS):
        # At least one byte: scaling a limit of 0 or less would never make it large enough.
        device_of_unit = split(np.maximum(free, 1))
        device_of = device_of_unit[line.unit_of].astype(np.int32)
        tried = attempt(problem, plan.having(Placement(device_of)))
        if tried.overflow_bytes:
            # Devices that run ahead of each other accumulate tensors; the graph's order does not.
            strict = attempt(problem, _in_graph_order(problem, tried.plan))
            tried = min(tried, strict, key=Attempt.rank)
        yield tried
        counted = np.zeros(len(free), dtype=np.int64)
        np.add.at(counted, device_of_unit, line.unit_bytes)
        corrected = problem.memory_bytes - (tried.timeline.peak_bytes - counted)
        if not tried.overflow_bytes or np.array_equal(corrected, free):
            return
        free = corrected


class _UnitLine:
    """Units of a graph in linear orders, to be cut into contiguous blocks."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.unit_of = memory_units(graph)
        self.num_units = int(self.unit_of.max(initial=-1)) + 1
        self.fixed = elsewhere(problem, self.unit_of)
        self.can_run = runnable(problem, self.unit_of)
        self.unit_bytes = np.zeros(self.num_units, dtype=np.int64)
        np.add.at(self.unit_bytes, self.unit_of, staying_bytes(graph, graph.owner_op))
        by_kind = [np.bincount(self.unit_of, row, self.num_units) for row in problem.costs.op_s]
        self.unit_s = np.array(by_kind, dtype=np.float64)[problem.costs.device_row]
        self.sequences = self._sequences(problem)

    def _sequences(self, problem: Problem) -> list[LongArray]:
        """Orders of units: by the forward pass, and layer by layer if that differs."""
        position = anchor_of(problem.graph, self.unit_of)
        layer = np.zeros(self.num_units, dtype=np.int64)
        layer[self.unit_of] = memory_layers(problem.graph, self.unit_of)
        first = np.full(self.num_units, problem.graph.num_ops)
        np.minimum.at(first, layer, position)
        lines = [np.argsort(position, kind="stable")]
        by_layer = np.lexsort((position, first[layer]))
        if not problem.contiguous and not np.array_equal(by_layer, lines[0]):
            lines.append(by_layer)
        return [line[self.fixed[line] < 0] for line in lines]

    def split(
        self, sequence: LongArray, devices: IntArray, is_even: bool, limit_bytes: LongArray
    ) -> IntArray:
        """Per unit: its device, with the least load of the busiest device if ``is_even``.

        Otherwise each device is filled up to its bytes, so that the fewest devices are used.

        If no split satisfies the limits, all limits are scaled by the smallest factor that allows
        one.
        """
        full = self._filled(sequence, devices, limit_bytes, _UNLIMITED_S)
        if full is None:
            return self._least(
                1.0,
                lambda scale: self._filled(sequence, devices, limit_bytes * scale, _UNLIMITED_S),
            )
        if not is_even:
            return full
        fastest_s = np.where(self.can_run, self.unit_s, np.inf).min(axis=0).sum()
        # Above zero, so that multiplying by `_STEP_UP` makes it grow.
        low_s = max(float(fastest_s) / len(devices), 1e-12)
        return self._least(
            low_s, lambda limit_s: self._filled(sequence, devices, limit_bytes, limit_s)
        )

    def _least(self, low: float, filled: Callable[[float], IntArray | None]) -> IntArray:
        """Return the split for the smallest limit, at least ``low``, for which there is one."""
        high = low
        while (best := filled(high)) is None:
            low, high = high, _STEP_UP * high
        for _ in range(_BISECTIONS):
            # Geometric mean: the limit is known up to a factor.
            middle = math.sqrt(low * high)
            found = filled(middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _filled(
        self,
        sequence: LongArray,
        devices: IntArray,
        limit_bytes: NDArray[Any],
        limit_s: float,
    ) -> IntArray | None:
        """Fill devices one after another up to their limits; None if units are left over."""
        device_of, start = self.fixed.copy(), 0
        bytes_before = np.concatenate(([0], np.cumsum(self.unit_bytes[sequence])))
        for device in devices.tolist():
            own_s = np.where(self.can_run[device, sequence], self.unit_s[device, sequence], 0.0)
            s_before = np.concatenate(([0.0], np.cumsum(own_s)))
            by_bytes = np.searchsorted(
                bytes_before, bytes_before[start] + limit_bytes[device], side="right"
            )
            by_time = np.searchsorted(s_before, s_before[start] + limit_s, side="right")
            stop = max(int(min(by_bytes, by_time)) - 1, start)
            device_of[sequence[start:stop]] = device
            start = stop
        if start < len(sequence):
            return None
        # Units that the device of their block cannot run go to the first device that can.
        stuck = np.flatnonzero(~self.can_run[device_of, np.arange(self.num_units)])
        device_of[stuck] = self.can_run[:, stuck].argmax(axis=0)
        return device_of


def memory_units(graph: Graph) -> IntArray:
    """Per op: its unit, which holds an op with its backward op, its optimizer op and its views."""
    soft = [partners(graph), optimizers(graph), followers(graph)]
    if graph.works.any():  # where no op states its work, none is known to be a view
        idle = views(graph)
        # A backward view already follows its forward op; tied to what it views as well, it would
        # join the units on both sides.
        kept = (graph.op_phase[idle.first] == Phase.FORWARD) | (graph.partner[idle.first] < 0)
        soft.append(Ties(idle.first[kept], idle.second[kept]))
    return joined(graph.num_ops, *hard_ties(graph), *soft)


def memory_layers(graph: Graph, unit_of: IntArray) -> IntArray:
    """Per op: its layer; units that read the same parameters or states are in one layer."""
    root = graph.root_of[graph.reads]
    owner = np.where(graph.tensor_producer < 0, graph.owner_op, -1)
    is_shared = (owner >= 0) & (graph.tensor_role != Role.INPUT) & (graph.tensor_bytes > 0)
    kept = is_shared[root]
    num_units = int(unit_of.max(initial=-1)) + 1
    same = Ties(unit_of[graph.reader[kept]], unit_of[owner[root[kept]]])
    return joined(num_units, same)[unit_of]


def _device_lines(problem: Problem) -> list[list[IntArray]]:
    """Device orders in which blocks are placed: workers only, then with other devices appended.

    The orders are fastest first; as listed, which follows hosts and links; and largest memory last,
    where the head of a language model is. Large graphs try the first order only.
    """
    op_s = problem.costs.op_s
    seconds = np.where(np.isfinite(op_s), op_s, 0).sum(axis=1)[problem.costs.device_row]
    memory, listed = problem.memory_bytes, workers(problem)
    others = np.setdiff1d(np.arange(len(memory)), listed).astype(np.int32)
    lines: list[IntArray] = []
    for line in (
        listed[np.lexsort((listed, -memory[listed], seconds[listed]))],
        listed,
        listed[np.lexsort((listed, memory[listed]))],
    ):
        if not any(np.array_equal(line, known) for known in lines):
            lines.append(line)
    if is_large(problem.graph.num_ops):
        lines = lines[:1]
    with_others = [np.concatenate((line, others)) for line in lines]
    return [lines, with_others] if len(others) else [lines]
