"""A trace: arrival and work of each job."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.base.atomic import write_atomically

COLUMNS = ("name", "job_type", "arrival_s", "gang", "weight", "total_steps", "duration_s", "slo_s")
"""The columns of hocket's own CSV; work is in steps, or in seconds on the first device type."""
USER = "user"
"""Optional column: with users, fair policies divide shares by user first."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Jobs in order of arrival."""

    names: tuple[str, ...]
    job_types: tuple[str, ...]
    """Of each job; empty where the trace does not say."""
    arrival_s: FloatArray
    gang: LongArray
    weight: FloatArray
    total_steps: FloatArray
    """NaN if only a duration is known."""
    duration_s: FloatArray
    """Time on the reference device; NaN if unknown."""
    slo_s: FloatArray
    """Allowed time from arrival to end; infinite for none."""
    users: tuple[str, ...] = ()
    """User of each job; empty where the trace names none."""
    notes: tuple[str, ...] = ()
    """Remarks of its file on the jobs that are not followed."""

    def __len__(self) -> int:
        return len(self.names)

    def first(self, count: int) -> Trace:
        """The first jobs."""
        return replace(
            self,
            names=self.names[:count],
            job_types=self.job_types[:count],
            users=self.users[:count],
            arrival_s=self.arrival_s[:count],
            gang=self.gang[:count],
            weight=self.weight[:count],
            total_steps=self.total_steps[:count],
            duration_s=self.duration_s[:count],
            slo_s=self.slo_s[:count],
        )


def write_trace_csv(trace: Trace, path: str | Path) -> None:
    """Write a trace as hocket's own CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*COLUMNS, USER) if trace.users else COLUMNS)
    for job in range(len(trace)):
        work = (trace.total_steps[job], trace.duration_s[job])
        slo_s = trace.slo_s[job]
        writer.writerow([
            trace.names[job],
            trace.job_types[job],
            repr(float(trace.arrival_s[job])),
            int(trace.gang[job]),
            repr(float(trace.weight[job])),
            *("" if np.isnan(amount) else repr(float(amount)) for amount in work),
            "" if np.isinf(slo_s) else repr(float(slo_s)),
            *trace.users[job : job + 1],
        ])  # fmt: skip
    write_atomically(path, text.getvalue().encode())
