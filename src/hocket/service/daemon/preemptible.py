"""Jobs of which nobody said whether they may be stopped for others.

A job that cannot go on from where it was loses its work each time it is stopped, and may never end.
So one without arguments to resume with keeps its devices once it has them, until it shows that it
saves its work: a lease that has something to save with says so in its first report.
"""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds.state import FleetState


def with_preemptible(state: FleetState, number: int) -> FleetState:
    """The state in which a job may be stopped for others."""
    rows = state.jobs.rows
    at = int(np.searchsorted(rows["number"], number))
    if at >= len(rows) or rows["number"][at] != number or rows["preemptible"][at] > 0:
        return state
    changed = rows.copy()
    changed["preemptible"][at] = 1
    return state.but(jobs=state.jobs._replace(rows=changed))
