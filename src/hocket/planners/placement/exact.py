"""Optimal: the plan with the shortest step of a small graph, and a proof that it is.

A branch and bound search. Placements grow by one unit at a time; those whose lower bound reaches
the best known step are dropped (`all_placements`). The others are tried in the order of their
bounds, each with every order of its devices' ops (`OrderSearch`), in the engine that evaluates all
plans: if memory is tight, the allocations and frees along the step decide whether a plan fits. Any
plan is equivalent to a strict order per device, so the result is the shortest step of any plan, and
if the complete search finds nothing, no plan fits. The search starts from a few simple plans
improved by local search. Exponential, hence limited to `MAX_OPS` ops and `MAX_RUNS` runs of the
engine; the plan claims whether it is proven optimal, and if not, the largest possible gap to the
optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.bounds.step_bound import find_units, lower_bound
from hocket.planners.devices import runnable
from hocket.planners.order.levels import levels
from hocket.planners.placement.baselines import one_device
from hocket.planners.placement.local_search import local_search
from hocket.planners.placement.m_etf import m_etf
from hocket.planners.tables import TaskTable, task_table
from hocket.simulate.engine import simulate
from hocket.simulate.evaluate import Evaluator
from hocket.simulate.events import UNDECIDED

MAX_OPS = 28
MAX_RUNS = 20_000
"""Runs of the engine after which the search stops, about two seconds."""
_MAX_PLACEMENTS = 300_000
"""Limit on placements; growing this many takes about a second."""
PROVEN_GAP = 1e-6
"""Relative gap between step and lower bound up to which a plan is claimed to be optimal."""
NOISE = 1e-9
"""Relative gain below which a shorter step counts as rounding, so the search ignores it."""


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
            # The bound is infinite only if the complete search ruled out every placement.
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
    """Return the best simple plan that fits, after local search, and its step time.

    If none fits, return None and infinity.
    """
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


@dataclass(frozen=True, eq=False)
class ExhaustiveAnswer:
    """The best plan that the search found, and a lower bound on the step of every plan."""

    plan: Plan | None
    """None if no plan is better than the known step."""
    bound_s: float
    """Lower bound on the step of every plan; infinite if no plan fits."""
    is_complete: bool
    """True if every plan was tried or ruled out."""


def can_be_tried(problem: Problem) -> bool:
    """True if the search can handle the problem: step time as objective, few ops, one stream."""
    if problem.objective != "latency" or problem.contiguous:
        return False
    # The streams of one device run concurrently, which an order per device cannot express.
    return 0 < problem.graph.num_ops <= MAX_OPS and not problem.graph.op_stream.any()


def is_tiny(problem: Problem) -> bool:
    """True if all placements can be evaluated, because there are few of them."""
    num_units = find_units(problem.graph).count
    return can_be_tried(problem) and problem.cluster.num_devices**num_units <= _MAX_PLACEMENTS


def try_all(
    problem: Problem, plan: Plan, max_runs: int, known_s: float = np.inf
) -> ExhaustiveAnswer:
    """Search for the shortest step below ``known_s`` within ``max_runs`` runs of the engine."""
    placements = all_placements(problem, _MAX_PLACEMENTS, known_s * (1 - NOISE))
    if placements is None:
        return ExhaustiveAnswer(None, 0.0, is_complete=False)
    search = OrderSearch(problem, max_runs, known_s)
    unit_of, open_s = find_units(problem.graph).of_op, np.inf
    # By increasing bound: after the first hopeless placement all later ones are hopeless too.
    for index in np.argsort(placements.bound_s, kind="stable").tolist():
        bound_s = float(placements.bound_s[index])
        if not search.is_hopeful(bound_s):
            break
        if not search.try_orders(placements.rows[index][unit_of]):
            open_s = bound_s  # lower bound on the placements not tried
            break
    bound_s = min(search.best_s, open_s) * (1 - NOISE)  # smaller gains are not searched for
    found = None
    if search.best is not None:
        device_of, order = search.best
        found = plan.placing(device_of, by_device=order)
    return ExhaustiveAnswer(found, bound_s, is_complete=open_s == np.inf)


# ── placements ───────────────────────────────────────────────────────────────────────────────────

_Column = IntArray | int


class Placements(NamedTuple):
    """Partial placements, which cover the first units, one placement per row."""

    rows: IntArray
    """[placement, unit]: device."""
    end_s: FloatArray
    """[placement, op]: earliest end; for an op not placed yet, the earliest on any device."""
    load_s: FloatArray
    """[placement, device]: seconds of the ops placed there."""
    held_bytes: LongArray
    """[placement, device]: bytes that the placed units hold there until the end of the step."""
    bound_s: FloatArray
    """Per placement: lower bound on the step over all orders and all completions."""

    def chosen(self, which: BoolArray | slice) -> Placements:
        """Select some of the placements."""
        columns: tuple[Any, ...] = self
        return Placements(*(column[which] for column in columns))


def all_placements(problem: Problem, max_count: int, known_s: float = np.inf) -> Placements | None:
    """Return all placements whose bound is below ``known_s``; None if more than ``max_count``.

    Interchangeable devices are used in order: one is used only if the one before it is.
    O(placements · reads) in numpy.
    """
    growth = _Growth(problem)
    num_devices = problem.cluster.num_devices
    # twin[d]: the interchangeable device before d, which must be in use before d is.
    twin = np.full(num_devices, -1)
    for devices in interchangeable(problem):
        twin[devices[1:]] = devices[:-1]
    grown = growth.none()
    for unit in range(growth.can_run.shape[1]):
        # A unit that no device can run leaves no row.
        none = grown.chosen(slice(0))
        parts = [none._replace(rows=np.zeros((0, unit + 1), dtype=np.int32))]
        for device in np.flatnonzero(growth.can_run[:, unit]).tolist():
            is_open = np.ones(len(grown.rows), dtype=np.bool_)
            if twin[device] >= 0:
                is_open = (grown.rows == twin[device]).any(axis=1)
            longer = growth.extended(grown.chosen(is_open), unit, device)
            parts.append(longer.chosen(longer.bound_s < known_s))
        grown = Placements(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        if len(grown.rows) > max_count:
            return None
    return grown


class _Growth:
    """Extends partial placements by one unit at a time and updates their bounds."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._tasks = problem, task_table(problem)
        self._units = find_units(problem.graph)
        self.can_run = runnable(problem, self._units.of_op)
        fastest_s: FloatArray = self._tasks.op_s.min(axis=0)
        self._fastest_s = fastest_s
        self._head_s, self._tail_s = np.zeros(len(fastest_s)), np.zeros(len(fastest_s))
        edges = sorted(zip(*(ends.tolist() for ends in problem.graph.edges), strict=True))
        for before, after in edges:
            head_s = self._head_s[before] + fastest_s[before]
            self._head_s[after] = max(self._head_s[after], head_s)
        for before, after in reversed(edges):
            tail_s = fastest_s[after] + self._tail_s[after]
            self._tail_s[before] = max(self._tail_s[before], tail_s)
        work_s = np.bincount(self._units.of_op, fastest_s, minlength=self._units.count)
        self._left_s = np.append(np.cumsum(work_s[::-1])[::-1][1:], 0.0)
        """Per unit: seconds of all later units, with each op on its fastest device."""

    def none(self) -> Placements:
        """Return the empty placement, from which the others grow."""
        num_devices = self._problem.cluster.num_devices
        held_bytes = np.zeros((1, num_devices), dtype=np.int64)
        # Tensors that no op reads are stored on device 0.
        held_bytes[0, 0] = self._units.unread_bytes
        end_s = (self._head_s + self._fastest_s)[None, :]
        rows = np.zeros((1, 0), dtype=np.int32)
        return Placements(rows, end_s, np.zeros((1, num_devices)), held_bytes, np.zeros(1))

    def extended(self, grown: Placements, unit: int, device: int) -> Placements:
        """Put one more unit on a device; placements that overflow memory get an infinite bound."""
        column = np.full((len(grown.rows), 1), device, dtype=np.int32)
        rows = np.hstack([grown.rows, column])
        end_s, load_s = grown.end_s.copy(), grown.load_s.copy()
        held_bytes, bound_s = grown.held_bytes.copy(), grown.bound_s.copy()
        for op in np.flatnonzero(self._units.of_op == unit).tolist():
            end_s[:, op] = self._ready_s(rows, end_s, op) + self._tasks.op_s[device, op]
            load_s[:, device] += self._tasks.op_s[device, op]
            bound_s = np.maximum(bound_s, end_s[:, op] + self._tail_s[op])
        held_bytes[:, device] += self._units.held_bytes[unit]
        # At best all devices share the work of the remaining units evenly.
        shared_s = (load_s.sum(axis=1) + self._left_s[unit]) / load_s.shape[1]
        bound_s = np.maximum(np.maximum(bound_s, shared_s), load_s[:, device])
        bound_s[held_bytes[:, device] > self._problem.memory_bytes[device]] = np.inf
        return Placements(rows, end_s, load_s, held_bytes, bound_s)

    def _ready_s(self, rows: IntArray, end_s: FloatArray, op: int) -> FloatArray:
        """Per placement: earliest time at which all inputs of an op are on its device."""
        tasks, unit_of = self._tasks, self._units.of_op
        here, ready_s = rows[:, unit_of[op]], np.full(len(rows), self._head_s[op])
        for tensor in tasks.reads[tasks.read_ptr[op] : tasks.read_ptr[op + 1]].tolist():
            maker, owner = int(tasks.producer[tensor]), int(self._problem.graph.owner_op[tensor])
            made_s = end_s[:, maker] if maker >= 0 else np.zeros(len(rows))
            # The source is known once the owner's unit is placed; before that no transfer is
            # counted, which keeps the bound valid.
            if owner < 0 or unit_of[owner] < rows.shape[1]:
                there = rows[:, unit_of[owner]] if owner >= 0 else 0
                made_s = made_s + transfer_s(tasks, tensor, there, here)
            ready_s = np.maximum(ready_s, made_s)
        return ready_s


