"""Actions of a step: jobs to stop, jobs to start, on which devices.

Stored as arrays, because a round of a large fleet starts hundreds of jobs; `Actions.starts` and
`Actions.stops` give them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import LongArray

# Reasons for which an attempt is stopped; actions store their positions.
STOP_REASONS = (
    "preempted", "moved", "cancelled", "paused", "device lost", "finished", "failed", "given up",
    "resized", "timed out", "dependency", "drained",
)  # fmt: skip
(
    PREEMPTED, MOVED, CANCELLED, PAUSED_BY_USER, DEVICE_LOST, FINISHED, FAILED, GIVEN_UP,
    RESIZED, TIMED_OUT, DEPENDENCY, DRAINED,
) = range(len(STOP_REASONS))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start an attempt of a job on these devices."""

    number: int
    attempt: int
    devices: tuple[str, ...]
    partner: int
    """The job that shares the devices; -1 for none."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop the attempt of a job; its devices go to others."""

    number: int
    attempt: int
    reason: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Actions:
    """Jobs to stop, then jobs to start. A job in neither list keeps its devices."""

    stopped: LongArray
    stopped_attempt: LongArray
    stopped_reason: LongArray
    started: LongArray
    started_attempt: LongArray
    partner: LongArray
    device_ptr: LongArray
    device: LongArray
    """Devices of the started job i: ``device[device_ptr[i]:device_ptr[i + 1]]``."""
    device_names: tuple[str, ...] = ()

    @property
    def stops(self) -> Iterator[Stop]:
        """Yield the jobs to stop."""
        rows = zip(self.stopped, self.stopped_attempt, self.stopped_reason, strict=True)
        for number, attempt, reason in rows:
            yield Stop(number=int(number), attempt=int(attempt), reason=STOP_REASONS[reason])

    @property
    def starts(self) -> Iterator[Start]:
        """Yield the jobs to start, once the stops are done."""
        for at, number in enumerate(self.started):
            devices = self.device[self.device_ptr[at] : self.device_ptr[at + 1]]
            yield Start(
                number=int(number),
                attempt=int(self.started_attempt[at]),
                devices=tuple(self.device_names[device] for device in devices),
                partner=int(self.partner[at]),
            )


_EMPTY = np.zeros(0, dtype=np.int64)
_FIRST = np.zeros(1, dtype=np.int64)


def only_stops(numbers: LongArray, attempts: LongArray, reason: int) -> Actions:
    """Actions that stop jobs for one reason and start none."""
    return Actions(
        stopped=numbers,
        stopped_attempt=attempts,
        stopped_reason=np.full(len(numbers), reason),
        started=_EMPTY,
        started_attempt=_EMPTY,
        partner=_EMPTY,
        device_ptr=_FIRST,
        device=_EMPTY,
    )


def with_stops(actions: Actions, before: Actions) -> Actions:
    """Join the stops of both and keep the starts of the first."""
    return replace(
        actions,
        stopped=np.concatenate([before.stopped, actions.stopped]),
        stopped_attempt=np.concatenate([before.stopped_attempt, actions.stopped_attempt]),
        stopped_reason=np.concatenate([before.stopped_reason, actions.stopped_reason]),
    )


NOTHING = only_stops(_EMPTY, _EMPTY, 0)
