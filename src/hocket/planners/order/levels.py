"""Levels: longest paths from the start of the step to each op, and from there to the end.

The length of a path is the time of its ops on their devices plus the transfers that the placement
causes, each without contention. The file also computes latest starts in a simulated step. O(ops +
reads).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import UsageError
from hocket.graph.graph import Graph
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.shared import longest_from_start, longest_to_end
from hocket.planners.tables import task_table
from hocket.simulate.evaluate import Evaluator
from hocket.simulate.instructions import Given, PlaceTable, RunTable, TransferTable
from hocket.simulate.state import Spans

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
    """Fill the latest start of every op, from the last to the first.

    ``by_start`` lists ops so that readers follow producers. ``free_s`` must hold the end of the
    step for each queue; with ``keeps_order`` it is lowered to the start of the op that follows.
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
                # On the producer's device the tensor is there at once; elsewhere it takes as long
                # as simulated.
                sent_s = 0.0 if place == tensor else arrival_s[place] - op_end_s[op]
                limit_s = min(limit_s, latest_s[places.reader[read]] - sent_s)
        latest_s[op] = limit_s - runs.duration_s[op]
        if keeps_order:
            free_s[runs.queue[op]] = latest_s[op]


class Levels(NamedTuple):
    """Longest paths of each op."""

    to_end_s: FloatArray
    """Per op: longest path from its start to the end of the step."""
    from_start_s: FloatArray
    """Per op: longest path from the beginning of the step to its start."""


def levels(problem: Problem, device_of: IntArray) -> Levels:
    """Compute the levels of every op."""
    graph, tasks = problem.graph, task_table(problem)
    sent = np.repeat(np.arange(graph.num_tensors), np.diff(graph.user_ptr))
    # The appended 0 stands for tensors without a producer, whose index is -1.
    src, dst = np.append(device_of, 0)[graph.tensor_producer[sent]], device_of[graph.users]
    transfer_s = tasks.latency_s[src, dst] + tasks.work[sent] * tasks.unit_s[src, dst]
    edge_s = np.where(src == dst, 0.0, transfer_s)
    return _levels(graph, tasks.op_s[device_of, np.arange(graph.num_ops)], edge_s)


def longest_paths(graph: Graph, op_s: FloatArray) -> FloatArray:
    """Per op: the longest path to the end, without transfers."""
    return _levels(graph, op_s, np.zeros(len(graph.users))).to_end_s


def _levels(graph: Graph, op_s: FloatArray, edge_s: FloatArray) -> Levels:
    """Return the levels, given the seconds of each op and of each entry of ``graph.users``."""
    # Tensors are sorted by producer, so the readers of all results of an op are adjacent.
    edges = table(graph.user_ptr[graph.made_ptr], np.int64), table(graph.users, np.int64), edge_s
    found = Levels(np.zeros(graph.num_ops), np.zeros(graph.num_ops))
    longest_to_end(*edges, table(op_s, np.float64), found.to_end_s)
    longest_from_start(*edges, table(op_s, np.float64), found.from_start_s)
    return found


def placement_of(plan: Plan) -> IntArray:
    """Return the placement of a plan; raises `UsageError` if it has none."""
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


def _tie_order(runs: RunTable, spans: Spans) -> LongArray:
    """Per op: its rank among ops of equal start and end, in the order of its queue."""
    num_ops = len(runs.queue)
    position = np.zeros(num_ops, dtype=np.int64)
    position[runs.lineup] = np.arange(num_ops)
    span = (spans.op_end_s, spans.op_start_s, runs.queue)
    rank = np.empty(num_ops, dtype=np.int64)
    rank[np.lexsort((position, *span))] = np.lexsort(span)
    return rank


def latest_starts(evaluator: Evaluator, *, keeps_order: bool) -> FloatArray:
    """Per op: latest start that does not lengthen the step that was evaluated last.

    With ``keeps_order`` the ops of each device stay in their order and do not overlap. Without it a
    device may run any number of ops at once, so the result shows how urgent an op is in any
    order.
    """

    given, spans = evaluator.buffers.given, evaluator.state.spans
    runs, places, transfers, _ = evaluator.buffers.tables
    # Ops of length 0 at one instant: on one queue its order decides, else the order of the graph.
    by_start = np.lexsort((_tie_order(runs, spans), spans.op_end_s, spans.op_start_s))
    latest_s = np.zeros(len(by_start))
    free_s = np.full(len(runs.lineup_ptr) - 1, evaluator.score.step_s)
    arrival_s = np.zeros(len(places.device))
    fill_latest(
        given, runs, places, transfers, spans.op_end_s, spans.transfer_end_s, by_start, arrival_s,
        free_s, latest_s, keeps_order,
    )  # fmt: skip
    return latest_s
