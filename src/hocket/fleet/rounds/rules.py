"""The rules of a round (who runs, who waits, who is reserved), each a function of a few numbers.

1. A running job keeps its devices between rounds. At a round it keeps them only if it is bound
   (it must not be preempted), or is a gang that has run for less than a turn while some present
   job is bound (`runs_to_end`, `is_kept`).
2. Every waiting job, and every running one that is not kept, has a wish per device type. Wishes are
   granted in order of urgency (`urgency_of_deficit`, `urgency_filling`): rounds of deficit, a bonus
   for jobs that end soon (slack), and for a job that runs there already what a stop would cost it
   (`stop_cost_rounds`).
3. A job with too large a deficit is reserved (`has_large_deficit`), and so is a gang that has
   waited too long while bound jobs hold what it needs (`has_waited_too_long`). Reserved jobs come
   first, whatever the priorities. One that cannot start gets the earliest time at which enough
   devices will be free.
4. A job may backfill devices before a reservation if it ends in time (`ends_in_s`) or can be
   stopped; `kernels/grant.py` keeps free devices by time for that.
5. Under ``fifo`` every job is reserved in order of arrival: conservative backfill.

Kernels apply these rules to arrays; the table in ``tests/fleet/test_rounds_rules.py`` states them
case by case.
"""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel

UNITS_PER_ROUND = 16.0
"""Deficits are compared in coarse units, so that noise of a solver decides nothing."""
HALF_SLACK_ROUNDS = 300.0
"""Rounds that a job still needs where it may take half of the slack."""
OVERDUE_FACTOR = 2.0
"""Factor by which a job may exceed the time that it claimed to need; beyond it, it has no slack and
no known end.
"""
RESERVED_FIRST = 1e6
"""Rounds by which reserved jobs go before others."""
PRIORITY_FIRST = 1e4
"""Rounds by which a priority level goes before the next, among jobs that are not reserved."""
FILLING_LAST = -1e6
"""Rounds by which wishes without a deficit come after all deficits."""
MAX_DOUBLINGS = 5
"""Losses of work up to which the turn of a job grows."""
MIN_ROUNDS_TO_RESERVE = 2.0
"""Rounds that a gang waits at least before devices are reserved for it, by default."""


@kernel
def runs_to_end(preemptible: int) -> bool:
    """True if a job must not be preempted: it does not save its work (``preemptible`` is 0), or
    nobody knows whether it does (-1)."""
    return preemptible <= 0


@kernel
def is_kept(is_running: bool, bound: bool, ran_s: float, least_s: float, keeps_all: bool) -> bool:
    """True if a running job keeps its devices in this round whatever the deficits of others."""
    return is_running and (keeps_all or bound or ran_s < least_s)


@kernel
def is_overdue(held_s: float, restarts_s: float, longest_s: float, round_s: float) -> bool:
    """True if a job has run much longer than it claimed to need on its slowest device type: its
    claim is no longer trusted."""
    return held_s - restarts_s > OVERDUE_FACTOR * longest_s + round_s


@kernel
def stop_cost_rounds(
    restart_s: float, lost_s: float, losses: int, stickiness_rounds: float, round_s: float
) -> float:
    """Cost of stopping a running job in rounds: its restart, and the work since its last checkpoint
    if it is known to lose that.

    The lost work counts up to a limit that doubles with each loss. So a job that saves nothing gets
    longer turns, in which it can end, but no more than its share in the long run.
    """
    cost_s = restart_s
    if losses > 0:
        cost_s += min(
            lost_s, max(stickiness_rounds, 1.0) * round_s * 2.0 ** min(losses, MAX_DOUBLINGS)
        )
    return cost_s / round_s


@kernel
def urgency_of_deficit(
    credit_s: float,
    left_steps: float,
    steps_per_s: float,
    stays_rounds: float,
    slack_rounds: float,
    round_s: float,
    priority: int,
) -> float:
    """Urgency, in rounds, of a wish for a device type on which the job has a share."""
    deficit = credit_s / round_s + stays_rounds + priority * PRIORITY_FIRST
    rounds_left = left_steps / (steps_per_s * round_s)
    deficit += slack_rounds * HALF_SLACK_ROUNDS / (HALF_SLACK_ROUNDS + rounds_left)
    return float(np.floor(deficit * UNITS_PER_ROUND) / UNITS_PER_ROUND)


@kernel
def urgency_filling(steps_per_s: float, best_steps_per_s: float, runs_there: bool) -> float:
    """Urgency of a wish for devices without a deficit: they go to the job that is fastest there."""
    speed = np.rint(steps_per_s / best_steps_per_s * 1e6) / 1e6
    return float(FILLING_LAST + speed + (0.5 if runs_there else 0.0))


@kernel
def has_large_deficit(deficit_s: float, share: float, patience_s: float) -> bool:
    """True if the deficit of a job on a device type exceeds the patience."""
    return deficit_s > patience_s and share > 0.0


@kernel
def has_waited_too_long(
    gang: int,
    is_waiting: bool,
    waited_s: float,
    reserve_after_s: float,
    fits_by_stops: bool,
    was_reserved: bool,
) -> bool:
    """True if devices are to be reserved for a gang: it has waited long, and jobs that must not be
    stopped hold what it needs. It then stays reserved until it starts. A job of one device never
    is: one device becomes free sooner or later."""
    if gang <= 1 or not is_waiting or reserve_after_s == np.inf:
        return False
    return was_reserved or (waited_s >= reserve_after_s and not fits_by_stops)


@kernel
def ends_in_s(
    left_steps: float, steps_per_s: float, limit_left_s: float, restart_s: float, overdue: bool
) -> float:
    """Seconds until a job ends, infinite if unknown: by its claimed steps as long as they are
    trusted, and by its time limit."""
    work_s = np.inf
    if steps_per_s > 0.0 and not overdue:
        work_s = restart_s + left_steps / steps_per_s
    return float(max(min(work_s, limit_left_s), 0.0))
