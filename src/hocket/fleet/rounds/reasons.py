"""Why a job waits, in one sentence with the numbers behind it."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray
from hocket.fleet.rounds.fairness import OVER_USER_QUOTA
from hocket.fleet.rounds.state import (
    BLOCKED,
    CONDITIONS,
    NOT_SOLVED,
    PAUSED,
    RUNNING,
    FleetState,
    is_usable,
)

_MOST_NAMED = 3
"""Maximum number of drained devices in a sentence."""


def reason(state: FleetState, number: int) -> str:
    """Describe what a job does or waits for; raises `UsageError` for a job that is not there."""
    row = state.row_of(number)
    job = state.jobs.rows[row]
    if job["phase"] == RUNNING:
        beside = f" beside job {int(job['partner'])}" if job["partner"] >= 0 else ""
        return f"runs on {', '.join(state.devices_of(number))}{beside}"
    if job["phase"] == PAUSED:
        return "is paused until it is resumed"
    if job["phase"] == BLOCKED:
        return f"waits until {_needed(state, number)}"
    if job["over_quota"]:
        return _over_quota(state, row)
    able = state.jobs.steps_per_s[row] > 0.0
    if not able.any():
        return "can run on no device type"
    return _waiting(state, row, able) + _drained(state, able)


def _waiting(state: FleetState, row: int, able: BoolArray) -> str:
    job = state.jobs.rows[row]
    gang = int(job["gang"])
    fits = able & (state.num_devices >= gang)
    if not fits.any():
        most = int(state.num_devices[able].max(initial=0))
        need = f"{gang} devices" if gang > 1 else "a device"
        return f"needs {need} of one type that it can run on; at most {most} take jobs"
    largest = state.layout.largest_server
    fits &= (gang <= largest) | (state.jobs.spread_steps_per_s[row] > 0.0)
    if not fits.any():
        return f"needs {gang} devices on one server; the largest has {int(largest[able].max())}"
    if job["has_share"] == NOT_SOLVED:
        return f"came after the last allocation; the next round begins {_soon(state)}"
    return _queued(state, row, fits)


def _drained(state: FleetState, able: BoolArray) -> str:
    """Name the drained devices that a job could use; empty if there are none."""
    at = np.flatnonzero(state.is_up & ~is_usable(state) & able[state.type_of_device])
    if not len(at):
        return ""
    named = ", ".join(state.device_names[device] for device in at[:_MOST_NAMED])
    more = f" and {len(at) - _MOST_NAMED} more" if len(at) > _MOST_NAMED else ""
    return f"; {named}{more} {'is' if len(at) == 1 else 'are'} drained"


def free_devices(state: FleetState) -> list[int]:
    """Working devices that nobody holds, of each device type."""
    held = state.type_of_device[is_usable(state) & (state.holders[:, 0] >= 0)]
    free: list[int] = (state.num_devices - np.bincount(held, minlength=state.num_types)).tolist()
    return free


def _over_quota(state: FleetState, row: int) -> str:
    """User or team whose quota keeps a job from starting, with what is used of the quota."""
    rows = state.jobs.rows
    job = rows[row]
    is_user = job["over_quota"] == OVER_USER_QUOTA
    column, names, quotas, used_s = (
        ("user", state.users, state.user_quota, state.user_used_s)
        if is_user
        else ("team", state.teams, state.team_quota, state.team_used_s)
    )
    index = int(job[column])
    most, most_s = quotas[index].tolist()
    if index < len(used_s) and used_s[index] >= most_s:
        used = f"used {used_s[index] / 3600.0:.1f} of {most_s / 3600.0:.1f} device hours this week"
    else:
        holds = rows["gang"][(rows[column] == index) & (rows["phase"] == RUNNING)].sum()
        used = f"holds {int(holds)} of {most:g} devices"
    return f"waits until {column} {names[index]!r} is below the quota again ({used})"


def _needed(state: FleetState, number: int) -> str:
    """The jobs that must end before this one, with how."""
    ends = {"ok": "has succeeded", "any": "has ended", "failed": "has failed"}
    edges = state.dependencies[state.dependencies[:, 0] == number].tolist()
    return " and ".join(f"job {needed} {ends[CONDITIONS[how]]}" for _, needed, how in edges)


def _queued(state: FleetState, row: int, fits: np.ndarray) -> str:
    job = state.jobs.rows[row]
    share = float(state.jobs.shares[row].sum() + job["pair_share"])
    free = free_devices(state)
    counts = ", ".join(
        f"{free[at]} of {int(state.num_devices[at])} {state.device_types[at]} free"
        for at in np.flatnonzero(fits)
    )
    if share <= 0.0 and state.is_dirty and job["reserved_s"] <= 0.0:
        return f"waits for new shares ({counts}); the next round begins {_soon(state)}"
    if share <= 0.0 and job["reserved_s"] <= 0.0:
        return f"gets no time under {state.rules.policy} now ({counts})"
    gang = int(job["gang"])
    need = f"{gang} devices" if gang > 1 else "1 device"
    if job["reserved_s"] > 0.0:
        return _reserved(state, row, need, counts)
    if gang > 1 and not (state.jobs.spread_steps_per_s[row] > 0.0).any():
        need += " of one server"
    return (
        f"waits for its turn on {need} ({counts}): it gets {_part(share)} of its time and "
        f"{_deficit(state, row)}; the next round begins {_soon(state)}"
    )


def _reserved(state: FleetState, row: int, need: str, counts: str) -> str:
    """Describe the devices reserved for a job, and from when on."""
    in_s = float(state.jobs.rows["reserved_s"][row]) - state.time_s
    if np.isinf(in_s):
        return (
            f"is next for {need} ({counts}): those that become free are kept for it, but jobs "
            "without a known end hold the others (a time limit would tell when)"
        )
    return f"has {need} reserved ({counts}): its start is predicted in {max(in_s, 0.0):.0f} s"


def _deficit(state: FleetState, row: int) -> str:
    """Deficit of a job where it has a share, in rounds."""
    jobs = state.jobs
    deficit_s = [float(credit_s) for credit_s in jobs.credit_s[row][jobs.shares[row] > 0.0]]
    if jobs.rows["pair_share"][row] > 0.0:
        deficit_s.append(float(jobs.rows["pair_credit_s"][row]))
    rounds = max(deficit_s) / state.rules.round_s
    if rounds < 0.05:
        return "has had its share so far"
    return f"has a deficit of {rounds:.1f} round{'' if f'{rounds:.1f}' == '1.0' else 's'}"


def _part(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "less than 1%"


def _soon(state: FleetState) -> str:
    return f"in {max(state.next_tick_s - state.time_s, 0.0):.0f} s"
