"""Shares by user or team first, then by job; quotas; priority classes.

A job belongs to the group of its team, or of its user if it names no team. Under the policies in
`BY_GROUP`, the weights of a group's jobs add up to the weight of the group, so that a user with 100
jobs gets as much as one with a single job. When a job ends, its deficit or surplus goes to the
other jobs of its group. Short jobs go before long ones within a group, but not across groups
(`set_group_shift`).

Quotas limit the devices that a user or a team holds at once, and their device time per week. Jobs
beyond a quota wait; no running job is stopped because of one. A higher priority level goes first,
except before a job whose deficit exceeds the patience or a gang with reserved devices.
"""

from __future__ import annotations

import math

import numpy as np

from hocket.base.arrays import FloatArray, LongArray

# Policies whose shares are divided by user or team first.
from hocket.fleet.rounds.state import RUNNING, WAITING, FleetState, Jobs

BY_GROUP = ("las", "las-agnostic")
WEEK_S = 7 * 86_400.0
_MONDAY_S = 4 * 86_400.0
"""The first Monday after 1970 began, a Thursday."""
# Priority levels range from minus this number to this number.
PRIORITY_WEIGHT = 10.0
"""Factor of a job's weight from one priority level to the next."""
MAX_PRIORITY = 3
OVER_USER_QUOTA, OVER_TEAM_QUOTA = 1, 2
"""In the column ``over_quota`` of jobs, beside 0 for a job that no quota blocks."""


def week_start_s(time_s: float) -> float:
    """Monday 0:00 UTC of the week that contains a moment."""
    return (time_s - _MONDAY_S) // WEEK_S * WEEK_S + _MONDAY_S


def groups_of(state: FleetState, rows: np.ndarray) -> tuple[LongArray, FloatArray]:
    """The group of each job (0 to the number of groups) and the weight of each group."""
    num_users = len(state.users)
    keys = np.where(rows["team"] > 0, num_users + rows["team"], rows["user"])
    weights = np.concatenate([state.user_weight, state.team_weight])
    found, of = np.unique(keys, return_inverse=True)
    return of.reshape(-1), weights[found]


def set_weights(state: FleetState, jobs: Jobs) -> None:
    """Write the weights that policies see; ``jobs`` are writable."""
    rows = jobs.rows
    wanting = np.flatnonzero(rows["phase"] <= RUNNING)
    own = np.where(rows["own_weight"] > 0.0, rows["own_weight"], rows["weight"])
    own = own * PRIORITY_WEIGHT ** np.clip(rows["priority"], -MAX_PRIORITY, MAX_PRIORITY)
    if has_groups(state):
        of, weights = groups_of(state, rows[wanting])
        # A single group has all the weight, whatever the weights of its jobs.
        if len(weights) > 1:
            # The groups together keep the total weight of their jobs: weights stay comparable.
            total = np.bincount(of, own[wanting], len(weights))
            part = weights / weights.sum() * own[wanting].sum()
            own[wanting] *= (part / total)[of]
    rows["weight"] = own


def has_groups(state: FleetState) -> bool:
    """True if shares are divided by user or team first: there are several, and the policy uses
    weights."""
    is_alone = len(state.users) <= 1 and len(state.teams) <= 1
    is_improved = state.rules.mechanism != "gavel"
    return is_improved and not is_alone and state.rules.policy in BY_GROUP


def set_group_shift(
    state: FleetState, jobs: Jobs, wanting: LongArray, slack_rounds: FloatArray
) -> None:
    """Shift urgencies so that the first job of each group ranks by the deficit of the whole group.

    Within a group, deficits and slacks order the jobs. A group does not get ahead of another by
    having many or short jobs. ``slack_rounds`` are those of the rows ``wanting``.
    """
    rows = jobs.rows
    rows["group_shift"] = 0.0
    of, weights = groups_of(state, rows[wanting])
    if len(weights) <= 1:
        return
    credit_rounds = jobs.credit_s[wanting] / state.rules.round_s
    of_group = np.bincount(of, credit_rounds.sum(axis=1) * rows["gang"][wanting], len(weights))
    first = np.full(len(weights), -np.inf)
    # Credits are device time: those of a gang count once for each of its devices.
    np.maximum.at(first, of, credit_rounds.max(axis=1, initial=-np.inf) + slack_rounds)
    rows["group_shift"][wanting] = (of_group - first)[of]


