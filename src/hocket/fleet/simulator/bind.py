"""A trace on given device types: how fast each of its jobs is on each of them.

A job whose type is in the table gets the row of its type. For a gang larger than those in the
table, the growth of the last doubling is extrapolated. A job with a known duration only takes that
time on the first device type, and on other types as much longer as an average job. A gang that is
spread over servers uses the throughputs of ``TYPE_unconsolidated`` if the table has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.base.errors import UsageError, did_you_mean
from hocket.fleet.throughputs.table import JobProfile, Throughputs
from hocket.fleet.traces.trace import Trace

_SAME_TIME = 1.05
"""Largest ratio between a stated duration and the one that follows from the table that is not
reported.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class TraceWork:
    """The jobs of a trace with their throughputs and steps on given device types."""

    trace: Trace
    device_types: tuple[str, ...]
    steps_per_s: FloatArray
    """``[job, type]``."""
    spread_steps_per_s: FloatArray
    """The same where the gang is spread over servers."""
    total_steps: FloatArray
    profile: LongArray
    """Row of ``beside``; -1 for none."""
    beside: FloatArray
    """``[profile, profile, type]``: steps per second two on a device."""
    notes: tuple[str, ...] = ()
    """Remarks of the trace on its jobs that are not followed."""


def bind(trace: Trace, device_types: tuple[str, ...], throughputs: Throughputs | None) -> TraceWork:
    """Throughputs and steps of all jobs; raises `UsageError` for one whose speed is not known."""
    speed = np.ones(len(device_types))
    table = spread = None
    if throughputs is not None:
        table = throughputs.on(device_types)
        spread = throughputs.on(
            tuple(_spread_type(device_type, throughputs) for device_type in device_types)
        )
        speed = table.relative_speed
    steps_per_s = np.zeros((2, len(trace), len(device_types)))
    total_steps = trace.total_steps.copy()
    profile = np.full(len(trace), -1)
    known: dict[JobProfile, tuple[FloatArray | None, int]] = {}
    for job in range(len(trace)):
        key = JobProfile(trace.job_types[job], int(trace.gang[job]))
        if key not in known:
            known[key] = _rows(table, spread, key)
        rows, profile[job] = known[key]
        if rows is not None and math.isnan(total_steps[job]):
            # The duration is that on the first device type that can run the job.
            rows = rows / next((speed for speed in rows[0] if speed > 0.0), 1.0)
            profile[job] = -1
        if rows is None:
            rows = np.stack([speed, speed])
            if math.isnan(trace.duration_s[job]):
                raise _unknown(table, key)
            total_steps[job] = math.nan
        if math.isnan(total_steps[job]):
            total_steps[job] = trace.duration_s[job]
        steps_per_s[:, job] = rows
    beside = np.zeros((0, 0, len(device_types))) if table is None else table.beside
    notes = trace.notes + _other_durations(trace, device_types, steps_per_s[0], total_steps)
    return TraceWork(
        trace=trace,
        notes=notes,
        device_types=device_types,
        steps_per_s=steps_per_s[0],
        spread_steps_per_s=steps_per_s[1],
        total_steps=np.maximum(total_steps, 1e-9),
        profile=profile,
        beside=beside,
    )


def _other_durations(
    trace: Trace, device_types: tuple[str, ...], steps_per_s: FloatArray, total_steps: FloatArray
) -> tuple[str, ...]:
    """Notes about jobs whose stated steps and seconds contradict the table."""
    says_both = (trace.total_steps > 0.0) & (trace.duration_s > 0.0)
    is_known = (steps_per_s > 0.0) & (total_steps > 0.0)[:, None] & says_both[:, None]
    claimed = np.where(says_both, trace.duration_s, 1.0)[:, None] * steps_per_s
    ratio = np.where(is_known, total_steps[:, None] / np.where(is_known, claimed, 1.0), 1.0)
    # Traces do not state the device type of a duration, so one that matches is enough.
    off = np.where(is_known, np.abs(np.log(ratio)), np.inf).min(axis=1, initial=np.inf)
    count = int((is_known.any(axis=1) & (off > math.log(_SAME_TIME))).sum())
    if not count:
        return ()
    return (
        f"{count} of {len(trace)} jobs take other times than the trace says on any of "
        f"{', '.join(device_types)}: the table of throughputs and their steps decide",
    )


def _spread_type(device_type: str, throughputs: Throughputs) -> str:
    spread = f"{device_type}_unconsolidated"
    return spread if spread in throughputs.device_types else device_type


def _rows(
    table: Throughputs | None, spread: Throughputs | None, key: JobProfile
) -> tuple[FloatArray | None, int]:
    """Throughputs on one server and on several, and the profile; None if nothing is known."""
    row, profile = _row(table, key)
    apart, _ = _row(spread, key)
    if row is None:
        return None, -1
    if apart is None or key.gang == 1:
        apart = row
    return np.stack([row, np.where(apart > 0.0, apart, row)]), profile


def _row(table: Throughputs | None, key: JobProfile) -> tuple[FloatArray | None, int]:
    if table is None:
        return None, -1
    at = table.find(*key)
    if at >= 0:
        return table.alone[at], at
    gangs = sorted(known.gang for known in table.profiles if known.job_type == key.job_type)
    smaller = [gang for gang in gangs if gang < key.gang]
    if not smaller:
        return None, -1
    last = table.alone[table.find(key.job_type, smaller[-1])]
    # With only one known size, larger gangs are assumed to be no faster.
    growth, doublings = 1.0, math.log2(key.gang / smaller[-1])
    if len(smaller) > 1:
        before = table.alone[table.find(key.job_type, smaller[-2])]
        ratio = np.where(before > 0.0, last / np.maximum(before, 1e-300), 1.0).max()
        growth = float(ratio) ** (1.0 / math.log2(smaller[-1] / smaller[-2]))
    return last * growth**doublings, -1


def _unknown(table: Throughputs | None, key: JobProfile) -> UsageError:
    message = (
        f"nothing is known of the speed of jobs of type {key.job_type!r} on {key.gang} devices"
    )
    if table is None:
        return UsageError(message, hint="give a table with --throughputs FILE")
    return UsageError(
        message, hint=did_you_mean(key.job_type, {p.job_type for p in table.profiles})
    )
