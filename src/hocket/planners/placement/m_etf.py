"""m-ETF (earliest task first): repeatedly place the op that can start earliest.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after Hwang et
al., "Scheduling precedence graphs in systems with interprocessor communication times", 1989. A
clock moves from event to event; every free device offers the ready op that it could start first,
counting transfers, queues and memory, and the earliest offer is committed. `list_schedule` states
the rules. O(ops · devices · log(ready ops)) in practice.
"""

from __future__ import annotations

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.list_schedule.list_scheduler import list_schedule


def m_etf(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-ETF and run them in the order in which it starts them."""
    return list_schedule(problem).added_to(plan)
