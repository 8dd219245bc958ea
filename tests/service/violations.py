"""Oracle: invariants that hold for every state that the daemon commits."""

from __future__ import annotations

from collections.abc import Iterator

from hocket.fleet.rounds.state import ENDED, RUNNING, FleetState
from hocket.service.daemon.service_state import ServiceState, holder_index


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
