"""m-ETF (earliest task first): repeatedly place the op that can start earliest.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after Hwang et
al., "Scheduling precedence graphs in systems with interprocessor communication times", 1989. A
clock moves from event to event; every free device offers the ready op that it could start first,
counting transfers, queues and memory, and the earliest offer is committed. `list_schedule` states
the rules. O(ops · devices · log(ready ops)) in practice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import format_bytes
from hocket.graph.coarsen import bound_ops
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.devices import require_runnable
from hocket.planners.placement.list_schedule.schedule_state import ScheduleState
from hocket.planners.placement.list_schedule.schedule_tables import breadth_first, new_state
from hocket.planners.tables import task_table

# Run the event loop of list scheduling on a problem and return its decisions.


@dataclass(frozen=True, eq=False, kw_only=True)
class ListSchedule:
    """Decisions of the event loop, per op."""

    device_of: IntArray
    start_s: FloatArray
    step_s: float
    """End of the last op, with the loop's estimate of transfers."""

    def added_to(self, plan: Plan, **counts: int) -> Plan:
        """Return the plan with this placement and the starts of the ops as priorities."""
        placed = plan.placing(self.device_of, priority=self.start_s)
        return placed.claiming(estimated_step_s=self.step_s, counts=counts)


def list_schedule(
    problem: Problem, favourite: IntArray | None = None, spared_s: FloatArray | None = None
) -> ListSchedule:
    """Schedule every op; if favourites are given (-1 for none), devices wait for them (m-SCT).

    ``spared_s`` is, per op, the longest time that its device waits for a favourite that is not yet
    ready. Raises `NoFeasiblePlanError` if an op fits nowhere and no memory will be released.
    """
    num_ops = problem.graph.num_ops
    if favourite is None or spared_s is None:
        favourite, spared_s = np.full(num_ops, -1, dtype=np.int32), np.zeros(num_ops)
    group = bound_ops(problem.graph)
    require_runnable(problem, group)
    tasks = task_table(problem)
    order = breadth_first(problem.graph)
    state = new_state(problem, tasks, order, group, favourite, spared_s)

    from hocket.planners.placement.list_schedule.schedule_loop import run

    run(state)
    _require_all_placed(problem, order, state)
    ops = state.net.ops
    device_of, start_s = np.empty(num_ops, dtype=np.int32), np.empty(num_ops)
    device_of[order], start_s[order] = ops["device"], ops["start_s"]
    step_s = float(ops["end_s"].max(initial=0.0))
    return ListSchedule(device_of=device_of, start_s=start_s, step_s=step_s)


def _require_all_placed(problem: Problem, order: LongArray, state: ScheduleState) -> None:
    counts = state.counts[0]
    if counts["stuck_op"] < 0:
        return
    op, lacking_bytes = int(order[counts["stuck_op"]]), int(counts["stuck_bytes"])
    raise NoFeasiblePlanError(
        f"op {problem.graph.op_names[op]!r} fits on no device any more: "
        f"{format_bytes(lacking_bytes)} are lacking where it lacks least",
        hint="use more or larger devices, or a planner that moves ops to free memory",
    )


def m_etf(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-ETF and run them in the order in which it starts them."""
    return list_schedule(problem).added_to(plan)