def transfer_s(tasks: TaskTable, tensor: int, src: _Column, dst: _Column) -> FloatArray:
    """Seconds to send a tensor from one device to another without contention; 0 for the batch."""
    if tasks.is_everywhere[tensor]:
        return np.zeros(np.shape(dst))
    delay_s: FloatArray = tasks.latency_s[src, dst] + tasks.work[tensor] * tasks.unit_s[src, dst]
    return delay_s


def interchangeable(problem: Problem) -> list[list[int]]:
    """Sets of devices that may be permuted without changing any number of the problem.

    Comparing with the first device of each set is enough, because exchangeability is transitive:
    exchanging a with b, b with c and a with b again exchanges a with c.
    """
    devices = list(range(problem.cluster.num_devices))
    if problem.transfers == "queued" and len(devices) > 2:
        # Copies of a tensor are queued in the order of the devices that they go to.
        return [[device] for device in devices]
    # Tensors that no op reads stay on device 0, which then differs from the others.
    fixed = {0} if find_units(problem.graph).unread_bytes else set()
    tasks, sets = task_table(problem), list[list[int]]()
    for device in devices:
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


# ── orders of one placement ──────────────────────────────────────────────────────────────────────
#
# An order is chosen op by op, each when a device comes to an open position in its order: the engine
# runs the decided part and stops there. That part is the same for every continuation, so a device
# that was too full, or a bound as long as the best known step, ends the branch. Where a
# device has one op to choose from, it is chosen without a run.


