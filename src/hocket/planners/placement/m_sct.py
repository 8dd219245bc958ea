"""m-SCT: as m-ETF, but a device waits for the favourite child of its last op.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after Hanen and
Munier (1995). A linear relaxation selects the edges without transfer (`favourite_child`); a device
that could start the favourite child of its last op before any other device stays awake for it, and
meanwhile takes only ops that every device could start. `list_schedule` has the rules.
O(ops · devices · log(ready ops)) in practice, besides finding the favourites.
"""

from __future__ import annotations

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.favourite_child import favourite_children
from hocket.planners.placement.list_schedule.schedule import list_schedule

_LEAST_NEED = 0.5 - 1e-6
"""Baechi rounds as much of a favour up, or only nine tenths; for less, a device waits in vain more
often than not, and the graph of Hanen and Munier takes 42 instead of 36 on two devices."""


def m_sct(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-SCT and run them in the order in which it starts them."""
    favourites = favourite_children(problem)
    child = np.where(favourites.need >= _LEAST_NEED, favourites.child, -1).astype(np.int32)
    schedule = list_schedule(problem, child, favourites.spared_s)
    return schedule.added_to(plan, favourites=int((child >= 0).sum()))
