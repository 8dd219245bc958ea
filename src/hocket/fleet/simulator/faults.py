"""Devices that break and jobs that crash, at random moments drawn ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.fleet.rounds.events import AddDevices, Event, Fail, RemoveDevices
from hocket.fleet.rounds.state import RUNNING, Device, State


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Mean times between faults of the whole fleet; infinite for none."""

    device_every_s: float = np.inf
    repair_s: float = 3600.0
    job_every_s: float = np.inf
    seed: int = 0


class FaultSource:
    """The next fault, one after another; the only part of a simulation that keeps a generator."""

    def __init__(self, faults: Faults | None, devices: tuple[Device, ...]) -> None:
        self._faults = faults or Faults()
        self._random = np.random.default_rng(self._faults.seed)
        self._devices = devices
        self._repairs: list[tuple[float, Device]] = []
        self._next_device_s = self._draw(self._faults.device_every_s)
        self._next_job_s = self._draw(self._faults.job_every_s)

    def _draw(self, mean_s: float) -> float:
        return float(self._random.exponential(mean_s)) if np.isfinite(mean_s) else np.inf

    @property
    def next_s(self) -> float:
        """When something happens next."""
        repair_s = self._repairs[0][0] if self._repairs else np.inf
        return min(self._next_device_s, self._next_job_s, repair_s)

    def take(self, state: State) -> Event:
        """What happens then."""
        time_s = self.next_s
        if self._repairs and self._repairs[0][0] == time_s:
            return AddDevices(time_s=time_s, devices=(self._repairs.pop(0)[1],))
        if self._next_device_s == time_s:
            self._next_device_s += self._draw(self._faults.device_every_s)
            device = self._devices[int(self._random.integers(len(self._devices)))]
            if all(device != waiting for _, waiting in self._repairs):
                self._repairs.append((time_s + self._faults.repair_s, device))
            return RemoveDevices(time_s=time_s, names=(device.name,))
        self._next_job_s += self._draw(self._faults.job_every_s)
        running = np.flatnonzero(state.jobs.rows["phase"] == RUNNING)
        if not len(running):
            return Fail(time_s=time_s, number=-1, attempt=-1)
        row = state.jobs.rows[int(self._random.choice(running))]
        return Fail(time_s=time_s, number=int(row["number"]), attempt=int(row["attempt"]))
