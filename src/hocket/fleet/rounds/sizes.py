"""Sizes of the elastic jobs of a fleet, as other jobs come and go.

The choices of `hocket.fleet.gangs` for the jobs of a state become an event that resizes these jobs.
Both the simulator and the service use this. Jobs of fixed size take their devices from the others
and are left to the policy. O(jobs x choices).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hocket.fleet.gangs import ANY_TYPE, Chosen, ElasticJob, GangSpeeds, choose_gangs
from hocket.fleet.rounds.events import GangSize, Resize
from hocket.fleet.rounds.state import RUNNING, WAITING, FleetState, Rows

_DAY_S = 86_400.0
"""Assumed length of a job whose end is not known."""


class Sizes:
    """Throughputs of elastic jobs for each gang size, by job number."""

    def __init__(self, speeds: Mapping[int, GangSpeeds]) -> None:
        self._speeds = speeds

    def begin(self, state: FleetState, number: int, total_steps: float) -> GangSize:
        """Gang size with which a new job starts, given the other jobs."""
        speeds = self._speeds[number]
        left_steps = _left_steps(speeds, total_steps, 0.0)
        fresh = ElasticJob(number=number, left_steps=left_steps, speeds=speeds, now=None)
        found = choose_gangs([*self.jobs(state), fresh], state.num_devices, state.rules.restart_s)
        # Devices may be added later; until then the job waits with its smallest gang.
        able = [
            gang for gang, row in zip(speeds.gangs, speeds.steps_per_s, strict=True) if row.any()
        ]
        gang = found[number].gang if number in found else [*able, speeds.gangs[0]][0]
        return self._size(number, Chosen(gang, ANY_TYPE))

    def resize(self, state: FleetState, time_s: float) -> Resize | None:
        """Event that resizes jobs now; None if nothing changes."""
        found = choose_gangs(self.jobs(state), state.num_devices, state.rules.restart_s)
        sizes = [
            self._size(number, chosen) for number, chosen in found.items()
            if number in self._speeds
        ]  # fmt: skip
        changed = tuple(size for size in sizes if not _has(state, size))
        return Resize(time_s=time_s, sizes=changed) if changed else None

    def jobs(self, state: FleetState) -> list[ElasticJob]:
        """Jobs that have not ended and are not paused."""
        rows = state.jobs.rows
        found = []
        for at in np.flatnonzero(rows["phase"] <= RUNNING).tolist():
            row = rows[at]
            speeds = self._speeds.get(int(row["number"])) or GangSpeeds(
                gangs=(int(row["gang"]),), steps_per_s=state.jobs.steps_per_s[at][None, :]
            )
            found.append(
                ElasticJob(
                    number=int(row["number"]),
                    left_steps=_left_steps(speeds, row["total_steps"], row["done_steps"]),
                    speeds=speeds,
                    now=_now(row),
                )
            )
        return found

    def _size(self, number: int, chosen: Chosen) -> GangSize:
        speeds = self._speeds[number]
        row = speeds.steps_per_s[speeds.gangs.index(chosen.gang)]
        if chosen.device_type != ANY_TYPE:
            row = np.where(np.arange(len(row)) == chosen.device_type, row, 0.0)
        return GangSize(number=number, gang=chosen.gang, steps_per_s=tuple(row.tolist()))


def is_unsettled(state: FleetState) -> bool:
    """True if a job waits or a device is free: otherwise no job would change its size."""
    is_free = state.is_up & (state.holders < 0).all(axis=1)
    return bool(is_free.any() or (state.jobs.rows["phase"] == WAITING).any())


def _left_steps(speeds: GangSpeeds, total_steps: float, done_steps: float) -> float:
    if not math.isfinite(total_steps):
        return max(1.0, _DAY_S * float(speeds.steps_per_s.max(initial=0.0)))
    return max(1.0, float(total_steps - done_steps))


def _now(row: Rows) -> Chosen | None:
    return Chosen(int(row["gang"]), int(row["device_type"])) if row["phase"] == RUNNING else None


def _has(state: FleetState, size: GangSize) -> bool:
    """True if a job already has this size, or runs where it should."""
    at = state.row_of(size.number)
    row, known = state.jobs.rows[at], state.jobs.steps_per_s[at]
    if row["gang"] != size.gang:
        return False
    stays = row["phase"] == RUNNING and size.steps_per_s[int(row["device_type"])] > 0.0
    return bool(stays) or bool(np.array_equal(known, size.steps_per_s))
