"""Explain why a job waits: one sentence, the evidence, and the expected start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.base.jsonfile import finite_or_none
from hocket.base.units import words_for_seconds
from hocket.fleet.forecast import Forecast, earliest_start, first_start
from hocket.fleet.rounds.assign import reserve_after_s
from hocket.fleet.rounds.reasons import free_devices, reason
from hocket.fleet.rounds.state import PHASES, RUNNING, UNDECIDED, WAITING, FleetState

_MOST_NAMED = 3
"""Jobs named in a sentence."""
MAX_HOLDERS = 20
"""Jobs named as holding what another waits for; the evidence says how many more there are."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """State of a job in one sentence, with evidence."""

    number: int
    sentence: str
    evidence: Mapping[str, Any]
    """Plain data: shares, deficits, free devices, and the jobs that hold suitable devices."""
    estimated_start_s: float | None = None
    """Expected start; None for a job that runs, never starts, or starts after the end of the
    forecast.
    """
    earliest_start_s: float | None = None
    """Start if the jobs that hold suitable devices turn out to save their work, where that is
    unknown yet; None if it is not earlier.
    """
    not_before_s: float | None = None
    """End of the forecast where no start was found; None where a longer one would not help."""

    def to_data(self) -> dict[str, Any]:
        """Convert to the body of a REST response."""
        return {
            "job": self.number,
            "sentence": self.sentence,
            "estimated_start_s": self.estimated_start_s,
            "earliest_start_s": self.earliest_start_s,
            "not_before_s": self.not_before_s,
            "evidence": dict(self.evidence),
        }


def explain(state: FleetState, number: int) -> Explanation:
    """Explain what a job does or waits for; raises `UsageError` if there is no such job."""
    row = state.row_of(number)
    phase = int(state.jobs.rows["phase"][row])
    sentence = f"job {number} {reason(state, number)}"
    start_s = earliest_s = not_before_s = None
    reserved_s = float(state.jobs.rows["reserved_s"][row]) or np.inf
    if phase == WAITING:
        ahead = first_start(state, number)
        start_s = ahead.start_of(number)
        # The sentence already says when a reservation begins.
        if start_s is not None and start_s < reserved_s:
            sentence += f"; it is expected to start {_from_now(start_s - state.time_s)}"
        elif ahead.is_cut_off:
            not_before_s = ahead.reached_s
            span = words_for_seconds(not_before_s - state.time_s)
            sentence += f"; it is not expected to start within {span}{_endless(state, row)}"
        later_s = _reserved_after_s(state, row) - state.time_s
        if 0.0 < later_s < np.inf and not state.jobs.rows["reserved_s"][row]:
            sentence += f"; devices are reserved for it after {words_for_seconds(later_s)} more"
        earliest_s = _earliest_s(state, number, ahead)
        if earliest_s is not None:
            when = _from_now(earliest_s - state.time_s)
            sentence += f", or {when} if jobs that may save their work show that they do"
    return Explanation(
        number=number,
        sentence=sentence,
        evidence=_evidence(state, row),
        estimated_start_s=start_s,
        earliest_start_s=earliest_s,
        not_before_s=not_before_s,
    )


def _reserved_after_s(state: FleetState, row: int) -> float:
    """Moment from which on devices may be reserved for a gang that waits; infinite for never."""
    job = state.jobs.rows[row]
    if job["phase"] != WAITING or job["gang"] <= 1:
        return np.inf
    return float(job["waiting_since_s"]) + reserve_after_s(state, state.jobs)


def _endless(state: FleetState, row: int) -> str:
    """Name the jobs without a known end that hold suitable devices; empty if there are none."""
    others, left_s = _holding(state, row)
    numbers = state.jobs.rows["number"][others[np.isinf(left_s)]].tolist()
    if not numbers:
        return ""
    who = f"job{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_MOST_NAMED]))}"
    more = len(numbers) - _MOST_NAMED
    who += f" and {more} more" if more > 0 else ""
    one = len(numbers) == 1
    return (
        f": {who} {'holds' if one else 'hold'} devices that it could use, and nobody knows until "
        f"when ({'its job file states' if one else 'their job files state'} neither total_steps "
        "nor time_limit_s)"
    )


def _earliest_s(state: FleetState, number: int, expected: Forecast) -> float | None:
    """An earlier start, which holds if jobs with unknown preemptibility turn out to save their
    work; None if there is none."""
    rows = state.jobs.rows
    if not np.any((rows["phase"] == RUNNING) & (rows["preemptible"] == UNDECIDED)):
        return None
    start_s, expected_s = earliest_start(state, number).start_of(number), expected.start_of(number)
    if start_s is None:
        return None
    is_earlier = start_s < (expected.reached_s if expected_s is None else expected_s)
    return start_s if is_earlier else None


def _from_now(duration_s: float) -> str:
    return f"in {words_for_seconds(duration_s)}" if duration_s > 0.0 else "now"


def _evidence(state: FleetState, row: int) -> dict[str, Any]:
    job = state.jobs.rows[row]
    able = state.jobs.steps_per_s[row] > 0.0
    round_s = state.rules.round_s
    # A paused job earns nothing, whatever the last allocation gave it.
    shares = state.jobs.shares[row] * (job["phase"] <= RUNNING)
    pair_share = float(job["pair_share"]) * (job["phase"] <= RUNNING)
    return {
        "phase": PHASES[int(job["phase"])],
        "policy": state.rules.policy,
        "gang": int(job["gang"]),
        "weight": float(job["weight"]),
        "has_share": bool(job["has_share"]),
        "target_share": float(shares.sum()) + pair_share,
        "pair_share": pair_share,
        "held_s": float(job["held_s"]),
        "target_s": float(job["target_s"]),
        "waiting_since_s": float(job["waiting_since_s"]) if job["phase"] == WAITING else None,
        "reserved_start_s": finite_or_none(float(job["reserved_s"]) or np.inf),
        "reserved_after_s": finite_or_none(_reserved_after_s(state, row)),
        "failures": int(job["failures"]),
        "attempt": int(job["attempt"]),
        "next_round_s": finite_or_none(state.next_tick_s),
        "device_types": [
            {
                "device_type": state.device_types[device_type],
                "steps_per_s": float(state.jobs.steps_per_s[row, device_type]),
                "devices": int(state.num_devices[device_type]),
                "free": free,
                "target_share": float(shares[device_type]),
                "deficit_rounds": float(state.jobs.credit_s[row, device_type]) / round_s,
            }
            for device_type, free in enumerate(free_devices(state))
            if able[device_type]
        ],
        **_holders(state, row),
    }


def _holders(state: FleetState, row: int) -> dict[str, Any]:
    """Jobs on suitable devices, those that end first at the front."""
    rows = state.jobs.rows
    others, left_s = _holding(state, row)
    order = np.argsort(left_s, kind="stable")
    return {
        "num_holders": len(others),
        "holders": [
            {
                "job": int(rows["number"][others[at]]),
                "device_type": state.device_types[int(rows["device_type"][others[at]])],
                "devices": int(rows["gang"][others[at]]),
                "seconds_left": finite_or_none(left_s[at]),
            }
            for at in order[:MAX_HOLDERS]
        ],
    }


def _holding(state: FleetState, row: int) -> tuple[LongArray, FloatArray]:
    """Rows of the jobs on suitable devices, and the most seconds that they still hold them."""
    rows = state.jobs.rows
    others = np.flatnonzero(rows["phase"] == RUNNING)
    others = others[
        (state.jobs.steps_per_s[row, rows["device_type"][others]] > 0.0) & (others != row)
    ]
    left = rows["total_steps"][others] - rows["done_steps"][others]
    rate = rows["rate"][others]
    left_s = np.where(rate > 0.0, left / np.where(rate > 0.0, rate, 1.0), np.inf)
    return others, np.minimum(left_s, rows["time_limit_s"][others] - rows["held_s"][others])
