"""Move units off devices that hold too much (ParDNN's memory heuristic, on the ledger).

Take the device that lacks most and the instant of its peak; share the bytes there out among the
units that keep them; move the units with the most bytes per damage (seconds of transfers and of
compute that the move adds) to where they fit, until the device is within its limit at that instant;
and again, until nothing is above its limit or no unit can move. Larger units go first, smaller ones
where they do not help. O(batches · (ops + reads)).

Qararyah et al., "A computational-graph partitioning method for training memory-constrained DNNs",
2021 (ParDNN).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.graph import Graph
from hocket.kernels.containers import table
from hocket.plan.problem import Problem
from hocket.planners.placement.devices import runnable
from hocket.planners.placement.memory.ledger import (
    InstantSpans,
    LedgerTable,
    MemoryLedger,
    ledger_table,
    new_ledger,
)
from hocket.planners.shared import OpGroups, groups_of
from hocket.planners.tables import TaskTable, mean_transfer_s, task_table

MAX_BATCHES = 60
MAX_CANDIDATES = 2000
MAX_TARGETS = 4
MAX_WASTED = 200_000
"""Ledger entries that a batch may evaluate without success."""
MAX_UNIT_WORK = 2_000_000
"""Larger units stay where they are: trying one would take as long as all smaller ones."""


class SizeLevel:
    """Units of one size, and what moving each of them would cost."""

    def __init__(self, problem: Problem, unit_of: IntArray) -> None:
        graph = problem.graph
        self.units: OpGroups = groups_of(unit_of)
        self.num_units = len(self.units.ptr) - 1
        self.can_run = runnable(problem, unit_of)
        self.work = _work(graph, unit_of)
        self.unit_s = np.array(
            [np.bincount(unit_of, weights=seconds, minlength=self.num_units)
             for seconds in problem.costs.op_s]
        )[problem.costs.device_row]  # fmt: skip
        reader = graph.reader
        maker = graph.owner_op[graph.reads]
        seconds = mean_transfer_s(problem)[graph.reads]
        counts = (unit_of[reader] != unit_of[maker]) & (seconds > 0)
        self._ends = (unit_of[maker[counts]], unit_of[reader[counts]])
        self._transfer_s = seconds[counts]

    def devices(self, device_of: LongArray) -> LongArray:
        """The device of each unit; -1 where its ops are on several."""
        first = device_of[self.units.ops[self.units.ptr[:-1]]]
        apart = device_of != first[self.units.of]
        first[self.units.of[apart]] = -1
        return first

    def ties_s(
        self, device_of_unit: LongArray, candidates: LongArray, num_devices: int
    ) -> FloatArray:
        """[candidate, device]: seconds of transfers between a unit and what is on the device."""
        index = np.full(self.num_units, -1)
        index[candidates] = np.arange(len(candidates))
        size = len(candidates) * num_devices
        tied_s = np.zeros(size)
        for unit, other in (self._ends, self._ends[::-1]):
            chosen = np.flatnonzero((index[unit] >= 0) & (device_of_unit[other] >= 0))
            key = index[unit[chosen]] * num_devices + device_of_unit[other[chosen]]
            tied_s += np.bincount(key, self._transfer_s[chosen], minlength=size)
        return tied_s.reshape(len(candidates), num_devices)


def _work(graph: Graph, unit_of: IntArray) -> LongArray:
    """Per unit: entries of the ledger that moving it looks at, the families of its tensors."""
    entries = np.zeros(graph.num_tensors, dtype=np.int64)
    np.add.at(entries, graph.root_of, 1 + np.diff(graph.user_ptr))
    entries = entries[graph.root_of]
    reader = graph.reader
    made = graph.tensor_producer >= 0
    work = np.bincount(unit_of[reader], entries[graph.reads], int(unit_of.max(initial=0)) + 1)
    np.add.at(work, unit_of[graph.tensor_producer[made]], entries[made])
    return table(work, np.int64)


class Board:
    """The ledger of a placement together with the tables that its kernels read."""

    def __init__(self, problem: Problem, spans: InstantSpans) -> None:
        self.problem = problem
        self.tasks: TaskTable = task_table(problem)
        self.facts: LedgerTable = ledger_table(problem.graph, spans)
        self.ledger: MemoryLedger = new_ledger(
            problem.graph, problem.cluster.num_devices, spans.num_instants
        )

    @property
    def peak_bytes(self) -> LongArray:
        """Most bytes on each device."""
        return self.ledger.top[:, 1].copy()

    def place(self, device_of: IntArray) -> None:
        """Put every op on its device."""
        from hocket.planners.placement.memory.entries import place_all

        place_all(self.tasks, self.facts, self.ledger, table(device_of, np.int64))


def relieve(
    board: Board,
    levels: Sequence[SizeLevel],
    limit_bytes: LongArray,
    max_batches: int = MAX_BATCHES,
) -> int:
    """Move units of the given sizes until no device is above its limit; how many moved.

    ``max_batches`` bounds the batches of moves per size.
    """
    num_moved = 0
    for level in levels:
        stuck: set[int] = set()
        for _ in range(max_batches):
            over = board.peak_bytes - limit_bytes
            over[list(stuck)] = 0
            device = int(np.argmax(over))
            if over[device] <= 0:
                break
            moved = _batch(board, level, device, limit_bytes)
            num_moved += moved
            if moved:
                stuck.clear()
            else:
                stuck.add(device)
    return num_moved


def _batch(board: Board, level: SizeLevel, device: int, limit_bytes: LongArray) -> int:
    """Move units off one device, preferably to where they fit; how many moved."""
    from hocket.planners.placement.memory.entries import credit, move_units

    bytes_of_unit = np.zeros(level.num_units)
    instant = credit(board.tasks, board.facts, board.ledger, level.units, device, bytes_of_unit)
    device_of_unit = level.devices(board.ledger.device_of)
    can_move = (device_of_unit == device) & (level.work <= MAX_UNIT_WORK)
    candidates = np.flatnonzero(can_move & (bytes_of_unit > 0))
    damage_s = _damage_s(board, level, device_of_unit, candidates, device)
    slack = limit_bytes - board.peak_bytes
    floor_s = level.unit_s[device][candidates].mean() if len(candidates) else 0.0
    gain = bytes_of_unit[candidates] / (damage_s.min(axis=1, initial=np.inf) + floor_s + 1e-9)
    chosen = np.lexsort((candidates, -gain))[:MAX_CANDIDATES]
    for may_overflow in (False, True):
        targets = _targets(damage_s[chosen], slack, may_overflow)
        moved: int = move_units(
            board.tasks, board.facts, board.ledger, level.units,
            table(candidates[chosen], np.int64), table(targets, np.int64),
            table(limit_bytes, np.int64), level.work, MAX_WASTED, device, instant, may_overflow,
        )  # fmt: skip
        if moved:
            return moved
    return 0


def _damage_s(
    board: Board, level: SizeLevel, device_of_unit: LongArray, candidates: LongArray, device: int
) -> FloatArray:
    """[candidate, device]: seconds that moving there adds; infinite where it cannot go."""
    tied_s = level.ties_s(device_of_unit, candidates, len(board.ledger.top))
    compute_s = level.unit_s[:, candidates].T
    change_s = tied_s[:, [device]] - tied_s + compute_s - compute_s[:, [device]]
    damage_s: FloatArray = np.where(level.can_run[:, candidates].T, np.maximum(change_s, 0), np.inf)
    damage_s[:, device] = np.inf
    return damage_s


def _targets(damage_s: FloatArray, slack: LongArray, may_overflow: bool) -> LongArray:
    """[candidate, choice]: devices to try, the least damage first and then the most slack."""
    if not may_overflow:
        damage_s = np.where(slack > 0, damage_s, np.inf)
    by_damage = np.argsort(damage_s, axis=1, kind="stable")[:, : MAX_TARGETS - 1]
    roomiest = np.argsort(np.where(np.isfinite(damage_s), -slack, np.inf), axis=1, kind="stable")
    targets = np.concatenate((by_damage, roomiest[:, :1]), axis=1)
    able = np.isfinite(np.take_along_axis(damage_s, targets, axis=1))
    # Those that cannot be go last, so that the kernel stops at the first -1.
    order = np.argsort(~able, axis=1, kind="stable")
    return np.take_along_axis(np.where(able, targets, -1), order, axis=1)
