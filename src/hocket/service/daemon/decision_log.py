"""The log of decisions: one line in ``decisions.log`` of the state folder per decision.

Each line states the decision and the numbers behind it. Lines are written after the commit, so
every reported decision has happened. If the disk is full, lines are lost, but no decisions.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

import numpy as np

from hocket.fleet.rounds.actions import Start, Stop
from hocket.fleet.rounds.state import FleetState
from hocket.service.plain_file import open_plain

NAME = "decisions.log"
MAX_BYTES = 10_000_000
NUM_KEPT = 4
"""Number of older log files that are kept besides the current one."""


class DecisionLog:
    """Appends lines; a full file is renamed to ``decisions.log.1``, and older ones are shifted."""

    def __init__(self, folder: Path) -> None:
        self._file = _PlainFiles(
            folder / NAME, maxBytes=MAX_BYTES, backupCount=NUM_KEPT, encoding="utf-8", delay=True
        )

    def write(self, time_s: float, lines: Sequence[str]) -> None:
        """Add the lines of one batch."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))
        for line in lines:
            self._file.emit(logging.makeLogRecord({"msg": f"{moment} {line}"}))
        self._file.close()


class _PlainFiles(RotatingFileHandler):
    """Log handler that opens files without following links or pipes, which a job might have
    created.
    """

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return open(open_plain(self.baseFilename, flags), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drop lines that cannot be written."""


def describe_start(before: FleetState, after: FleetState, start: Start) -> str:
    """Line for a job that was started, with the reason from the states before and after."""
    row = after.row_of(start.number)
    job = after.jobs.rows[row]
    parts = [f"waited {after.time_s - job['waiting_since_s']:.0f} s"]
    shares = after.jobs.shares[row]
    if start.partner >= 0:
        parts.append(f"shares them with job {start.partner}")
    if shares.any():
        deficit_s = float(after.jobs.credit_s[row][shares > 0.0].max())
        parts.append(f"gets {shares.sum():.1%} of its time")
        parts.append(f"deficit {deficit_s / after.rules.round_s:.1f} rounds")
    elif start.partner < 0:
        parts.append("fills devices that nobody has a deficit for")
    if _reserved_s(before, start.number) > 0.0:
        parts.append("had devices reserved")
    elif (after.jobs.rows["reserved_s"] > 0.0).any():
        parts.append("fills a gap before a reserved job")
    return (
        f"job {start.number} starts attempt {start.attempt} on {','.join(start.devices)}: "
        f"{', '.join(parts)}"
    )


def describe_stop(stop: Stop) -> str:
    """Text that names a job that is stopped, and the reason."""
    return f"job {stop.number} stops attempt {stop.attempt}: {stop.reason}"


def describe_reserved(before: FleetState, after: FleetState) -> list[str]:
    """Lines for jobs whose reservation of devices is new or has another start time."""
    rows = after.jobs.rows
    lines = []
    for job in rows[rows["reserved_s"] > 0.0]:
        number, start_s = int(job["number"]), float(job["reserved_s"])
        if _reserved_s(before, number) != start_s:
            when = "when enough are free"
            if np.isfinite(start_s):
                when = f"in {start_s - after.time_s:.0f} s, as predicted"
            lines.append(f"job {number} has {int(job['gang'])} devices reserved: starts {when}")
    return lines


def _reserved_s(state: FleetState, number: int) -> float:
    rows = state.jobs.rows
    at = int(np.searchsorted(rows["number"], number))
    is_there = at < len(rows) and rows["number"][at] == number
    return float(rows["reserved_s"][at]) if is_there else 0.0
