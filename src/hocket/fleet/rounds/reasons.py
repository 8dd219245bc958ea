"""Why a job waits, in one sentence with the numbers behind it."""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds.state import ENDED, PAUSED, RUNNING, State


def reason(state: State, number: int) -> str:
    """What a job does or waits for; raises `UsageError` for a job that is not there."""
    row = state.row_of(number)
    job = state.jobs.rows[row]
    if job["phase"] == RUNNING:
        return f"runs on {', '.join(state.devices_of(number))}"
    if job["phase"] == PAUSED:
        return "is paused until it is resumed"
    assert job["phase"] != ENDED
    able = state.jobs.steps_per_s[row] > 0.0
    if not able.any():
        return "can run on no kind of device"
    gang = int(job["gang"])
    fits = able & (state.num_devices >= gang)
    if not fits.any():
        most = int(state.num_devices[able].max(initial=0))
        return f"needs {gang} devices of one kind that it can run on; at most {most} work"
    largest = state.layout.largest_server
    fits &= (gang <= largest) | (state.jobs.spread_steps_per_s[row] > 0.0)
    if not fits.any():
        return f"needs {gang} devices on one server; the largest has {int(largest[able].max())}"
    if job["has_share"] == 0:
        return f"came after the last allocation; the next round begins {_soon(state)}"
    return _queued(state, row, gang, fits)


def _queued(state: State, row: int, gang: int, fits: np.ndarray) -> str:
    share = float(state.jobs.shares[row].sum() + state.jobs.rows["pair_share"][row])
    free = state.num_devices - np.bincount(
        state.device_kind[state.is_up & (state.holders[:, 0] >= 0)], minlength=state.num_kinds
    )
    kinds = ", ".join(
        f"{int(free[kind])} of {int(state.num_devices[kind])} {state.kinds[kind]} free"
        for kind in np.flatnonzero(fits)
    )
    if share <= 0.0:
        return f"is owed no time under {state.rules.policy} now ({kinds})"
    owed_s = float(state.jobs.credit_s[row].max())
    return (
        f"waits for its turn on {gang} device{'s' if gang > 1 else ''} ({kinds}): it gets "
        f"{share:.0%} of its time and is owed {owed_s / state.rules.round_s:.1f} rounds; "
        f"the next round begins {_soon(state)}"
    )


def _soon(state: State) -> str:
    return f"in {max(state.next_tick_s - state.time_s, 0.0):.0f} s"
