"""Planners for tight memory: repair a given placement, or split the model from scratch.

Both try what changes least first: another order, a few moves, then a search that gives up the order
in which devices run freely. The best plan that was seen is returned, so the overflow never grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.graph.coarsen import anchor_of, bound_ops
from hocket.graph.coarsen.ties import Ties, followers, hard_ties, optimizers, partners, views
from hocket.graph.coarsen.units import joined
from hocket.graph.graph import Graph, Phase, Role
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.annealing import RandomState, draw_below, is_taken, seeded
from hocket.planners.placement.devices import elsewhere, workers
from hocket.planners.placement.memory.attempt import Attempt, attempt
from hocket.planners.placement.memory.kernel import overflow, place_unit, take_unit
from hocket.planners.placement.memory.ledger import (
    LedgerTable,
    MemoryLedger,
    clear,
    owner_ops,
    spans_in_graph_order,
    spans_of_run,
    unread_bytes,
)
from hocket.planners.placement.memory.relieve import MAX_BATCHES, Board, SizeLevel, relieve
from hocket.planners.shared import OpGroups
from hocket.planners.tables import TaskTable

# Random moves and swaps of units in the ledger, compiled: simulated annealing on the overflow.
#
# A unit, most often one of a device that lacks memory, goes to another device, every other time in
# exchange for a unit from there. What makes the overflow and, much less, the sum of all peaks
# smaller stays; what makes them larger stays with a chance that falls to nothing in the end.
# O(tries · spans of a unit · log instants).

_DRAWS = 8
_WASTE = 0.05
"""Weight of the sum of all peaks, against 1 for bytes above a limit."""


@kernel
def _copy(values: LongArray, to: LongArray) -> None:
    for index in range(len(values)):
        to[index] = values[index]


@kernel
def _cost(ledger: MemoryLedger, limit_bytes: LongArray) -> float:
    total = 0.0
    for device in range(len(limit_bytes)):
        held = ledger.top[device, 1]
        total += max(0, held - limit_bytes[device]) + _WASTE * held
    return total


@kernel
def _draw_unit(
    ledger: MemoryLedger, device_of_unit: LongArray, limit_bytes: LongArray, state: RandomState
) -> int:
    unit = 0
    for _ in range(_DRAWS):
        unit = draw_below(state, len(device_of_unit))
        device = device_of_unit[unit]
        if device >= 0 and ledger.top[device, 1] > limit_bytes[device]:
            break
    return unit


@kernel
def _draw_from(device_of_unit: LongArray, device: int, state: RandomState) -> int:
    for _ in range(4 * _DRAWS):
        unit = draw_below(state, len(device_of_unit))
        if device_of_unit[unit] == device:
            return unit
    return -1


@kernel
def _move(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, units: OpGroups,
    device_of_unit: LongArray, unit: int, target: int,
) -> None:  # fmt: skip
    take_unit(tasks, facts, ledger, units, unit, device_of_unit[unit])
    place_unit(tasks, facts, ledger, units, unit, target)
    device_of_unit[unit] = target


@kernel
def anneal(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    device_of_unit: LongArray,
    can_run: BoolArray,
    work: LongArray,
    limit_bytes: LongArray,
    best: LongArray,
    state: RandomState,
    max_tries: int,
    max_work: int,
    heat_bytes: float,
) -> int:
    """Move and swap; ``best`` gets the device of each op at the least overflow, which is returned.

    Ends after so many tries, or when the moved units add up to so much work.
    """
    num_devices = len(limit_bytes)
    cost = _cost(ledger, limit_bytes)
    least = overflow(ledger, limit_bytes)
    _copy(ledger.device_of, best)
    turn, done = 0, 0
    while turn < max_tries and done < max_work and least > 0:
        turn += 1
        unit = _draw_unit(ledger, device_of_unit, limit_bytes, state)
        source, target = device_of_unit[unit], draw_below(state, num_devices)
        if source < 0 or source == target or not can_run[target, unit]:
            continue
        other = _draw_from(device_of_unit, target, state) if turn & 1 else -1
        if other >= 0 and not can_run[source, other]:
            other = -1
        _move(tasks, facts, ledger, units, device_of_unit, unit, target)
        done += work[unit]
        if other >= 0:
            _move(tasks, facts, ledger, units, device_of_unit, other, source)
            done += work[other]
        changed = _cost(ledger, limit_bytes)
        heat = heat_bytes * (1 - max(turn / max_tries, done / max_work)) ** 2
        if is_taken(changed - cost, heat, state):
            cost = changed
            lacking = overflow(ledger, limit_bytes)
            if lacking < least:
                least = lacking
                _copy(ledger.device_of, best)
            continue
        if other >= 0:
            _move(tasks, facts, ledger, units, device_of_unit, other, target)
        _move(tasks, facts, ledger, units, device_of_unit, unit, source)
    return least


# What moves as one when memory is short, from large to small.
#
# Layers are units that read the same parameters: together they need them once. Units are ops that
# gain nothing from being apart (an op, its backward op, its optimizer op). The least is what every
# plan must keep together (`bound_ops`). O(ops + reads).


def units(graph: Graph) -> IntArray:
    """The unit of each op."""
    idle = views(graph)
    # A backward view already follows its forward op; tied to what it views as well, it would join
    # the units on both sides.
    kept = (graph.op_phase[idle.first] == Phase.FORWARD) | (graph.partner[idle.first] < 0)
    soft = (
        partners(graph),
        Ties(idle.first[kept], idle.second[kept]),
        optimizers(graph),
        followers(graph),
    )
    return joined(graph.num_ops, *hard_ties(graph), *soft)


def layers(graph: Graph, unit_of: IntArray) -> IntArray:
    """The layer of each op: units that read the same parameters or state are in one."""
    root, owner = graph.root_of[graph.reads], owner_ops(graph)
    is_shared = (owner >= 0) & (graph.tensor_role != Role.INPUT) & (graph.tensor_bytes > 0)
    reader = graph.reader
    kept = is_shared[root]
    num_units = int(unit_of.max(initial=-1)) + 1
    same = Ties(unit_of[reader[kept]], unit_of[owner[root[kept]]])
    # Units and layers are both numbered by their first members, so layers are by their first ops.
    return joined(num_units, same)[unit_of]


# Repair a plan that lacks memory: with another order, with few moves, or with a search.
#
# The plan is simulated; while devices lack memory, ops keep their times and units move in the
# ledger (`relieve`), and the result is simulated again, which updates the times. Where devices
# that run ahead of each other accumulate tensors, each device is bound to the order of the graph:
# then the run matches the ledger. Last comes a random search (`anneal`). A handful of
# simulations.

MAX_ROUNDS = 4
"""Rounds of moves and a simulation, per size of unit."""
LARGE_OPS = 50_000
"""From here on only units move, neither layers nor single ops, and less is tried."""
ROUNDS_WHEN_LARGE = 2
BATCHES_WHEN_LARGE = 30
HEATS = (0.0, 0.001, 0.004)
"""Per search: by how much of a device's memory a random move may worsen things at first."""
MAX_TRIES = 30_000
MAX_WORK = 20_000_000
"""Ledger entries that a search may evaluate: bounds its time on large units."""


