"""Mend a plan that lacks memory: with another order, with few moves, or with a search.

The plan is simulated; while devices lack memory, ops keep their times and units move in the ledger
(`relieve`), and the result is simulated again, which sets the times anew. Where devices that run
ahead of each other pile tensors up, each device is bound to the order of the graph: then the run is
what the ledger says. Last comes a search at random (`anneal`). A handful of simulations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.coarsen import bound_ops
from hocket.graph.graph import Phase
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.parts.annealing import RandomState, seeded
from hocket.planners.placement.memory.attempt import Attempt, attempt
from hocket.planners.placement.memory.ledger import spans_of_run
from hocket.planners.placement.memory.relieve import MAX_BATCHES, Board, SizeLevel, relieve
from hocket.planners.placement.memory.units import layers, units

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
"""Entries of the ledger that a search may look at: bounds its time on large units."""


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
    from hocket.planners.placement.memory.anneal import anneal

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
