"""All that the daemon knows, as one value: what `step` decided, and what became of it.

The state gives a device away in the moment it decides; really it is free only when the attempt
that had it has ended. So beside the state there are attempts: *open* until nothing of them runs any
more, *started* once the executor was asked to start them, *waiting* before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hocket.fleet.rounds.state import ENDED, RUNNING, FleetState
from hocket.service.executors.executor import AttemptName
from hocket.service.records import AttemptRecord, CheckpointRecord, JobRecord


@dataclass(frozen=True, eq=False, kw_only=True)
class ServiceState:
    """The fleet after a commit; never changed, only replaced."""

    state: FleetState
    jobs: Mapping[int, JobRecord]
    """Those that have not ended."""
    attempts: Mapping[int, tuple[AttemptRecord, ...]]
    """Open ones of each job, the oldest first; no entry where there is none."""
    waiting: tuple[AttemptName, ...]
    """Open attempts that are not started yet, in the order of their decisions."""
    held: Mapping[str, tuple[AttemptName, ...]]
    """Holders of each device that is in use, of started attempts: one, or two whose jobs may share
    it."""
    checkpoints: Mapping[int, CheckpointRecord]
    """The newest of each job that has one and has not ended."""
    last_number: int = 0
    last_sequence: int = 0
    num_attempts: int = 0
    num_checkpoints: int = 0

    def attempt(self, name: AttemptName) -> AttemptRecord | None:
        """An open attempt; None where it has ended or never was."""
        return find(self.attempts, name)

    def open_attempts(self) -> Iterator[AttemptRecord]:
        """All of them, in no order."""
        for records in self.attempts.values():
            yield from records


def find(
    attempts: Mapping[int, tuple[AttemptRecord, ...]], name: AttemptName
) -> AttemptRecord | None:
    """The open attempt of a name."""
    for record in attempts.get(name.job, ()):
        if record.attempt == name.attempt:
            return record
    return None


def name_of(record: AttemptRecord) -> AttemptName:
    """Which attempt of which job it is."""
    return AttemptName(record.job, record.attempt)


def phase_of(state: FleetState, number: int) -> int:
    """Phase of a job in the state; ended where the state does not know it any more."""
    numbers = state.jobs.rows["number"]
    row = int(np.searchsorted(numbers, number))
    if row >= len(numbers) or numbers[row] != number:
        return ENDED
    return int(state.jobs.rows["phase"][row])


def kinds_up(state: FleetState) -> dict[str, str]:
    """Kinds of the devices that work, by their names."""
    devices = zip(state.device_names, state.device_kind.tolist(), state.is_up, strict=True)
    return {name: state.kinds[kind] for name, kind, is_up in devices if is_up}


def holder_index(
    attempts: Mapping[int, tuple[AttemptRecord, ...]],
) -> tuple[tuple[AttemptName, ...], dict[str, tuple[AttemptName, ...]]]:
    """Waiting attempts and holders of devices, as open attempts tell them."""
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


def violations(service_state: ServiceState) -> list[str]:
    """List violated invariants; empty for every state that was committed."""
    return [
        *_device_violations(service_state),
        *_running_violations(service_state),
        *(
            f"job {number} has open attempts and no record"
            for number in service_state.attempts
            if number not in service_state.jobs
        ),
        *(
            f"job {number} is in the state and has no record"
            for number, phase in zip(*_numbers_and_phases(service_state.state), strict=True)
            if phase != ENDED and number not in service_state.jobs
        ),
    ]


def _numbers_and_phases(state: FleetState) -> tuple[list[int], list[int]]:
    return state.jobs.rows["number"].tolist(), state.jobs.rows["phase"].tolist()


def _device_violations(service_state: ServiceState) -> Iterator[str]:
    _, holders = holder_index(service_state.attempts)
    for device, names in holders.items():
        may_share = all(
            name.job in service_state.jobs and service_state.jobs[name.job].spec.space_sharing
            for name in names
        )
        if len(names) > (2 if may_share else 1):
            yield f"device {device!r} is given to {' and to '.join(map(str, names))}"
    for number, records in service_state.attempts.items():
        if sum(record.started_s is not None for record in records) > 1:
            yield f"job {number} runs twice"
    if {device: set(names) for device, names in holders.items()} != {
        device: set(names) for device, names in service_state.held.items()
    }:
        yield "the holders of devices are not those of the open attempts"


def _running_violations(service_state: ServiceState) -> Iterator[str]:
    """A job runs for the state where it has one open attempt that shall run, on those devices."""
    rows = service_state.state.jobs.rows
    runs = rows["phase"] == RUNNING
    decided = dict(zip(rows["number"][runs].tolist(), rows["attempt"][runs].tolist(), strict=True))
    wanted = {
        record.job: record
        for record in service_state.open_attempts()
        if record.stopping_since_s is None
    }
    for number in decided.keys() ^ wanted.keys():
        yield f"the state and the attempts differ in whether job {number} runs"
    for number in decided.keys() & wanted.keys():
        record = wanted[number]
        if record.attempt != decided[number]:
            yield f"job {number} runs attempt {record.attempt}, not {decided[number]}"
        elif set(service_state.state.devices_of(number)) != set(record.devices):
            yield f"job {number} runs on other devices than the state says"
