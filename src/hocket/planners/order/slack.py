"""Slack: how much later each op could have started in a simulated step without making it longer.

Transfers take as long as they took in the simulation, waiting included, so that the ops without
slack are those on its critical paths. O(ops log ops + reads).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.simulate.evaluate import Evaluator


def latest_starts(evaluator: Evaluator, *, keeps_order: bool) -> FloatArray:
    """Latest start of each op in the step that was evaluated last.

    With ``keeps_order`` the ops of each device stay in their order and do not overlap; without, a
    device may do any number of ops at once, which says how urgent an op is whatever the order.
    """
    from hocket.planners.order.slack_kernels import fill_latest

    given, spans = evaluator.draft.given, evaluator.state.spans
    runs, places, transfers, _ = evaluator.draft.tables
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