def hand_on_credit(state: FleetState, jobs: Jobs, ended: LongArray) -> None:
    """Add the credits of jobs that have just ended to the other jobs of their groups."""
    if not has_groups(state):
        return
    rows = jobs.rows
    left = np.flatnonzero(rows["phase"] <= RUNNING)
    if not len(left):
        return
    of, _ = groups_of(state, rows)
    for at in ended.tolist():
        heirs = left[of[left] == of[at]]
        if len(heirs):
            device_s = jobs.credit_s[at] * rows["gang"][at]
            jobs.credit_s[heirs] += device_s / rows["gang"][heirs].sum()
            jobs.credit_s[at] = 0.0


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────


def has_quotas(state: FleetState) -> bool:
    """True if any user or team has a quota."""
    return bool(np.isfinite(state.user_quota).any() or np.isfinite(state.team_quota).any())


def with_usage(state: FleetState, time_s: float) -> FleetState:
    """Add up device time of users and teams until a moment; it starts at 0 each week."""
    if not has_quotas(state):
        return state
    rows = state.jobs.rows
    running = rows[rows["phase"] == RUNNING]
    week_s = week_start_s(time_s)
    # Time before Monday belongs to the week before.
    since_s = np.maximum(running["counted_s"], week_s)
    device_s = running["gang"] * (time_s - since_s)
    week = int(week_s // WEEK_S)
    keeps = float(week == state.usage_week)
    used = [
        np.resize(np.append(before, np.zeros(size)), size) * keeps
        + np.bincount(running[column], device_s, size)
        for before, column, size in (
            (state.user_used_s, "user", len(state.users)),
            (state.team_used_s, "team", len(state.teams)),
        )
    ]
    return state.but(user_used_s=used[0], team_used_s=used[1], usage_week=week)


def mark_over_quota(state: FleetState, jobs: Jobs) -> None:
    """Mark the waiting jobs that a quota keeps from starting, with the quota: `OVER_USER_QUOTA` or
    `OVER_TEAM_QUOTA`.

    Jobs take what is left of both quotas in order of priority and deficit. A job that one quota
    blocks takes nothing from the other.
    """
    rows = jobs.rows
    rows["over_quota"] = 0
    if not has_quotas(state):
        return
    # Running jobs count first: nobody is stopped for a quota.
    running = rows[rows["phase"] == RUNNING]
    left_of_user = _devices_left(state.user_quota, state.user_used_s, running, "user")
    left_of_team = _devices_left(state.team_quota, state.team_used_s, running, "team")
    waiting = np.flatnonzero(rows["phase"] == WAITING)
    deficit = jobs.credit_s[waiting].max(axis=1, initial=0.0)
    order = np.lexsort((rows["number"][waiting], -deficit, -rows["priority"][waiting]))
    for at in waiting[order].tolist():
        user, team, gang = (int(rows[name][at]) for name in ("user", "team", "gang"))
        if gang > left_of_user.get(user, math.inf):
            rows["over_quota"][at] = OVER_USER_QUOTA
        elif gang > left_of_team.get(team, math.inf):
            rows["over_quota"][at] = OVER_TEAM_QUOTA
        else:
            left_of_user[user] = left_of_user.get(user, math.inf) - gang
            left_of_team[team] = left_of_team.get(team, math.inf) - gang


def _devices_left(
    quota: FloatArray, used_s: FloatArray, running: np.ndarray, column: str
) -> dict[int, float]:
    """Devices that each user or team with a quota may still take; 0 once its week is used up."""
    left: dict[int, float] = {}
    for index in np.flatnonzero(np.isfinite(quota).any(axis=1)).tolist():
        is_spent = index < len(used_s) and used_s[index] >= quota[index, 1]
        held = float(running["gang"][running[column] == index].sum())
        left[index] = 0.0 if is_spent else float(quota[index, 0]) - held
    return left
