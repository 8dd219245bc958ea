"""Placements of the first units of a tiny graph, without those that cannot be shorter any more.

The ops of the units that are placed end at the earliest after what they read, with its transfers;
from there the shortest way to the end remains, and all work, each op where it is done fastest, must
find room on the devices. What cannot be shorter than a known step by this is dropped with all
placements that begin with it. O(rows x reads) for all units, in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.planners.placement.exact.transfers import transfer_s
from hocket.planners.tables import task_table


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
            maker, home = int(tasks.producer[tensor]), int(self._problem.graph.home_op[tensor])
            made_s = end_s[:, maker] if maker >= 0 else np.zeros(len(rows))
            if home < 0 or self._unit_of[home] < placed:
                there = rows[:, self._unit_of[home]] if home >= 0 else 0
                made_s = made_s + transfer_s(tasks, tensor, there, here)
            ready_s = np.maximum(ready_s, made_s)
        return ready_s

    def _least_paths(self) -> tuple[FloatArray, FloatArray]:
        """Per op: its earliest start and the way on from its end, on the fastest devices."""
        edges = list(zip(*(ends.tolist() for ends in self._problem.graph.edges), strict=True))
        head_s, tail_s = np.zeros(len(self._fastest_s)), np.zeros(len(self._fastest_s))
        for before, after in sorted(edges):
            head_s[after] = max(head_s[after], head_s[before] + self._fastest_s[before])
        for before, after in sorted(edges, reverse=True):
            tail_s[before] = max(tail_s[before], self._fastest_s[after] + tail_s[after])
        return head_s, tail_s
