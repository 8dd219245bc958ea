"""Recompute of any graph of ops within a number of bytes, where the step is not a chain.

Turn t runs op t for the first time and, before it, what is made again for it or for later turns
(Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys
2020). So a schedule is one decision per turn and op: whether what the op made is held from the turn
before. What has to run in a turn follows from what is held into it and out of it, its inputs first.

These decisions are annealed, from everything held. A move takes an output and two turns that touch
it, one after the other: where it is held between them it is dropped and made again in the second,
or anywhere in between, and where it is not it is held; inputs that were held for it alone then go.
Only the turns at both ends have to be looked at anew; those between hold so many bytes more or
less. Bytes above the budget cost time, little at first, so that outputs can change places, and in
the end more than anything gains. The best of some rounds that end within the budget. The number of
moves is given, not the time, so that the result is the same everywhere.
O(rounds · moves · (ops + reads)) and ops² bytes, compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray, pointers
from hocket.kernels import kernel
from hocket.planners.max_load.load_annealing import RandomState, draw, draw_below, is_taken, seeded

NUM_ROUNDS = 4
MOST_MOVES = 1_000_000
"""Per round; fewer for small graphs (`MOVES_PER_PAIR`) and for large ones (`MOST_LOOKS`)."""
MOVES_PER_PAIR = 200
MOST_LOOKS = 500_000_000
"""Moves times ops."""
FIRST_HEAT, LAST_HEAT = 1.0, 3e-4
"""In mean times of an op."""
FIRST_PRICE, LAST_PRICE = 0.05, 50.0
"""Of a byte above the budget in one turn, in the mean seconds that it takes to make a byte."""
PART_WAY = 0.3
"""The chance that what is dropped comes back before it is read."""
MOST_CHANGES = 8
"""Of what is held, in one move."""
NEVER = 1e30
"""Seconds of what cannot be done."""


class OpGraph(NamedTuple):
    """Ops in an order in which they can run, as compiled code reads them; every output is memory of
    its own."""

    seconds: FloatArray
    output_bytes: LongArray
    work_bytes: LongArray
    """What is held only while each op runs."""
    beside_bytes: LongArray
    """What is held in each turn whatever runs."""
    read_ptr: LongArray
    reads: LongArray
    """Ops whose outputs each op reads: of op v ``reads[read_ptr[v] : read_ptr[v + 1]]``."""
    last_turn: LongArray
    """The last turn in which each op can run again: later its inputs are changed in place."""

    @classmethod
    def of(
        cls, seconds: FloatArray, output_bytes: LongArray, reads: Sequence[Collection[int]], *,
        work_bytes: LongArray | None = None, beside_bytes: LongArray | None = None,
        last_turn: LongArray | None = None,
    ) -> OpGraph:  # fmt: skip
        """The graph of such lists; nothing else is held and ops run again at any time unless
        told."""
        count = len(output_bytes)
        none = np.zeros(count, dtype=np.int64)
        flat = np.array([op for each in reads for op in dict.fromkeys(each)], dtype=np.int64)
        return cls(
            seconds=np.asarray(seconds, dtype=np.float64),
            output_bytes=np.asarray(output_bytes, dtype=np.int64),
            work_bytes=none if work_bytes is None else work_bytes,
            beside_bytes=none if beside_bytes is None else beside_bytes,
            read_ptr=pointers([len(set(each)) for each in reads]),
            reads=flat,
            last_turn=np.full(count, count) if last_turn is None else last_turn,
        )

    @property
    def num_ops(self) -> int:
        """How many there are."""
        return len(self.output_bytes)

    def reads_of(self, op: int) -> list[int]:
        """Ops whose outputs an op reads."""
        found: list[int] = self.reads[self.read_ptr[op] : self.read_ptr[op + 1]].tolist()
        return found


@dataclass(frozen=True)
class GraphSchedule:
    """Ops in the order in which they run; an output goes once it is not read before it is made
    again."""

    seconds: float
    peak_bytes: int
    runs: tuple[int, ...]


def schedule_graph(
    graph: OpGraph, budget_bytes: int, *, num_rounds: int = NUM_ROUNDS, seed: int = 0
) -> GraphSchedule | None:
    """The fastest schedule within the budget that was met; None where none was."""
    found = (_round(graph, budget_bytes, seed * num_rounds + n) for n in range(num_rounds))
    return min(filter(None, found), key=lambda s: (s.seconds, s.peak_bytes), default=None)


def replayed(graph: OpGraph, runs: tuple[int, ...]) -> GraphSchedule:
    """Such runs with their time and the most bytes that they hold; raises `ValueError` where one
    reads what is not there."""
    last_read = [-1] * len(runs)
    """By run: the last run that reads what it makes."""
    made_by: dict[int, int] = {}
    for at, op in enumerate(runs):
        for read in graph.reads_of(op):
            if read not in made_by:
                raise ValueError(f"run {at} of op {op} reads op {read}, which has not run")
            last_read[made_by[read]] = at
        made_by[op] = at
    made_bytes = graph.output_bytes[list(runs)]
    change = np.zeros(len(runs) + 1, dtype=np.int64)
    change[: len(runs)] += made_bytes
    np.subtract.at(change, np.maximum(last_read, np.arange(len(runs))) + 1, made_bytes)
    turn = np.maximum.accumulate(runs)
    more = graph.work_bytes[list(runs)] + graph.beside_bytes[turn]
    peak = int((np.cumsum(change)[:-1] + more).max(initial=0))
    return GraphSchedule(float(graph.seconds[list(runs)].sum()), peak, runs)


# ── one round ────────────────────────────────────────────────────────────────────────────────────


class _HeldState(NamedTuple):
    """What annealing writes to."""

    held: BoolArray
    """[turn, op]: whether the output is held from the turn before; one more turn, without any."""
    touched: BoolArray
    """[turn, op]: whether the turn makes it or reads it."""
    best: BoolArray
    """``held`` of the best schedule so far."""
    taken_s: FloatArray
    peak_bytes: LongArray
    """Both per turn."""
    runs: BoolArray
    last: LongArray
    """Of one turn, per op: whether it runs, and the last one that reads it."""
    changed: LongArray
    """[change, (op, start, stop)] of a move: the output is held, or no more, behind the turn
    ``start`` up to the turn ``stop``."""
    old_touched: BoolArray
    """[change, end, op]: of the turns at both ends, before the change."""
    old_s: FloatArray
    old_peak_bytes: LongArray
    """Likewise."""
    random: RandomState


def _round(graph: OpGraph, budget_bytes: int, seed: int) -> GraphSchedule | None:
    count, total_s = graph.num_ops, float(graph.seconds.sum())
    held = np.zeros((count + 1, count), dtype=np.bool_)
    for op in range(count):
        for read in graph.reads_of(op):
            held[read + 1 : op + 1, read] = True
    state = _HeldState(
        held=held, touched=np.zeros((count, count), dtype=np.bool_), best=held.copy(),
        taken_s=np.zeros(count), peak_bytes=np.zeros(count, dtype=np.int64),
        runs=np.zeros(count, dtype=np.bool_), last=np.zeros(count, dtype=np.int64),
        changed=np.zeros((MOST_CHANGES, 3), dtype=np.int64),
        old_touched=np.zeros((MOST_CHANGES, 2, count), dtype=np.bool_),
        old_s=np.zeros((MOST_CHANGES, 2)),
        old_peak_bytes=np.zeros((MOST_CHANGES, 2), dtype=np.int64), random=seeded(seed),
    )  # fmt: skip
    moves = min(MOST_MOVES, MOVES_PER_PAIR * count**2, MOST_LOOKS // max(count, 1))
    unit_s = total_s / max(int(graph.output_bytes.sum()), 1)
    movable = np.flatnonzero(graph.output_bytes[:-1] > 0)
    if not _anneal(graph, movable, state, budget_bytes, moves, total_s / count, unit_s):
        return None
    return replayed(graph, _runs(graph, state))


def _runs(ops: OpGraph, state: _HeldState) -> tuple[int, ...]:
    """What runs in the best schedule, turn by turn."""
    state.held[:] = state.best
    found: list[int] = []
    for turn in range(ops.num_ops):
        _look(turn, ops, state)
        found += np.flatnonzero(state.runs[: turn + 1]).tolist()
    return tuple(found)


@kernel
def _look(turn: int, ops: OpGraph, state: _HeldState) -> tuple[float, int]:
    """Seconds of a turn and the most bytes in it, by what is held into it and out of it."""
    held, runs, last = state.held, state.runs, state.last
    seconds, num_bytes = 0.0, ops.beside_bytes[turn]
    for op in range(turn + 1):
        is_held = held[turn, op]
        runs[op] = op == turn or (held[turn + 1, op] and not is_held)
        last[op] = -1
        if is_held:
            num_bytes += ops.output_bytes[op]
    lowest = turn
    for op in range(turn, -1, -1):
        if runs[op]:
            lowest = op
            seconds += ops.seconds[op]
            if turn > op and turn > ops.last_turn[op]:
                seconds += NEVER
            for at in range(ops.read_ptr[op], ops.read_ptr[op + 1]):
                read = ops.reads[at]
                if last[read] < 0:
                    last[read] = op
                    if not held[turn, read]:
                        runs[read] = True
    most = num_bytes
    for op in range(turn + 1):
        state.touched[turn, op] = runs[op] or last[op] >= 0
    for op in range(lowest, turn + 1):
        if runs[op]:
            num_bytes += ops.output_bytes[op]
            most = max(most, num_bytes + ops.work_bytes[op])
            for at in range(ops.read_ptr[op], ops.read_ptr[op + 1]):
                read = ops.reads[at]
                if last[read] == op and not held[turn + 1, read]:
                    num_bytes -= ops.output_bytes[read]
            if last[op] < 0 and not held[turn + 1, op]:
                num_bytes -= ops.output_bytes[op]
    return seconds, most


@kernel
def _change(
    number: int, op: int, start: int, stop: int, ops: OpGraph, state: _HeldState, budget_bytes: int
) -> tuple[float, int]:
    """Hold an output between two turns, or drop it; by how much time and bytes above the budget
    rise."""
    held, peak_bytes = state.held, state.peak_bytes
    is_held = not held[stop, op]
    state.changed[number, 0], state.changed[number, 1], state.changed[number, 2] = op, start, stop
    for end in range(2):
        turn = stop if end == 1 else start
        state.old_s[number, end] = state.taken_s[turn]
        state.old_peak_bytes[number, end] = peak_bytes[turn]
        for each in range(turn + 1):
            state.old_touched[number, end, each] = state.touched[turn, each]
    for turn in range(start + 1, stop + 1):
        held[turn, op] = is_held
    more_bytes = ops.output_bytes[op] if is_held else -ops.output_bytes[op]
    rise_s, rise_bytes = 0.0, 0
    for turn in range(start + 1, stop):
        above_bytes = max(peak_bytes[turn] - budget_bytes, 0)
        peak_bytes[turn] += more_bytes
        rise_bytes += max(peak_bytes[turn] - budget_bytes, 0) - above_bytes
    for end in range(2):
        turn = stop if end == 1 else start
        seconds, most_bytes = _look(turn, ops, state)
        rise_s += seconds - state.taken_s[turn]
        rise_bytes += max(most_bytes - budget_bytes, 0) - max(peak_bytes[turn] - budget_bytes, 0)
        state.taken_s[turn], peak_bytes[turn] = seconds, most_bytes
    return rise_s, rise_bytes


@kernel
def _take_back(number: int, ops: OpGraph, state: _HeldState) -> None:
    """Undo the last change of a move."""
    op, start, stop = state.changed[number]
    was_held = not state.held[stop, op]
    for turn in range(start + 1, stop + 1):
        state.held[turn, op] = was_held
    more_bytes = ops.output_bytes[op] if was_held else -ops.output_bytes[op]
    for turn in range(start + 1, stop):
        state.peak_bytes[turn] += more_bytes
    for end in range(2):
        turn = stop if end == 1 else start
        state.taken_s[turn] = state.old_s[number, end]
        state.peak_bytes[turn] = state.old_peak_bytes[number, end]
        for each in range(turn + 1):
            state.touched[turn, each] = state.old_touched[number, end, each]


@kernel
def _draw_change(movable: LongArray, state: _HeldState) -> tuple[int, int, int]:
    """An output and the turns at both ends; the last is none where it is not used any more."""
    count, held, touched = len(state.taken_s), state.held, state.touched
    op = movable[draw_below(state.random, len(movable))]
    turn = op + 1 + draw_below(state.random, count - op - 1)
    start, stop = turn - 1, turn
    while not touched[start, op]:
        start -= 1
    if not held[turn, op]:
        while stop < count and not touched[stop, op]:
            stop += 1
    elif draw(state.random) >= PART_WAY:
        # What is held for nothing ends without being touched.
        while not touched[stop, op] and held[stop + 1, op]:
            stop += 1
    return op, start, stop


@kernel
def _anneal(
    ops: OpGraph,
    movable: LongArray,
    state: _HeldState,
    budget_bytes: int,
    num_moves: int,
    mean_s: float,
    unit_s: float,
) -> bool:
    """Leave the best schedule within the budget in ``state.best``; whether there was one. Outputs
    of ``movable`` ops may go."""
    count, held, touched, changed = len(ops.output_bytes), state.held, state.touched, state.changed
    now_s, above_bytes, best_s = 0.0, 0, np.inf
    for turn in range(count):
        state.taken_s[turn], state.peak_bytes[turn] = _look(turn, ops, state)
        now_s += state.taken_s[turn]
        above_bytes += max(state.peak_bytes[turn] - budget_bytes, 0)
    if above_bytes == 0:
        return True
    for move in range(num_moves):
        part = move / num_moves
        heat = mean_s * FIRST_HEAT * (LAST_HEAT / FIRST_HEAT) ** part
        price_s = unit_s * FIRST_PRICE * (LAST_PRICE / FIRST_PRICE) ** part
        op, start, stop = _draw_change(movable, state)
        if stop == count:
            continue
        rise_s, rise_bytes = _change(0, op, start, stop, ops, state, budget_bytes)
        num_changes, number = 1, 0
        while number < num_changes:
            for end in range(1, 3):
                of, turn = changed[number, 0], changed[number, end]
                for at in range(ops.read_ptr[of], ops.read_ptr[of + 1]):
                    read = ops.reads[at]
                    is_idle = held[turn, read] and not held[turn + 1, read]
                    if num_changes < MOST_CHANGES and is_idle and not touched[turn, read]:
                        start = turn - 1
                        while not touched[start, read]:
                            start -= 1
                        more_s, more_bytes = _change(
                            num_changes, read, start, turn, ops, state, budget_bytes
                        )
                        rise_s += more_s
                        rise_bytes += more_bytes
                        num_changes += 1
            number += 1
        if not is_taken(rise_s + price_s * rise_bytes, heat, state.random):
            for back in range(num_changes - 1, -1, -1):
                _take_back(back, ops, state)
            continue
        now_s += rise_s
        above_bytes += rise_bytes
        if above_bytes == 0 and now_s < best_s * (1 - 1e-12):
            best_s = now_s
            for turn in range(count):
                for each in range(turn):
                    state.best[turn, each] = held[turn, each]
    return best_s < np.inf
