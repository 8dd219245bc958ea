"""Devices that break, jobs that crash and old attempts that speak up, at random moments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.fleet.rounds.events import AddDevices, Event, Fail, Progress, RemoveDevices, Tick
from hocket.fleet.rounds.state import RUNNING, FleetDevice, FleetState, Rows


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Mean times between faults of the whole fleet; infinite for none."""

    device_every_s: float = np.inf
    repair_s: float = 3600.0
    job_every_s: float = np.inf
    ghost_every_s: float = np.inf
    """Reports of an attempt that was stopped and did not notice."""
    seed: int = 0


class FaultSource:
    """The next fault, one after another; the only part of a simulation that keeps a generator."""

    def __init__(self, faults: Faults, devices: tuple[FleetDevice, ...]) -> None:
        self._faults = faults
        self._random = np.random.default_rng(self._faults.seed)
        self._devices = devices
        self._repairs: list[tuple[float, FleetDevice]] = []
        self._next_device_s = self._draw(self._faults.device_every_s)
        self._next_job_s = self._draw(self._faults.job_every_s)
        self._next_ghost_s = self._draw(self._faults.ghost_every_s)
        self.next_s = self._first_s()
        """When something happens next."""

    def _draw(self, mean_s: float) -> float:
        return float(self._random.exponential(mean_s)) if np.isfinite(mean_s) else np.inf

    def _first_s(self) -> float:
        repair_s = self._repairs[0][0] if self._repairs else np.inf
        return min(self._next_device_s, self._next_job_s, self._next_ghost_s, repair_s)

    def take(self, state: FleetState) -> Event:
        """The event of then; a tick where nobody is affected."""
        event = self._take(state, self.next_s)
        self.next_s = self._first_s()
        return event

    def _take(self, state: FleetState, time_s: float) -> Event:
        if self._repairs and self._repairs[0][0] == time_s:
            return AddDevices(time_s=time_s, devices=(self._repairs.pop(0)[1],))
        if self._next_device_s == time_s:
            self._next_device_s += self._draw(self._faults.device_every_s)
            return self._break(time_s)
        if self._next_job_s == time_s:
            self._next_job_s += self._draw(self._faults.job_every_s)
            job = self._one_of(state, is_running=True)
            if job is None:
                return Tick(time_s=time_s)
            return Fail(time_s=time_s, number=int(job["number"]), attempt=int(job["attempt"]))
        self._next_ghost_s += self._draw(self._faults.ghost_every_s)
        return self._haunt(state, time_s)

    def _break(self, time_s: float) -> Event:
        device = self._devices[int(self._random.integers(len(self._devices)))]
        if all(device != waiting for _, waiting in self._repairs):
            self._repairs.append((time_s + self._faults.repair_s, device))
        return RemoveDevices(time_s=time_s, names=(device.name,))

    def _haunt(self, state: FleetState, time_s: float) -> Event:
        job = self._one_of(state, is_running=False)
        if job is None:
            return Tick(time_s=time_s)
        # A waiting job's last attempt is as dead as a running job's last but one.
        attempt = int(job["attempt"]) - int(job["phase"] == RUNNING)
        number = int(job["number"])
        if self._random.random() < 0.5:
            return Fail(time_s=time_s, number=number, attempt=attempt)
        return Progress(time_s=time_s, number=number, attempt=attempt, done_steps=1e6)

    def _one_of(self, state: FleetState, *, is_running: bool) -> Rows | None:
        phase = state.jobs.rows["phase"]
        which = np.flatnonzero(phase == RUNNING if is_running else phase <= RUNNING)
        return state.jobs.rows[int(self._random.choice(which))] if len(which) else None
