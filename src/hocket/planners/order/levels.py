"""Levels: how far each op is from the start and from the end, in seconds, where ops are placed.

The length of a path is the time of its ops on their devices and of the transfers that the placement
causes, each alone on its links. O(ops + reads).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import UsageError
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.evaluate import Evaluator
from hocket.simulate.instructions import Given, PlaceTable, RunTable, TransferTable

# Longest paths through a placed graph, compiled: to the end, and from the start.


class Placed(NamedTuple):
    """Ops where they are, and what it takes to send their tensors."""

    device: LongArray
    duration_s: FloatArray
    made_ptr: LongArray
    user_ptr: LongArray
    users: LongArray
    work: FloatArray
    latency_s: FloatArray
    """[src, dst]"""
    unit_s: FloatArray
    """[src, dst]: seconds per unit of work."""


@kernel
def _transfer_s(placed: Placed, tensor: int, src: int, dst: int) -> float:
    if src == dst:
        return 0.0
    seconds: float = placed.latency_s[src, dst] + placed.work[tensor] * placed.unit_s[src, dst]
    return seconds


@kernel
def fill_levels(placed: Placed, to_end_s: FloatArray, from_start_s: FloatArray) -> None:
    """Per op, the longest path from its start to the end, and from the beginning to its start.

    ``from_start_s`` comes in as zeros.
    """
    for op in range(len(placed.device) - 1, -1, -1):
        src, longest_s = placed.device[op], 0.0
        for tensor in range(placed.made_ptr[op], placed.made_ptr[op + 1]):
            for index in range(placed.user_ptr[tensor], placed.user_ptr[tensor + 1]):
                user = placed.users[index]
                sent_s = _transfer_s(placed, tensor, src, placed.device[user])
                longest_s = max(longest_s, sent_s + to_end_s[user])
        to_end_s[op] = placed.duration_s[op] + longest_s
    for op in range(len(placed.device)):
        src, end_s = placed.device[op], from_start_s[op] + placed.duration_s[op]
        for tensor in range(placed.made_ptr[op], placed.made_ptr[op + 1]):
            for index in range(placed.user_ptr[tensor], placed.user_ptr[tensor + 1]):
                user = placed.users[index]
                sent_s = _transfer_s(placed, tensor, src, placed.device[user])
                from_start_s[user] = max(from_start_s[user], end_s + sent_s)


# How late ops could start without making the step longer, compiled.


@kernel
def fill_latest(
    given: Given,
    runs: RunTable,
    places: PlaceTable,
    transfers: TransferTable,
    op_end_s: FloatArray,
    transfer_end_s: FloatArray,
    by_start: LongArray,
    arrival_s: FloatArray,
    free_s: FloatArray,
    latest_s: FloatArray,
    keeps_order: bool,
) -> None:
    """Latest start of every op, from the last to the first.

    ``by_start`` lists ops so that readers follow producers; ``free_s`` comes in with the end of
    the step for each queue, and moves forward if the ops of a queue are to keep their order.
    """
    for transfer in range(runs.send_ptr[len(runs.device)]):
        arrival_s[transfers.place[transfer]] = transfer_end_s[transfer]
    for index in range(len(by_start) - 1, -1, -1):
        op = by_start[index]
        limit_s = free_s[runs.queue[op]]
        for tensor in range(runs.made_ptr[op], runs.made_ptr[op + 1]):
            for user in range(given.user_ptr[tensor], given.user_ptr[tensor + 1]):
                read = given.user_read[user]
                place = places.read_place[read]
                sent_s = 0.0 if place == tensor else arrival_s[place] - op_end_s[op]
                limit_s = min(limit_s, latest_s[places.reader[read]] - sent_s)
        latest_s[op] = limit_s - runs.duration_s[op]
        if keeps_order:
            free_s[runs.queue[op]] = latest_s[op]


class Levels(NamedTuple):
    """Longest paths per op."""

    to_end_s: FloatArray
    """Longest path from its start to the end of the step."""
    from_start_s: FloatArray
    """Longest path from the beginning of the step to its start."""


def levels(problem: Problem, device_of: IntArray) -> Levels:
    """The levels of every op."""

    graph, costs = problem.graph, problem.costs
    stated, routes = costs.tensor_s is not None, costs.routes
    placed = Placed(
        device=table(device_of, np.int64),
        duration_s=table(
            costs.op_s[costs.device_row[device_of], np.arange(graph.num_ops)], np.float64
        ),
        made_ptr=table(graph.made_ptr, np.int64),
        user_ptr=table(graph.user_ptr, np.int64),
        users=table(graph.users, np.int64),
        work=table(costs.tensor_bytes if costs.tensor_s is None else costs.tensor_s, np.float64),
        latency_s=table(routes.latency_s, np.float64),
        unit_s=table(routes.hops if stated else 1 / routes.bandwidth_bps, np.float64),
    )
    found = Levels(np.zeros(graph.num_ops), np.zeros(graph.num_ops))
    fill_levels(placed, found.to_end_s, found.from_start_s)
    return found


def placement_of(plan: Plan) -> IntArray:
    """The placement of a plan; raises `UsageError` where it has none."""
    if plan.device_of is None:
        raise UsageError(
            "the plan does not say where ops run",
            hint="run a placement planner before the order",
            where=plan.planner,
        )
    return plan.device_of


# Slack: how much later each op could have started in a simulated step without making it longer.
#
# Transfers take as long as they took in the simulation, waiting included, so that the ops without
# slack are those on its critical paths. O(ops log ops + reads).


def latest_starts(evaluator: Evaluator, *, keeps_order: bool) -> FloatArray:
    """Latest start of each op in the step that was evaluated last.

    With ``keeps_order`` the ops of each device stay in their order and do not overlap; without, a
    device may do any number of ops at once, which says how urgent an op is whatever the order.
    """

    given, spans = evaluator.buffers.given, evaluator.state.spans
    runs, places, transfers, _ = evaluator.buffers.tables
    # Of things of no length at one instant the graph's own order says which came first.
    by_start = np.lexsort((spans.op_end_s, spans.op_start_s))
    latest_s = np.zeros(len(by_start))
    free_s = np.full(len(runs.lineup_ptr) - 1, evaluator.score.step_s)
    arrival_s = np.zeros(len(places.device))
    fill_latest(
        given, runs, places, transfers, spans.op_end_s, spans.transfer_end_s, by_start, arrival_s,
        free_s, latest_s, keeps_order,
    )  # fmt: skip
    return latest_s