class OrderSearch:
    """Depth-first search over the orders of one placement after another; keeps the best plan."""

    def __init__(self, problem: Problem, max_runs: int, known_s: float) -> None:
        self.best_s = known_s
        self.best: tuple[IntArray, tuple[IntArray, ...]] | None = None
        """Device per op and op order per device; None until a plan beats the known step."""
        self._runs_left = max_runs
        self._problem = problem
        self._tasks = task_table(problem)
        self._evaluator = Evaluator(problem)
        self._ancestors = _ancestors(problem.graph)
        self._priority = np.zeros(problem.graph.num_ops)

    def is_hopeful(self, bound_s: float) -> bool:
        """True if a plan whose step has this lower bound can still beat the best one."""
        return bound_s < self.best_s * (1 - NOISE)

    def try_orders(self, device_of: IntArray) -> bool:
        """Try every order of a placement; returns False if the limit on runs was reached first."""
        self._device_of = device_of
        op_s = self._tasks.op_s[device_of, np.arange(len(device_of))]
        paths = levels(self._problem, device_of)
        self._op_s, self._tail_s = op_s.tolist(), (paths.to_end_s - op_s).tolist()
        num_devices = self._problem.cluster.num_devices
        self._order: list[list[int]] = [[] for _ in range(num_devices)]
        self._open = [0] * num_devices
        for op, device in enumerate(device_of.tolist()):
            self._open[device] |= 1 << op
        self._priority[:] = UNDECIDED
        # If the longest path on these devices is too long already, no order can help.
        if not self.is_hopeful(float((paths.from_start_s + paths.to_end_s).max())):
            return True
        return self._extend()

    def _extend(self) -> bool:
        """Try every continuation of the partial orders; returns False if the runs are used up."""
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
        """Append ops while a device has only one choice; returns their devices, once per op."""
        settled = []
        for device in range(len(self._open)):
            while len(choices := self._choices(device)) == 1:
                self._choose(device, choices[0])
                settled.append(device)
        return settled

    def _choices(self, device: int) -> list[int]:
        """Ops that a device may run next, by decreasing tail."""
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
        """Simulate the partial orders; returns the device to branch on, and a lower bound.

        The device is -1 if the branch ends here: all ops are ordered, memory overflows, or ops wait
        for each other.
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
        num_started = (schedule.cursor - self._evaluator.runs.lineup_ptr[:-1]).tolist()
        for device, is_free in enumerate(schedule.is_free.tolist()):
            # Branch on a device that has started all of its decided ops. If there is none, ops wait
            # for each other, and the branch is dead.
            is_at_end = num_started[device] == len(self._order[device])
            if is_free and is_at_end and self._open[device]:
                return device, self._bound_s(num_started)
        return -1, np.inf

    def _bound_s(self, num_started: list[int]) -> float:
        """Lower bound on the step: paths from ops that started, and each device's remaining ops."""
        start_s, bound_s = self._evaluator.op_start_s.tolist(), 0.0
        for order, num, left in zip(self._order, num_started, self._open, strict=True):
            ends_s = [start_s[op] + self._op_s[op] for op in order[:num]]
            tails_s = [self._tail_s[op] for op in order[:num]]
            waiting = [*order[num:], *(op for op in range(left.bit_length()) if (left >> op) & 1)]
            left_s = sum(self._op_s[op] for op in waiting)
            # Whichever of the remaining ops runs last, at least the smallest tail follows it.
            last_s = min((self._tail_s[op] for op in waiting), default=0.0)
            paths_s = (sum(path_s) for path_s in zip(ends_s, tails_s, strict=True))
            bound_s = max(bound_s, max(ends_s, default=0.0) + left_s + last_s, *paths_s)
        return bound_s


def _ancestors(graph: Graph) -> list[int]:
    """Per op: bit mask of the ops that must end before it starts."""
    above = [0] * graph.num_ops
    for src, dst in sorted(zip(*(ends.tolist() for ends in graph.edges), strict=True)):
        above[dst] |= above[src] | (1 << src)
    return above
