"""State of the daemon as one value: decisions of `step`, and the records of jobs and attempts.

The state reassigns a device at the moment of a decision, but the device becomes free only when the
attempt that held it has ended. So attempts are tracked in addition to the state. An attempt is
*open* until none of its processes is left, *started* when the executor was asked to start it, and
*waiting* before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hocket.fleet.rounds.state import ENDED, FleetState
from hocket.service.executors.executor import AttemptName
from hocket.service.records import AttemptRecord, CheckpointRecord, JobRecord


@dataclass(frozen=True, eq=False, kw_only=True)
class ServiceState:
    """The fleet after a commit; immutable."""

    state: FleetState
    jobs: Mapping[int, JobRecord]
    """Jobs that have not ended, by number."""
    attempts: Mapping[int, tuple[AttemptRecord, ...]]
    """Open attempts of each job, oldest first; jobs without open attempts have no entry."""
    waiting: tuple[AttemptName, ...]
    """Open attempts that are not started yet, in the order of their decisions."""
    held: Mapping[str, tuple[AttemptName, ...]]
    """Started attempts that hold each device in use: one, or two whose jobs may share it."""
    checkpoints: Mapping[int, CheckpointRecord]
    """Newest checkpoint of each job that has one and has not ended."""
    last_number: int = 0
    last_sequence: int = 0

    def attempt(self, name: AttemptName) -> AttemptRecord | None:
        """The open attempt of this name; None if it has ended or never existed."""
        return find(self.attempts, name)

    def open_attempts(self) -> Iterator[AttemptRecord]:
        """All open attempts, in no order."""
        for records in self.attempts.values():
            yield from records


def find(
    attempts: Mapping[int, tuple[AttemptRecord, ...]], name: AttemptName
) -> AttemptRecord | None:
    """The open attempt of this name; None if there is none."""
    for record in attempts.get(name.job, ()):
        if record.attempt == name.attempt:
            return record
    return None


def name_of(record: AttemptRecord) -> AttemptName:
    """Name of an attempt: the numbers of its job and of the attempt."""
    return AttemptName(record.job, record.attempt)


def phase_of(state: FleetState, number: int) -> int:
    """Phase of a job in the state; the ended phase if the state no longer contains the job."""
    numbers = state.jobs.rows["number"]
    row = int(np.searchsorted(numbers, number))
    if row >= len(numbers) or numbers[row] != number:
        return ENDED
    return int(state.jobs.rows["phase"][row])


def types_up(state: FleetState) -> dict[str, str]:
    """Device types of the working devices, by device name."""
    devices = zip(state.device_names, state.type_of_device.tolist(), state.is_up, strict=True)
    return {name: state.device_types[device_type] for name, device_type, is_up in devices if is_up}


def holder_index(
    attempts: Mapping[int, tuple[AttemptRecord, ...]],
) -> tuple[tuple[AttemptName, ...], dict[str, tuple[AttemptName, ...]]]:
    """Waiting attempts, and the attempts that hold each device, computed from the open attempts."""
    records = sorted(
        (record for some in attempts.values() for record in some),
        key=lambda record: (record.decided_s, record.job, record.attempt),
    )
    waiting = tuple(name_of(record) for record in records if record.started_s is None)
    held: dict[str, tuple[AttemptName, ...]] = {}
    for record in sorted(records, key=lambda record: record.started_s or 0.0):
        if record.started_s is not None:
            for device in record.devices:
                held[device] = (*held.get(device, ()), name_of(record))
    return waiting, held