def levels_of(problem: Problem) -> list[SizeLevel]:
    """Units of all sizes, the largest first."""
    unit_of = units(problem.graph)
    if _is_large(problem):
        return [SizeLevel(problem, unit_of)]
    sizes = (layers(problem.graph, unit_of), unit_of, bound_ops(problem.graph))
    return [SizeLevel(problem, size) for size in sizes]


def _is_large(problem: Problem) -> bool:
    return problem.graph.num_ops >= LARGE_OPS


def reordered(problem: Problem, start: Attempt) -> Attempt:
    """The plan with an order that releases memory early, where that alone makes it fit.

    Backward ops end the life of activations: they go before forward ops, which start new ones.
    """
    is_forward = problem.graph.op_phase == Phase.FORWARD
    position = np.arange(problem.graph.num_ops, dtype=np.float64)
    eager = start.plan.ordered(priority=position + len(position) * is_forward)
    tried = attempt(problem, eager)
    return start if tried.overflow_bytes else tried


def in_graph_order(problem: Problem, plan: Plan) -> Plan:
    """The plan with each device bound to the order in which the graph lists its ops."""
    assert plan.device_of is not None
    order = tuple(
        np.flatnonzero(plan.device_of == device).astype(np.int32)
        for device in range(problem.cluster.num_devices)
    )
    return plan.ordered(by_device=order)


def moved(problem: Problem, start: Attempt, levels: Sequence[SizeLevel]) -> Attempt:
    """Few moves: of the largest units first, with smaller ones while it does not fit."""
    max_rounds = ROUNDS_WHEN_LARGE if _is_large(problem) else MAX_ROUNDS
    max_batches = BATCHES_WHEN_LARGE if _is_large(problem) else MAX_BATCHES
    best = start
    for count in range(1, len(levels) + 1):
        current = best
        for _ in range(max_rounds):
            if not best.overflow_bytes:
                return best
            board, limit_bytes = _board(problem, current)
            if not relieve(board, levels[:count], limit_bytes, max_batches):
                break
            current = attempt(problem, _placed(problem, current.plan, board.ledger.device_of))
            best = min(best, current, key=Attempt.rank)
    return best


