"""Kinds of devices that a job was never on, where nobody said how fast it is anywhere.

Such a job is taken to do one step per second everywhere until it is measured. One that then does
eight on its first kind would seem eight times as fast there as on all others, and stay; its first
measurements rather tell how much work its steps are. So kinds that it was never on are taken for as
fast as the one that it is on, until it has been on them. What was stated or measured stays.
"""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds.state import FleetState


def with_untried_levelled(state: FleetState, number: int) -> FleetState:
    """The state after a measurement of a job of which no throughputs were stated."""
    at = state.row_of(number)
    jobs, kind = state.jobs, int(state.jobs.rows["kind"][at])
    # Gavel's rounds start to count the time on a kind anew, so that it does not tell.
    untried = np.flatnonzero(jobs.received_s[at] == 0.0)
    if kind < 0 or not len(untried) or state.rules.mechanism == "gavel":
        return state
    known = jobs.spread_steps_per_s if jobs.rows["is_spread"][at] else jobs.steps_per_s
    together, spread = jobs.steps_per_s.copy(), jobs.spread_steps_per_s.copy()
    together[at, untried] = spread[at, untried] = known[at, kind]
    return state.but(jobs=jobs._replace(steps_per_s=together, spread_steps_per_s=spread))
