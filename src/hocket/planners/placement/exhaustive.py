"""Optimal: the shortest step that any plan of a small graph has, with the proof.

Every plan is tried or ruled out (`exhaustive`), from the best of a few simple plans after a local
search. The plan claims whether it is proven, and otherwise how much shorter a step could be at
most. Exponential; limited to `MAX_OPS` ops and to a fixed number of simulations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import factorial, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.bounds.bound import lower_bound
from hocket.planners.bounds.units import find_units
from hocket.planners.placement.baselines import one_device
from hocket.planners.placement.devices import runnable
from hocket.planners.placement.local_search import local_search
from hocket.planners.placement.m_etf import m_etf
from hocket.planners.tables import TaskTable, task_table
from hocket.simulate.engine import simulate
from hocket.simulate.evaluate import Evaluator
from hocket.simulate.events import UNDECIDED

# Every plan of a tiny graph, as the simulator sees it: placements, orders, copies and frees.
#
# Where memory is tight, feasibility depends on when each copy is allocated and freed. A constraint
# model cannot express that; the simulator can. So every placement is bounded (`bounded_placements`)
# and, in the order of these bounds, tried with every order of its devices' ops (`OrderSearch`). Any
# plan is equivalent to a strict order per device, so the result is the shortest step of any plan,
# and where nothing is found no plan fits.
# Exponential; the work is counted in runs of the engine, each about a tenth of a millisecond.

# Where tensors first are and what their transfers take, for one placement or a table of them.

_Column = IntArray | int


def transfer_s(tasks: TaskTable, tensor: int, src: _Column, dst: _Column) -> FloatArray:
    """Seconds to send a tensor from one device to another without contention."""
    if tasks.is_everywhere[tensor]:
        return np.zeros(np.shape(dst))
    delay_s: FloatArray = tasks.latency_s[src, dst] + tasks.work[tensor] * tasks.unit_s[src, dst]
    return delay_s


def owner_device(problem: Problem, tensor: int, device_of: IntArray) -> _Column:
    """Where a tensor first is; ``device_of`` has ops as its last axis."""
    op = int(problem.graph.owner_op[tensor])
    column: _Column = device_of[..., op] if op >= 0 else 0
    return column


# All placements of a tiny graph, each with a bound that no order of its ops can beat.
#
# A placement is a row of a table; the bound of all rows is computed at once: the longest path with
# its transfers, and for each device the work there after the first of its ops can start and before
# the last lets the step end. What is held to the end must fit. Interchangeable devices are used in
# turn. Rows grow unit by unit, and one that can no longer be shorter than a known step is dropped
# as it grows (`Prefixes`). O(placements x (ops x devices + reads)), in numpy.

# Placements of the first units of a tiny graph, without those that cannot be shorter any more.
#
# The ops of the units that are placed end at the earliest after what they read, with its transfers;
# from there the shortest path to the end remains, and all work, each op on its fastest device, must
# fit into the time of the devices. A prefix that by this bound cannot beat a known step is dropped
# with all placements that begin with it. O(rows x reads) for all units, in numpy.


class Grown(NamedTuple):
    """Placements of some units."""

    rows: IntArray
    """[placement, unit]"""
    end_s: FloatArray
    """[placement, op]: when it ends at the earliest; for ops that are not placed, on any device."""
    load_s: FloatArray
    """[placement, device]: work that is there."""
    first_s: FloatArray
    """[placement, device]: when the first of it can begin."""
    last_s: FloatArray
    """[placement, device]: what follows all of it, at least."""


class Prefixes:
    """Grows placements by a unit at a time."""

    def __init__(self, problem: Problem, unit_of: IntArray, known_s: float) -> None:
        self._problem, self._unit_of, self._known_s = problem, unit_of, known_s
        self._tasks = task_table(problem)
        self._fastest_s: FloatArray = self._tasks.op_s.min(axis=0)
        self._head_s, self._tail_s = self._least_paths()
        num_units = int(unit_of.max(initial=-1)) + 1
        work_s = np.bincount(unit_of, self._fastest_s, minlength=num_units)
        self._left_s = np.append(np.cumsum(work_s[::-1])[::-1][1:], 0.0)
        """Per unit: the work of those that come after it."""

    def none(self) -> Grown:
        """The placement of no unit."""
        num_devices = self._problem.cluster.num_devices
        return Grown(
            np.zeros((1, 0), dtype=np.int32),
            (self._head_s + self._fastest_s)[None, :],
            np.zeros((1, num_devices)),
            np.full((1, num_devices), np.inf),
            np.full((1, num_devices), np.inf),
        )

    def extended(self, grown: Grown, is_open: BoolArray, unit: int, device: int) -> Grown:
        """The open placements with one more unit on a device, as far as they are hopeful."""
        column = np.full((int(is_open.sum()), 1), device, dtype=np.int32)
        rows = np.hstack([grown.rows[is_open], column])
        end_s, load_s, first_s, last_s = (column[is_open] for column in grown[1:])
        bound_s = np.zeros(len(rows))
        for op in np.flatnonzero(self._unit_of == unit).tolist():
            ready_s = self._ready_s(rows, end_s, op)
            end_s[:, op] = ready_s + self._tasks.op_s[device, op]
            load_s[:, device] += self._tasks.op_s[device, op]
            first_s[:, device] = np.minimum(first_s[:, device], ready_s)
            last_s[:, device] = np.minimum(last_s[:, device], self._tail_s[op])
            bound_s = np.maximum(bound_s, end_s[:, op] + self._tail_s[op])
        here_s = first_s[:, device] + load_s[:, device] + last_s[:, device]
        shared_s = (load_s.sum(axis=1) + self._left_s[unit]) / load_s.shape[1]
        hopeful = np.maximum(np.maximum(bound_s, shared_s), here_s) < self._known_s
        return Grown(*(column[hopeful] for column in (rows, end_s, load_s, first_s, last_s)))

    def joined(self, parts: list[Grown], num_units: int) -> Grown:
        """All of them; a unit that no device can run leaves no row, of the same width as any."""
        nothing = self.none()
        parts = [*parts, Grown(np.zeros((0, num_units), np.int32), *(a[:0] for a in nothing[1:]))]
        return Grown(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _ready_s(self, rows: IntArray, end_s: FloatArray, op: int) -> FloatArray:
        """When all that an op reads is there, at the earliest."""
        tasks, placed = self._tasks, rows.shape[1]
        here = rows[:, self._unit_of[op]]
        ready_s = np.full(len(rows), self._head_s[op])
        for tensor in tasks.reads[tasks.read_ptr[op] : tasks.read_ptr[op + 1]].tolist():
            maker, owner = int(tasks.producer[tensor]), int(self._problem.graph.owner_op[tensor])
            made_s = end_s[:, maker] if maker >= 0 else np.zeros(len(rows))
            if owner < 0 or self._unit_of[owner] < placed:
                there = rows[:, self._unit_of[owner]] if owner >= 0 else 0
                made_s = made_s + transfer_s(tasks, tensor, there, here)
            ready_s = np.maximum(ready_s, made_s)
        return ready_s

    def _least_paths(self) -> tuple[FloatArray, FloatArray]:
        """Per op: earliest start and longest path after its end, each op on its fastest device."""
        edges = list(zip(*(ends.tolist() for ends in self._problem.graph.edges), strict=True))
        head_s, tail_s = np.zeros(len(self._fastest_s)), np.zeros(len(self._fastest_s))
        for before, after in sorted(edges):
            head_s[after] = max(head_s[after], head_s[before] + self._fastest_s[before])
        for before, after in sorted(edges, reverse=True):
            tail_s[before] = max(tail_s[before], self._fastest_s[after] + tail_s[after])
        return head_s, tail_s


# Devices that can be exchanged without changing any number of the problem.


def interchangeable(problem: Problem, tasks: TaskTable, fixed: frozenset[int]) -> list[list[int]]:
    """Sets of devices, each of which may be permuted at will; ``fixed`` ones stay alone.

    Being exchangeable is transitive: exchanging a with b, b with c and a with b again exchanges a
    with c.
    """
    sets: list[list[int]] = []
    for device in range(problem.cluster.num_devices):
        for found in sets:
            if not {device, found[0]} & fixed and _can_swap(problem, tasks, found[0], device):
                found.append(device)
                break
        else:
            sets.append([device])
    return sets


def _can_swap(problem: Problem, tasks: TaskTable, first: int, second: int) -> bool:
    swap = np.arange(problem.cluster.num_devices)
    swap[[first, second]] = second, first
    half_duplex = tasks.send_queue == tasks.receive_queue
    rows: tuple[NDArray[np.generic], ...] = (tasks.op_s, tasks.memory_bytes, half_duplex)
    pairs: tuple[FloatArray, ...] = (tasks.latency_s, tasks.unit_s)
    return all(np.array_equal(row[swap], row) for row in rows) and all(
        np.array_equal(matrix[np.ix_(swap, swap)], matrix) for matrix in pairs
    )


def first_use_order(device_of_unit: IntArray, sets: list[list[int]]) -> IntArray:
    """The same placement with the devices of each set taken in the order of their first use."""
    renamed = np.arange(max(max(devices) for devices in sets) + 1, dtype=np.int32)
    for devices in sets:
        used = [device for device in dict.fromkeys(device_of_unit.tolist()) if device in devices]
        unused = [device for device in devices if device not in used]
        renamed[used + unused] = devices
    placed: IntArray = renamed[device_of_unit]
    return placed


class Placements(NamedTuple):
    """Placements as rows."""

    device_of: IntArray
    """[placement, op]"""
    bound_s: FloatArray
    """Per placement: no order makes its step shorter; infinite where none fits."""


def alike(problem: Problem) -> list[list[int]]:
    """Sets of devices that may be exchanged."""
    if problem.transfers == "queued" and problem.cluster.num_devices > 2:
        return []  # copies of a tensor are queued in the order of the devices that they go to
    # Tensors that no op reads stay on device 0, which is then not interchangeable with the others.
    fixed = frozenset({0}) if find_units(problem.graph).unread_bytes else frozenset()
    return interchangeable(problem, task_table(problem), fixed)


def bounded_placements(
    problem: Problem, max_count: int, known_s: float = np.inf
) -> Placements | None:
    """All placements that may be shorter than ``known_s``, with their bounds.

    None where there are more than ``max_count``.
    """
    unit_of = find_units(problem.graph).of_op
    rows = _rows(problem, unit_of, max_count, known_s)
    if rows is None:
        return None
    device_of = rows[:, unit_of]
    bound_s = _bound_s(problem, task_table(problem), device_of)
    bound_s[~_holds(problem, task_table(problem), device_of)] = np.inf
    return Placements(device_of, bound_s)


def _rows(problem: Problem, unit_of: IntArray, max_count: int, known_s: float) -> IntArray | None:
    """All assignments of units to devices, interchangeable devices in the order of first use."""
    can_run, num_devices = runnable(problem, unit_of), problem.cluster.num_devices
    twin = np.full(num_devices, -1)
    for devices in alike(problem):
        twin[devices[1:]] = devices[:-1]
    prefixes = Prefixes(problem, unit_of, known_s)
    grown = prefixes.none()
    for unit in range(can_run.shape[1]):
        parts = []
        for device in np.flatnonzero(can_run[:, unit]).tolist():
            is_open = np.ones(len(grown.rows), dtype=np.bool_)
            if twin[device] >= 0:
                is_open = (grown.rows == twin[device]).any(axis=1)
            parts.append(prefixes.extended(grown, is_open, unit, device))
        grown = prefixes.joined(parts, unit + 1)
        if len(grown.rows) > max_count:
            return None
    return grown.rows


def _bound_s(problem: Problem, tasks: TaskTable, device_of: IntArray) -> FloatArray:
    num_ops, ptr = problem.graph.num_ops, tasks.read_ptr
    op_s = tasks.op_s[device_of, np.arange(num_ops)]
    ready_s, tail_s = np.zeros(op_s.shape), np.zeros(op_s.shape)
    links = [
        (
            op,
            int(tasks.producer[t]),
            transfer_s(tasks, t, owner_device(problem, t, device_of), there),
        )
        for op in range(num_ops)
        for there in [device_of[:, op]]
        for t in tasks.reads[ptr[op] : ptr[op + 1]].tolist()
    ]
    for op, maker, delay_s in links:
        made_s = ready_s[:, maker] + op_s[:, maker] if maker >= 0 else 0.0
        ready_s[:, op] = np.maximum(ready_s[:, op], made_s + delay_s)
    for op, maker, delay_s in reversed(links):
        if maker >= 0:
            after_s = delay_s + op_s[:, op] + tail_s[:, op]
            tail_s[:, maker] = np.maximum(tail_s[:, maker], after_s)
    bound_s: FloatArray = (ready_s + op_s + tail_s).max(axis=1)
    for device in range(problem.cluster.num_devices):
        here = device_of == device
        first_s = np.where(here, ready_s, np.inf).min(axis=1)
        last_s = np.where(here, tail_s, np.inf).min(axis=1)
        load_s = first_s + np.where(here, op_s, 0.0).sum(axis=1) + last_s
        bound_s = np.maximum(bound_s, np.where(here.any(axis=1), load_s, 0.0))
    return bound_s


def _holds(problem: Problem, tasks: TaskTable, device_of: IntArray) -> BoolArray:
    """True if devices can hold the tensors that they own until the end of the step."""
    held_bytes = np.zeros((len(device_of), problem.cluster.num_devices), dtype=np.int64)
    row = np.arange(len(device_of))
    for tensor in np.flatnonzero(tasks.is_held).tolist():
        held_bytes[row, owner_device(problem, tensor, device_of)] += tasks.held_bytes[tensor]
    fits: BoolArray = np.all(held_bytes <= problem.memory_bytes, axis=1)
    return fits


# All orders of one placement of a tiny graph, with the engine that evaluates all plans.
#
# An order is chosen op by op, each when a device comes to an open position in its order: the engine
# runs what is decided, and stops there. What has happened by then happens whatever is chosen, so a
# device that was too full, or a bound as long as the best known step, ends the branch. Where a
# device has one op to choose from, it is chosen without a run.

NOISE = 1e-9
"""A step that is shorter by less than this share is no reason to go on."""


class OrderSearch:
    """Tries orders of one placement after the other and keeps the best plan of all."""

    def __init__(self, problem: Problem, max_runs: int, known_s: float) -> None:
        self.best_s = known_s
        self.best: tuple[IntArray, tuple[IntArray, ...]] | None = None
        """Devices of ops, ops of devices; none while nothing is better than what is known."""
        self._runs_left = max_runs
        self._problem = problem
        self._tasks = task_table(problem)
        self._evaluator = Evaluator(problem)
        self._ancestors = _ancestors(problem.graph)
        self._priority = np.zeros(problem.graph.num_ops)

    def is_hopeful(self, bound_s: float) -> bool:
        """True if what takes at least so long can still be better."""
        return bound_s < self.best_s * (1 - NOISE)

    def try_orders(self, device_of: IntArray) -> bool:
        """Try every order of a placement; whether there was work enough for all."""
        self._device_of = device_of
        self._op_s = self._tasks.op_s[device_of, np.arange(len(device_of))].tolist()
        self._links = self._find_links()
        self._tail_s = self._find_tails()
        num_devices = self._problem.cluster.num_devices
        self._order: list[list[int]] = [[] for _ in range(num_devices)]
        self._open = [0] * num_devices
        for op, device in enumerate(device_of.tolist()):
            self._open[device] |= 1 << op
        self._priority[:] = UNDECIDED
        return self._extend()

    def _find_links(self) -> list[list[tuple[int, float]]]:
        """Per op: the producers of its inputs (-1 for none) and the seconds of each transfer."""
        tasks, device_of = self._tasks, self._device_of
        return [
            [
                (int(tasks.producer[t]), float(transfer_s(tasks, t, owner, int(device_of[op]))))
                for t in tasks.reads[tasks.read_ptr[op] : tasks.read_ptr[op + 1]].tolist()
                for owner in [owner_device(self._problem, t, device_of)]
            ]
            for op in range(len(device_of))
        ]

    def _find_tails(self) -> list[float]:
        """Per op: seconds from its end to the end of the step, at least."""
        tail_s = [0.0] * len(self._op_s)
        for op in reversed(range(len(tail_s))):
            for maker, delay_s in self._links[op]:
                if maker >= 0:
                    after_s = delay_s + self._op_s[op] + tail_s[op]
                    tail_s[maker] = max(tail_s[maker], after_s)
        return tail_s

    def _extend(self) -> bool:
        """Try all that can follow what is decided; whether there was work enough."""
        settled = self._settle()
        is_done = self._branch()
        for device in reversed(settled):
            self._take_back(device)
        return is_done

    def _branch(self) -> bool:
        if self._runs_left <= 0:
            return False
        asking, bound_s = self._run()
        for op in self._choices(asking) if asking >= 0 else []:
            if not self.is_hopeful(bound_s):
                break
            self._choose(asking, op)
            is_done = self._extend()
            self._take_back(asking)
            if not is_done:
                return False
        return True

    def _settle(self) -> list[int]:
        """Make the choices that are none; returns the devices, each as often as it chose."""
        settled = []
        for device in range(len(self._open)):
            while len(choices := self._choices(device)) == 1:
                self._choose(device, choices[0])
                settled.append(device)
        return settled

    def _choices(self, device: int) -> list[int]:
        """The ops that a device may run next, the longest tail first."""
        left, found = self._open[device], []
        for op in range(left.bit_length()):
            if (left >> op) & 1 and not self._ancestors[op] & left:
                found.append(op)
        return sorted(found, key=lambda op: (-self._tail_s[op], op))

    def _choose(self, device: int, op: int) -> None:
        self._priority[op] = len(self._order[device])
        self._order[device].append(op)
        self._open[device] ^= 1 << op

    def _take_back(self, device: int) -> None:
        op = self._order[device].pop()
        self._priority[op] = UNDECIDED
        self._open[device] ^= 1 << op

    def _run(self) -> tuple[int, float]:
        """Run the decided ops; returns the device to decide for, and a bound over its choices.

        The device is -1 where the branch ends.
        """
        self._runs_left -= 1
        score = self._evaluator(self._device_of, self._priority, is_strict=True)
        if (self._evaluator.peak_bytes > self._problem.memory_bytes).any():
            return -1, np.inf
        if any(self._open):
            return self._asking()
        if score.step_s < self.best_s * (1 - NOISE):
            self.best_s = score.step_s
            order = tuple(np.array(ops, dtype=np.int32) for ops in self._order)
            self.best = self._device_of.astype(np.int32), order
        return -1, np.inf

    def _asking(self) -> tuple[int, float]:
        schedule = self._evaluator.state.schedule
        num_started = (schedule.cursor - self._evaluator.runs.lineup_ptr)[:-1].tolist()
        for device, is_free in enumerate(schedule.is_free.tolist()):
            # One that is free and has started all that is decided; else ops wait for each other.
            is_at_end = num_started[device] == len(self._order[device])
            if is_free and is_at_end and self._open[device]:
                return device, self._bound_s(device, num_started)
        return -1, np.inf

    def _bound_s(self, asking: int, num_started: list[int]) -> float:
        """A bound on the step of whatever the asking device may choose now.

        What has not started starts when its device is free or later, after what it reads, and each
        device has all of it to run.
        """
        op_s, tail_s, count = self._op_s, self._tail_s, len(num_started)
        start_s = self._evaluator.op_start_s.tolist()
        ends: dict[int, float] = {}
        for device, ops in enumerate(self._order):
            for op in ops[: num_started[device]]:
                ends[op] = start_s[op] + op_s[op]
        now_s = ends[self._order[asking][-1]] if self._order[asking] else 0.0
        free_s = [
            max((ends[op] for op in ops[max(started - 1, 0) : started]), default=0.0)
            for ops, started in zip(self._order, num_started, strict=True)
        ]
        free_s = [max(now_s, seconds) for seconds in free_s]
        left_s, last_s, least_s = [0.0] * count, [np.inf] * count, 0.0
        for op, device in enumerate(self._device_of.tolist()):
            if op not in ends:
                ready_s = max(
                    ((ends[m] if m >= 0 else 0.0) + delay_s for m, delay_s in self._links[op]),
                    default=0.0,
                )
                ends[op] = max(free_s[device], ready_s) + op_s[op]
                left_s[device] += op_s[op]
                last_s[device] = min(last_s[device], tail_s[op])
            least_s = max(least_s, ends[op] + tail_s[op])
        loads_s = zip(free_s, left_s, last_s, strict=True)
        return max(least_s, *(sum(load_s) for load_s in loads_s if load_s[2] < np.inf))


def _ancestors(graph: Graph) -> list[int]:
    """Per op: a bit for each op that must end before it starts."""
    above = [0] * graph.num_ops
    for src, dst in sorted(zip(*(ends.tolist() for ends in graph.edges), strict=True)):
        above[dst] |= above[src] | (1 << src)
    return above


MAX_OPS = 28
MAX_RUNS = 20_000
"""Runs of the engine after which planners stop to try: about two seconds."""
_MAX_PLACEMENTS = 300_000
"""Twelve ops on three devices of which two are alike; bounding them takes about a second. A known
step that is nearly the shortest leaves so few of more ops on more devices."""


@dataclass(frozen=True, eq=False)
class ExhaustiveAnswer:
    """The best plan that was found and what is known of all others."""

    plan: Plan | None
    """None where nothing better than the known step was found."""
    bound_s: float
    """No plan has a shorter step; infinite where no plan fits."""
    is_complete: bool
    """True if every plan was tried or ruled out."""


def can_be_tried(problem: Problem) -> bool:
    """True if a plan of the problem is a placement and an order per device, of few ops."""
    if problem.objective != "latency" or problem.contiguous:
        return False
    # The streams of one device run concurrently, which an order per device cannot express.
    return 0 < problem.graph.num_ops <= MAX_OPS and not problem.graph.op_stream.any()


def is_tiny(problem: Problem) -> bool:
    """True if there are few enough placements to evaluate each."""
    if not can_be_tried(problem):
        return False
    units = find_units(problem.graph)
    num_able = runnable(problem, units.of_op).sum(axis=0).astype(float)
    num_alike = prod(factorial(len(found)) for found in alike(problem))
    return bool(num_able.prod() <= _MAX_PLACEMENTS * num_alike)


def try_all(
    problem: Problem, plan: Plan, max_runs: int, known_s: float = np.inf
) -> ExhaustiveAnswer:
    """The plan with the shortest step below ``known_s``, within ``max_runs`` runs of the engine."""
    placements = bounded_placements(problem, _MAX_PLACEMENTS, known_s * (1 - NOISE))
    if placements is None:
        return ExhaustiveAnswer(None, 0.0, is_complete=False)
    search = OrderSearch(problem, max_runs, known_s)
    open_s = np.inf  # a bound on what was not tried
    for index in np.argsort(placements.bound_s, kind="stable").tolist():
        bound_s = float(placements.bound_s[index])
        if not search.is_hopeful(bound_s):
            break
        if not search.try_orders(placements.device_of[index]):
            open_s = bound_s
            break
    bound_s = min(search.best_s, open_s) * (1 - NOISE)  # smaller gains are not searched for
    found = None
    if search.best is not None:
        device_of, order = search.best
        found = plan.placing(device_of, by_device=order)
    return ExhaustiveAnswer(found, bound_s, is_complete=open_s == np.inf)


PROVEN_GAP = 1e-6
"""A gap below it counts as none."""


def optimal(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with the shortest step, or the best that a fixed amount of work finds."""
    _require_handled(problem)
    best, best_s = _known(problem, plan)
    bound_s = lower_bound(replace(problem, objective="latency")).seconds
    if bound_s < best_s * (1 - PROVEN_GAP):
        answer = try_all(problem, plan, MAX_RUNS, best_s)
        bound_s = max(bound_s, answer.bound_s)
        if answer.plan is not None:
            best, best_s = answer.plan, simulate(problem, answer.plan).makespan_s
    if best is None:
        raise NoFeasiblePlanError(
            "no plan fits the memory of the devices"
            if bound_s == np.inf
            else "the exact planner found no plan that fits the memory of the devices",
            hint="take devices with more memory, or more of them",
        )
    gap = max(1 - bound_s / best_s, 0.0) if best_s > 0 else 0.0
    return best.claiming(proven=gap <= PROVEN_GAP, step_bound_s=min(bound_s, best_s), gap=gap)


def _require_handled(problem: Problem) -> None:
    if problem.objective != "latency" or problem.contiguous:
        raise UsageError(
            "the exact planner makes the time of one step small, on devices in any pattern",
            hint="for the load of the busiest device or contiguous devices try 'throughput'",
        )
    if problem.graph.num_ops and not can_be_tried(problem):
        raise UsageError(
            f"the exact planner takes up to {MAX_OPS} ops on one stream, the graph has "
            f"{problem.graph.num_ops}",
            hint="try the planner 'auto', which says how far from the optimum it can be at most",
        )


def _known(problem: Problem, plan: Plan) -> tuple[Plan | None, float]:
    """The best simple plan that fits, searched from; none and infinity where none fits."""
    best, best_s = None, np.inf
    for placer in (one_device, m_etf):
        try:
            start = placer(problem, plan)
        except NoFeasiblePlanError:
            continue
        found = local_search(problem, start)
        timeline = simulate(problem, found)
        if np.all(timeline.peak_bytes <= problem.memory_bytes) and timeline.makespan_s < best_s:
            best, best_s = found, timeline.makespan_s
    return best, best_s
