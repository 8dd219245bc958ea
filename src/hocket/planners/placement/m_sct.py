"""m-SCT (small communication times): m-ETF with devices that wait for favourite children.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after Hanen and
Munier (1995). A linear relaxation selects the edges without transfer (`favourite_child`); a device
that could start the favourite child of its last op before any other device stays awake for it, and
meanwhile runs only ops that every device could start. `list_schedule` states the rules. O(ops ·
devices · log(ready ops)) in practice, plus the time to find the favourites.
"""

from __future__ import annotations

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.favourite_child import favourite_children
from hocket.planners.placement.list_schedule.list_scheduler import list_schedule


def m_sct(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-SCT and run them in the order in which it starts them."""
    found = favourite_children(problem)
    schedule = list_schedule(problem, found.child, found.spared_s)
    return schedule.added_to(plan, favourites=int((found.child >= 0).sum()))
