"""Decisions tried out before they count, and then forgotten.

Some policies cannot serve every job: those that look at the work left must know it. `step` finds
that out when a round begins, which may be long after the job was accepted, and then no round could
begin any more. So a job is refused when a fleet with nothing but it could not begin a round, and a
service is not started where the jobs that it has do not suit its policy.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hocket.errors import UsageError
from hocket.fleet.rounds.events import Submit, Tick
from hocket.fleet.rounds.state import Device, Job, Jobs, Rules, State, new_state
from hocket.fleet.rounds.step import step


def rehearse_job(state: State, job: Job) -> None:
    """Raise `UsageError` where the state's policy cannot serve a job."""
    kind_of_job = (job.gang > 1, math.isfinite(job.total_steps), math.isfinite(job.deadline_s))
    try:
        _rehearse_like(state.rules, *kind_of_job)
    except UsageError:
        # Once more with the job itself, whose number and devices the message shall tell.
        step(_emptied(state), Submit(time_s=state.time_s, jobs=(job,)))


@lru_cache(maxsize=64)
def _rehearse_like(rules: Rules, is_gang: bool, knows_steps: bool, has_deadline: bool) -> None:
    """The same for all jobs that policies refuse or serve alike; remembered where it is served."""
    devices = (Device(name="a", kind=""), Device(name="b", kind=""))
    job = Job(
        number=1,
        name="",
        steps_per_s=(1.0,),
        gang=2 if is_gang else 1,
        total_steps=1.0 if knows_steps else math.inf,
        deadline_s=1.0 if has_deadline else math.inf,
    )
    step(new_state(("",), devices, rules), Submit(time_s=0.0, jobs=(job,)))


def rehearse_round(state: State) -> None:
    """Raise `UsageError` where the state's policy cannot serve its jobs. Loads the compiled parts
    of `step`, so that the first command need not wait for them."""
    some = Job(number=1, name="", steps_per_s=(1.0,) * state.num_kinds, total_steps=1.0)
    rehearse_job(state, some)
    due = state.but(next_tick_s=state.time_s, solved_s=-np.inf, is_dirty=True, warm=None)
    after, _ = step(due, Tick(time_s=state.time_s))
    # Twice: the first may begin a round, the second comes within one.
    for _ in range(2):
        number = int(after.jobs.rows["number"].max(initial=0)) + 1
        job = replace(some, number=number)
        after, _ = step(after, Submit(time_s=state.time_s, jobs=(job,)))


def _emptied(state: State) -> State:
    """The same fleet without jobs, where a round begins as soon as one comes."""
    return state.but(
        jobs=Jobs(*(column[:0] for column in state.jobs)),
        names={},
        holders=np.full(state.holders.shape, -1),
        next_tick_s=np.inf,
        solved_s=-np.inf,
        warm=None,
    )
