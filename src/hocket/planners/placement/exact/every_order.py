"""All orders of one placement of a tiny graph, with the engine that evaluates all plans.

An order is chosen op by op, each when a device comes to an open position in its order: the engine
runs what is decided, and stops there. What has happened by then happens whatever is chosen, so a
device that was too full, or a bound as long as the best known step, ends the branch. Where a device
has one op to choose from, it is chosen without a run.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.graph import Graph
from hocket.plan.problem import Problem
from hocket.planners.placement.exact.transfers import home_of, transfer_s
from hocket.planners.tables import task_table
from hocket.simulate.evaluate import Evaluator
from hocket.simulate.events import UNDECIDED

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
        """Whether what takes at least so long can still be better."""
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
        """Per op: the makers of what it reads (-1 for none) and the seconds on the way."""
        tasks, device_of = self._tasks, self._device_of
        return [
            [
                (int(tasks.producer[t]), float(transfer_s(tasks, t, home, int(device_of[op]))))
                for t in tasks.reads[tasks.read_ptr[op] : tasks.read_ptr[op + 1]].tolist()
                for home in [home_of(self._problem, t, device_of)]
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
        """Run what is decided: the device that asks for more, and a bound on what it may choose.

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