def searched(problem: Problem, start: Attempt, levels: Sequence[SizeLevel]) -> Attempt:
    """Moves and then random ones, with each device bound to the order of the graph."""
    best = attempt(problem, in_graph_order(problem, start.plan))
    if _is_large(problem):
        return best
    best = moved(problem, best, levels)
    state = seeded(problem.seed)
    for heat in HEATS:
        for level in levels:
            if not best.overflow_bytes:
                return best
            best = min(best, _annealed(problem, best, level, heat, state), key=Attempt.rank)
    return best


def _annealed(
    problem: Problem, start: Attempt, level: SizeLevel, heat: float, state: RandomState
) -> Attempt:

    board, limit_bytes = _board(problem, start)
    found = np.empty(problem.graph.num_ops, dtype=np.int64)
    anneal(
        board.tasks, board.facts, board.ledger, level.units,
        level.devices(board.ledger.device_of), table(level.can_run, np.bool_),
        level.work, limit_bytes, found, state,
        MAX_TRIES, MAX_WORK, heat * float(problem.memory_bytes.mean()),
    )  # fmt: skip
    return attempt(problem, _placed(problem, start.plan, found))


def _board(problem: Problem, start: Attempt) -> tuple[Board, LongArray]:
    """The ledger of a plan, and the bytes per device that the ledger may use."""
    assert start.plan.device_of is not None
    board = Board(problem, spans_of_run(problem, start.timeline))
    board.place(start.plan.device_of)
    # What the ledger does not see (transfers that wait, tensors that nothing reads) is kept free.
    unseen = np.maximum(start.timeline.peak_bytes - board.peak_bytes, 0)
    return board, table(problem.memory_bytes - unseen, np.int64)


def _placed(problem: Problem, plan: Plan, device_of: LongArray) -> Plan:
    """The plan with another placement; a strict order becomes that of the graph."""
    placed = plan.having(Placement(device_of.astype(np.int32)))
    return placed if plan.by_device is None else in_graph_order(problem, placed)


# Memory split: contiguous blocks of the model, each no larger than its device can hold.
#
# Units form a sequence, in the order of the forward pass or layer by layer; devices are filled one
# after another, on a ledger that counts what a block really holds at every instant. Of the splits
# that fit, the one with the smallest load of the busiest device is found by bisection; where none
# fits, those that exceed every device by the smallest factor, for moves to mend. What the simulator
# sees and the ledger does not is kept free and the devices are filled again.
# O(fills · (ops + reads) · log ops) and a handful of simulations.

BISECTIONS = 4
BISECTIONS_WHEN_LARGE = 2
"""Of the load, or of the scale of memory, that a split keeps to."""
STEP_UP = 1.2
WORTHWHILE = 0.97
"""A further option is tried only if it beats the best by this factor."""
MAX_CORRECTIONS = 4
MAX_STARTS = 4
"""Splits that are handed on for mending where none fits."""
ENDLESS_BYTES = 2.0**62
"""Unlimited memory, as a finite number that fits into 64 bits."""
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
        """True if all units fit; those that do are then placed on the board."""
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


MAX_OPS_TO_MEND = 100_000
"""Of all splits that are mended together; one always is."""


def spread_memory(problem: Problem, plan: Plan) -> Plan:
    """A plan near the given one that fits, or the one that lacks least of all that were tried."""
    best = attempt(problem, plan)
    if best.overflow_bytes:
        best = reordered(problem, best)
    if not best.overflow_bytes or problem.contiguous:
        return best.plan
    best = moved(problem, best, levels_of(problem))
    if best.overflow_bytes:
        best = min(best, _split(problem, plan), key=Attempt.rank)
    return best.plan


def memory_split(problem: Problem, plan: Plan) -> Plan:
    """Contiguous blocks that fit, or the plan that lacks least of all that were tried."""
    if problem.contiguous:
        return split_attempts(problem, plan)[0].plan
    best = _split(problem, plan)
    if best.overflow_bytes:
        best = min(best, searched(problem, best, levels_of(problem)), key=Attempt.rank)
    if best.plan.by_device is not None:
        best = min(
            best, attempt(problem, best.plan.ordered(priority=best.plan.priority)), key=Attempt.rank
        )
    return best.plan


def _split(problem: Problem, plan: Plan) -> Attempt:
    """Split the model from scratch; repair the result where no split fits by itself."""
    starts = split_attempts(problem, plan)
    best = starts[0]
    if not best.overflow_bytes:
        return best
    levels = levels_of(problem)
    num_mended = max(1, MAX_OPS_TO_MEND // max(problem.graph.num_ops, 1))
    for start in starts[:num_mended]:
        best = min(best, moved(problem, start, levels), key=Attempt.rank)
        if not best.overflow_bytes:
            break
    return best
