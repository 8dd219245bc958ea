"""Critical-path refinement: simulate, let what the step waited for go first, simulate again.

Every round turns what the simulation showed into priorities: first the latest starts that go with
the transfer times as they were, waiting for links included; then, from the best order so far, the
ops on its critical path before all others by as long as they waited for their devices. A round
counts if the step gets shorter. After the scheduler-emulating refinement of ParDNN (Qararyah et
al., 2021), applied to the order. O(rounds · simulation).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import levels, placement_of
from hocket.planners.order.slack import latest_starts
from hocket.planners.parts.large import is_large
from hocket.simulate.evaluate import Evaluator

_ROUNDS = 4
_FEW_ROUNDS = 2
"""Of large graphs, whose simulation takes long."""
_NO_SLACK = 1e-9
"""Share of the step below which slack is rounding."""


def critical_refined(problem: Problem, plan: Plan) -> Plan:
    """The plan with priorities that were refined on its critical paths."""
    return refined(Evaluator(problem), problem, plan)


def refined(evaluator: Evaluator, problem: Problem, plan: Plan) -> Plan:
    """As `critical_refined`, for a caller who has an evaluator of the problem."""
    device_of, is_short = placement_of(plan), is_large(problem.graph.num_ops)
    priority = -levels(problem, device_of).to_end_s
    best = evaluator(device_of, priority), priority
    for _ in range(_FEW_ROUNDS if is_short else _ROUNDS):
        priority = latest_starts(evaluator, keeps_order=False)
        score = evaluator(device_of, priority)
        if score < best[0]:
            best = score, priority
        elif is_short:
            break
    for _ in range(0 if is_short else _ROUNDS):
        evaluator(device_of, best[1])
        priority = _raised(evaluator, best[1])
        score = evaluator(device_of, priority)
        if score >= best[0]:
            break
        best = score, priority
    return plan.ordered(priority=best[1])


def _raised(evaluator: Evaluator, priority: FloatArray) -> FloatArray:
    """The priorities with critical ops earlier by the longest wait of any of them.

    Priorities are in seconds, as bottom levels and latest starts are.
    """
    start_s = evaluator.op_start_s
    slack_s = latest_starts(evaluator, keeps_order=True) - start_s
    is_critical = slack_s <= _NO_SLACK * evaluator.score.step_s
    urgent_s = latest_starts(evaluator, keeps_order=False)
    # An op that had to start long before it did waited for its device.
    waited_s = np.max(start_s - urgent_s, where=is_critical, initial=0.0)
    return np.where(is_critical, priority - waited_s, priority)
