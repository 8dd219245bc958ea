"""The outcome of a simulated fleet, and the figures that people compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray


@dataclass(frozen=True, eq=False, kw_only=True)
class HoldSpans:
    """Holders of devices over time."""

    device_names: tuple[str, ...]
    device: LongArray
    is_second: BoolArray
    """True if another job had the device before, and shared it."""
    number: LongArray
    start_s: FloatArray
    end_s: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class FleetRun:
    """Outcome of every job of a trace; NaN for jobs that had not ended when it stopped."""

    policy: str
    mechanism: str
    shares_devices: bool
    device_types: tuple[str, ...]
    num_devices: LongArray
    names: tuple[str, ...]
    arrival_s: FloatArray
    start_s: FloatArray
    """Time of the first start of a job."""
    end_s: FloatArray
    is_finished: BoolArray
    """True if it did all its steps; a job that crashed too often ends without."""
    held_s: FloatArray
    """Time that a job held devices."""
    target_s: FloatArray
    """Time that its shares promised."""
    ideal_s: FloatArray
    """Time that it takes alone on its fastest devices."""
    measured: tuple[int, int]
    left_out: LongArray
    """Jobs that need more devices than there are."""
    busy_device_s: FloatArray
    up_device_s: FloatArray
    cost: float
    num_rounds: int
    num_starts: int
    num_preemptions: int
    simulated_s: float
    sample_time_s: FloatArray
    """Times at which rounds began, first and last moment included."""
    sample_busy: FloatArray
    """``[sample, type]``: devices in use from one of these moments to the next, in the mean."""
    spans: HoldSpans | None
    cpu_seconds: float
    """Of the run, without loading compiled code."""

    @property
    def jct_s(self) -> FloatArray:
        """Completion times of the measured jobs that finished."""
        first, end = self.measured
        times = (self.end_s - self.arrival_s)[first:end]
        return np.asarray(times[self.is_finished[first:end]])

    @property
    def share_received(self) -> FloatArray:
        """Time held over time promised, for measured jobs that were promised any."""
        first, end = self.measured
        held, target = self.held_s[first:end], self.target_s[first:end]
        return np.asarray((held / np.where(target > 0, target, np.nan))[target > 0.0])

    @property
    def slowdown(self) -> FloatArray:
        """Completion time over the time alone on the fastest devices, for measured jobs."""
        first, end = self.measured
        ideal_s = np.maximum(self.ideal_s[first:end][self.is_finished[first:end]], 1e-9)
        # For very short jobs, the difference of two large times may be rounded below the ideal
        # time.
        return np.asarray(np.maximum(self.jct_s, ideal_s) / ideal_s)

    @property
    def utilisation(self) -> float:
        """Part of the device time that was used."""
        return float(self.busy_device_s.sum() / max(self.up_device_s.sum(), 1e-300))

    def figures(self) -> dict[str, Any]:
        """All figures, for tables and files."""
        jct_s = self.jct_s if len(self.jct_s) else np.array([np.nan])
        slowdown = self.slowdown if len(self.slowdown) else np.array([np.nan])
        received = self.share_received if len(self.share_received) else np.array([np.nan])
        first, end = self.measured
        ends_s = self.end_s[first:end][np.isfinite(self.end_s[first:end])]
        span_s = float(ends_s.max() - self.arrival_s[first]) if len(ends_s) else np.nan
        return {
            "policy": self.policy,
            "mechanism": self.mechanism,
            "space_sharing": self.shares_devices,
            "num_jobs": len(self.jct_s),
            "average_jct_s": float(jct_s.mean()),
            "p50_jct_s": float(np.percentile(jct_s, 50)),
            "p99_jct_s": float(np.percentile(jct_s, 99)),
            "makespan_s": span_s,
            "utilisation": self.utilisation,
            "utilisation_by_type": {
                device_type: float(busy / max(up, 1e-300))
                for device_type, busy, up in zip(
                    self.device_types, self.busy_device_s, self.up_device_s, strict=True
                )
            },
            "fairness": jain_index(1.0 / slowdown),
            "worst_slowdown": float(slowdown.max()),
            "share_received_over_target": float(np.median(received)),
            "share_deviation": float(np.mean(np.abs(received - 1.0))),
            "cost": self.cost,
            "num_rounds": self.num_rounds,
            "num_starts": self.num_starts,
            "num_preemptions": self.num_preemptions,
            "num_left_out": len(self.left_out),
            "num_unfinished": int((~self.is_finished[first:end]).sum())
            - int(((self.left_out >= first) & (self.left_out < end)).sum()),
            "simulated_s": self.simulated_s,
            "cpu_seconds": self.cpu_seconds,
        }


def jain_index(values: FloatArray) -> float:
    """1 where all values are equal, 1/n where one has everything (Jain, Chiu and Hawe, 1984)."""
    square = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * square) if square > 0.0 else 1.0
