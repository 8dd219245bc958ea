"""Memory split: contiguous blocks of the model, each no larger than its device can hold.

Units stand in a line, in the order of the forward pass or layer by layer; devices are filled one
after another, on a ledger that counts what a block really holds at every instant. Of the splits
that fit, the one with the smallest load of the busiest device is found by bisection; where none
fits, those that exceed every device by the smallest factor, for moves to mend. What the simulator
sees and the ledger does not is kept free and the devices are filled again.
O(fills · (ops + reads) · log ops) and a handful of simulations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.coarsen import anchor_of
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.placement.devices import elsewhere, workers
from hocket.planners.placement.memory.attempt import Attempt, attempt
from hocket.planners.placement.memory.ledger import clear, spans_in_graph_order, unread_bytes
from hocket.planners.placement.memory.mend import LARGE_OPS, in_graph_order
from hocket.planners.placement.memory.relieve import Board, SizeLevel
from hocket.planners.placement.memory.units import layers, units

BISECTIONS = 4
BISECTIONS_WHEN_LARGE = 2
"""Of the load, or of the scale of memory, that a split keeps to."""
STEP_UP = 1.2
WORTHWHILE = 0.97
"""A further option is looked into only if it beats the best by this factor."""
MAX_CORRECTIONS = 4
MAX_STARTS = 4
"""Splits that are handed on for mending where none fits."""
ENDLESS_BYTES = 2.0**62
"""Room without end, as a 64-bit number."""
UNLIMITED_S = 1e300
"""Infinity would also let a device take units that it cannot run."""


Result = tuple[IntArray, LongArray]
"""The device of each op, and the bytes that the ledger sees on each device."""


class LineOption(NamedTuple):
    """A line of units and the devices that take blocks of it in turn."""

    sequence: LongArray
    devices: LongArray


def split_attempts(problem: Problem, plan: Plan) -> list[Attempt]:
    """Plans of contiguous blocks, as simulated, the best first; several only if none fits."""
    filler = Filler(problem)
    plan = plan.ordered()
    free = problem.memory_bytes - unread_bytes(problem)
    found: list[Attempt] = []
    for _ in range(MAX_CORRECTIONS):
        unseen = np.zeros(len(free), dtype=np.int64)
        for device_of, seen in filler.splits(np.maximum(free, 1)):
            tried = _attempt(problem, plan.having(Placement(device_of)))
            if all(tried.rank() < other.rank() for other in found):
                unseen = np.maximum(tried.timeline.peak_bytes - seen, 0)
            found.append(tried)
        best = min(found, key=Attempt.rank)
        if not best.overflow_bytes or not unseen.any():
            break
        free = np.minimum(free, problem.memory_bytes - unseen)
    return sorted(found, key=Attempt.rank)


def _attempt(problem: Problem, plan: Plan) -> Attempt:
    """Devices run freely or, where they do not fit so, in the order of the graph."""
    free = attempt(problem, plan)
    if not free.overflow_bytes:
        return free
    return min(free, attempt(problem, in_graph_order(problem, plan)), key=Attempt.rank)


class Filler:
    """Fills devices with units, on the axis of a run in graph order."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.unit_of = units(problem.graph)
        self.level = SizeLevel(problem, self.unit_of)
        self.unit_s: FloatArray = table(self.level.unit_s, np.float64)
        self.fixed = table(elsewhere(problem, self.unit_of), np.int64)
        self.board = Board(problem, spans_in_graph_order(problem))
        self.sequences = self._sequences()

    def splits(self, free: LongArray) -> Iterator[Result]:
        """Splits worth simulating: those of small load and one that fills the fastest devices.

        Where none fits, those that lack least.
        """
        for lines in _device_lines(self.problem):
            options = [LineOption(sequence, line) for sequence in self.sequences for line in lines]
            fitting = [option for option in options if self._fits(option, free)]
            for sequence in self.sequences:
                alike = [option for option in fitting if option.sequence is sequence]
                if alike:
                    yield self._least_load(alike, free)
            if fitting:
                self._fits(fitting[0], free)
                yield self._result()
                return
        if self.problem.graph.num_ops >= LARGE_OPS:
            yield self._least_scale(options, free)
            return
        for option in options[:MAX_STARTS]:
            yield self._least_scale([option], free)

    def _sequences(self) -> list[LongArray]:
        """Lines of units: as the forward pass meets them, and layer by layer."""
        graph = self.problem.graph
        position = anchor_of(graph, self.unit_of)
        layer_of_unit = np.zeros(len(position), dtype=np.int64)
        layer_of_unit[self.unit_of] = layers(graph, self.unit_of)
        first_of_layer = np.full(len(position), graph.num_ops)
        np.minimum.at(first_of_layer, layer_of_unit, position)
        lines = [np.argsort(position, kind="stable")]
        by_layer = np.lexsort((position, first_of_layer[layer_of_unit]))
        if not self.problem.contiguous and not np.array_equal(by_layer, lines[0]):
            lines.append(by_layer)
        return [table(line[self.fixed[line] < 0], np.int64) for line in lines]

    def _fits(self, option: LineOption, cap_bytes: LongArray, cap_s: float = UNLIMITED_S) -> bool:
        """Whether all units find room; those that do are on the board then."""
        from hocket.planners.placement.memory.entries import fill

        board = self.board
        clear(board.ledger)
        return fill(
            board.tasks, board.facts, board.ledger, self.level.units, self.fixed, option.sequence,
            option.devices, table(cap_bytes, np.int64), cap_s, self.unit_s,
        )  # fmt: skip

    def _result(self) -> Result:
        return self.board.ledger.device_of.astype(np.int32), self.board.peak_bytes

    def _least_load(self, fitting: Sequence[LineOption], free: LongArray) -> Result:
        """The split whose busiest device works least."""
        able_s = np.where(self.level.can_run, self.unit_s, np.inf).min(axis=0).sum()
        low_s = max(float(able_s) / len(fitting[0].devices), 1e-12)
        return self._least(fitting, low_s, lambda o, cap_s: self._fits(o, free, cap_s))

    def _least_scale(self, options: Sequence[LineOption], free: LongArray) -> Result:
        """The split that exceeds every device by the smallest factor."""

        def fits(option: LineOption, scale: float) -> bool:
            return self._fits(option, np.minimum(free * scale, ENDLESS_BYTES).astype(np.int64))

        return self._least(options, 1.0, fits)

    def _least(
        self, options: Sequence[LineOption], low: float, fits: Callable[[LineOption, float], bool]
    ) -> Result:
        """The split for the smallest number above ``low`` with which one of the options fits."""
        is_large = self.problem.graph.num_ops >= LARGE_OPS
        bisections = BISECTIONS_WHEN_LARGE if is_large else BISECTIONS
        best: Result | None = None
        high = STEP_UP * low
        for option in options:
            floor = low
            if best is None:
                while not fits(option, high):
                    floor, high = high, STEP_UP * high
            elif not fits(option, high * WORTHWHILE):
                continue
            else:
                high *= WORTHWHILE
            best = self._result()
            for _ in range(bisections):
                middle = math.sqrt(floor * high)
                if fits(option, middle):
                    best, high = self._result(), middle
                else:
                    floor = middle
        assert best is not None
        return best


def _device_lines(problem: Problem) -> list[list[LongArray]]:
    """Orders in which devices take blocks: of the workers, and where those are not enough of all.

    Fastest first; as listed, which follows hosts and links; largest last, where the head of a
    language model is.
    """
    op_s = problem.costs.op_s
    seconds = np.where(np.isfinite(op_s), op_s, 0).sum(axis=1)[problem.costs.device_row]
    memory = problem.memory_bytes
    listed = workers(problem)
    others = np.setdiff1d(np.arange(len(memory)), listed)
    lines: list[IntArray] = []
    for line in (
        listed[np.lexsort((listed, -memory[listed], seconds[listed]))],
        listed,
        listed[np.lexsort((listed, memory[listed]))],
    ):
        if not any(np.array_equal(line, known) for known in lines):
            lines.append(line)
    with_others = [np.concatenate((line, others)) for line in lines]
    return [
        [table(line, np.int64) for line in choice]
        for choice in ((lines, with_others) if len(others) else (lines,))
    ]
