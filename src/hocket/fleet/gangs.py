"""Elastic gangs: how many devices of which type each job gets while others come and go.

Every job first gets its most efficient gang on some device type, mostly one device; device types go
to the jobs that they speed up most. While devices are left, the job with the largest saving per
added device gets more, or another type. This is the greedy rule of Optimus (Peng et al., EuroSys
2018), with savings as part of the remaining time instead of seconds. A saving counts once for every
job that lasts at least as long: devices that a short job frees serve all of them. With sublinear
speed-ups the optimal average completion time gives short jobs more in about that measure (heSRPT,
Berg, Vesilo and Harchol-Balter, Performance Evaluation 2020). A running job changes its size only
if that saves more than several restarts cost. If not all jobs fit, each keeps its most efficient
size, and the policy decides who runs where. O(moves x jobs x choices).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray

ANY_TYPE = -1
_WORTH = 3.0
"""Number of restarts whose time a change must save."""
_NEVER = -1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class GangSpeeds:
    """Steps per second of a job for each gang size."""

    gangs: tuple[int, ...]
    """Ascending."""
    steps_per_s: FloatArray
    """``[gang, type]``: 0 where it does not fit."""

    def on(self, num_devices: LongArray) -> FloatArray:
        """The same; 0 where a device type has fewer devices than the gang."""
        enough = np.array(self.gangs)[:, None] <= num_devices[None, :]
        return np.where(enough, self.steps_per_s, 0.0)


class Chosen(NamedTuple):
    """A gang size and its device type."""

    gang: int
    device_type: int
    """`ANY_TYPE` where the policy decides."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ElasticJob:
    """A job that has not ended."""

    number: int
    left_steps: float
    speeds: GangSpeeds
    now: Chosen | None
    """Its present choice; None while it waits."""


def choose_gangs(
    jobs: Sequence[ElasticJob], num_devices: LongArray, restart_s: float
) -> dict[int, Chosen]:
    """Choose the gang of each job, by number; jobs that fit nowhere are left out."""
    able = [job for job in jobs if job.speeds.on(num_devices).any()]
    if not able:
        return {}
    choices = _GangChoices(able, num_devices, restart_s)
    if not choices.begin():
        return {
            job.number: Chosen(_most_efficient(job.speeds, num_devices), ANY_TYPE) for job in able
        }
    choices.improve()
    return {job.number: choices.chosen(row) for row, job in enumerate(able)}


def _most_efficient(speeds: GangSpeeds, num_devices: LongArray) -> int:
    """The gang with the most progress per device over all device types; the smallest of equal
    ones."""
    known = speeds.on(num_devices)
    each = (known * num_devices).sum(axis=1) / np.array(speeds.gangs)
    return speeds.gangs[int(np.argmax(np.where(known.any(axis=1), each, _NEVER)))]


class _GangChoices:
    """Remaining time of each job for each choice, and the choices made so far."""

    def __init__(
        self, jobs: Sequence[ElasticJob], num_devices: LongArray, restart_s: float
    ) -> None:
        gangs = sorted({gang for job in jobs for gang in job.speeds.gangs})
        num_types = len(num_devices)
        self.gang = np.repeat(gangs, num_types)
        self.device_type = np.tile(np.arange(num_types), len(gangs))
        self.free = num_devices.copy()
        speed = np.zeros((len(jobs), len(self.gang)))
        stop_s = np.full(speed.shape, _WORTH * restart_s)
        for row, job in enumerate(jobs):
            for gang, known in zip(job.speeds.gangs, job.speeds.on(num_devices), strict=True):
                first = gangs.index(gang) * num_types
                speed[row, first : first + num_types] = known
            if job.now is None:
                stop_s[row] = 0.0
            elif job.now.gang in gangs:
                stop_s[row, gangs.index(job.now.gang) * num_types + job.now.device_type] = 0.0
        left = np.array([job.left_steps for job in jobs])[:, None]
        with np.errstate(divide="ignore"):
            time_s = np.where(speed > 0.0, left / speed + stop_s, np.inf)
        self.is_efficient = self._efficient(speed)
        self.burden = self._weights(time_s)[:, None] * np.log(time_s)
        """``[job, choice]``: logarithm of the remaining seconds, times the number of jobs that it
        delays.
        """
        self.choice = np.full(len(jobs), -1)

    def _efficient(self, speed: FloatArray) -> BoolArray:
        """``[job, choice]``: has the most progress per device of all sizes on its device type."""
        each = np.where(speed > 0.0, speed / self.gang, _NEVER)
        found = np.zeros(speed.shape, dtype=np.bool_)
        for device_type in range(len(self.free)):
            columns = np.flatnonzero(self.device_type == device_type)
            best = columns[np.argmax(each[:, columns], axis=1)]
            found[np.arange(len(speed)), best] = True
        return found & (speed > 0.0)

    def _weights(self, time_s: FloatArray) -> FloatArray:
        """``[job]``: number of jobs that last at least as long with an efficient gang, itself
        included."""
        least_s = np.where(self.is_efficient, time_s, np.inf).min(axis=1)
        found: FloatArray = (least_s[None, :] >= least_s[:, None]).sum(axis=1).astype(np.float64)
        return found

    def begin(self) -> bool:
        """Give every job an efficient gang; False if some jobs do not fit."""
        burden = np.where(self.is_efficient, self.burden, np.nan)
        # Savings are relative to the mean over device types: a job for which all types are similar
        # takes what is left.
        saved = (np.nanmean(burden, axis=1)[:, None] - burden) / self.gang
        for _ in range(len(self.choice)):
            fits = self.is_efficient & (self.gang <= self.free[self.device_type])
            offers = np.where(fits & (self.choice < 0)[:, None], saved, -np.inf)
            row, column = np.unravel_index(int(np.argmax(offers)), offers.shape)
            if not np.isfinite(offers[row, column]):
                return False
            self._take(int(row), int(column))
        return True

    def improve(self) -> None:
        """Apply the change with the largest saving per device until none saves anything."""
        rows = np.arange(len(self.choice))
        for _ in range(4 * int(self.free.sum()) + len(rows)):
            own_gang, own_type = self.gang[self.choice], self.device_type[self.choice]
            is_own = own_type[:, None] == self.device_type[None, :]
            available = self.free[self.device_type][None, :] + np.where(
                is_own, own_gang[:, None], 0
            )
            more = np.maximum(self.gang[None, :] - own_gang[:, None], 1)
            saved = self.burden[rows, self.choice][:, None] - self.burden
            offers = np.where(self.gang[None, :] <= available, saved / more, -np.inf)
            row, column = np.unravel_index(int(np.argmax(offers)), offers.shape)
            if offers[row, column] <= 0.0:
                return
            self._take(int(row), int(column))

    def _take(self, row: int, column: int) -> None:
        before = self.choice[row]
        if before >= 0:
            self.free[self.device_type[before]] += self.gang[before]
        self.free[self.device_type[column]] -= self.gang[column]
        self.choice[row] = column

    def chosen(self, row: int) -> Chosen:
        column = self.choice[row]
        return Chosen(int(self.gang[column]), int(self.device_type[column]))
