"""What must hold for a fleet after every step, whatever happened."""

from __future__ import annotations

import numpy as np

from hocket.fleet.rounds import Actions, Event, Fail, FleetState, Progress
from hocket.fleet.rounds.state import ENDED, RUNNING

RISING = ("attempt", "failures", "held_s", "target_s", "counted_s")
"""What only rises in the life of a job."""


class Watch:
    """Follows a fleet step by step."""

    def __init__(self) -> None:
        self._state: FleetState | None = None
        self._accounts: dict[int, tuple[float, ...]] = {}

    def __call__(self, state: FleetState, event: Event, actions: Actions) -> None:
        self.devices(state)
        self.accounts(state)
        self.bound_jobs(actions)
        if isinstance(event, Fail | Progress) and self._state is not None:
            job = self._state.jobs.rows[self._state.row_of(event.number)]
            if job["attempt"] != event.attempt or job["phase"] != RUNNING:
                assert len(actions.stopped) + len(actions.started) == 0, "a ghost was heard"
                assert_same_but_for_time(self._state, state)
        self._state = state

    def devices(self, state: FleetState) -> None:
        """No device twice (but for pairs), gangs whole and on one type, nobody on a broken one."""
        rows, up, device_types = (
            state.jobs.rows,
            state.is_up.tolist(),
            state.type_of_device.tolist(),
        )
        held: dict[int, list[int]] = {}
        partner: dict[int, int] = {}
        for device, (one, other) in enumerate(state.holders.tolist()):
            assert up[device] or (one < 0 and other < 0), "a broken device is held"
            assert one >= 0 or other < 0
            for number in (one, other):
                if number >= 0:
                    held.setdefault(number, []).append(device_types[device])
            if other >= 0:
                assert state.pair_table is not None, "a device was given twice"
                assert partner.setdefault(one, other) == other
                assert partner.setdefault(other, one) == one
        columns = (
            rows[name].tolist() for name in ("number", "phase", "gang", "device_type", "partner")
        )
        for number, phase, gang, device_type, beside in zip(*columns, strict=True):
            expected = [device_type] * gang if phase == RUNNING else []
            assert held.pop(number, []) == expected, "gangs run whole or not at all"
            assert partner.get(number, -1) == beside
        assert not held, "a device is held by a job that is not there"

    def bound_jobs(self, actions: Actions) -> None:
        """Rounds never stop or move a job that cannot be preempted."""
        if self._state is None:
            return
        for stop in actions.stops:
            if stop.reason in ("preempted", "moved"):
                job = self._state.jobs.rows[self._state.row_of(stop.number)]
                assert job["preemptible"] > 0, f"job {stop.number} was {stop.reason}"

    def accounts(self, state: FleetState) -> None:
        """No job is lost, attempts and accounts only rise."""
        rows = state.jobs.rows
        numbers, is_over = rows["number"].tolist(), (rows["phase"] == ENDED).tolist()
        columns = (rows[name].tolist() for name in RISING)
        now = dict(zip(numbers, zip(*columns, strict=True), strict=True))
        for number, values in self._accounts.items():
            assert number in now, f"job {number} is lost"
            for name, old, new in zip(RISING, values, now[number], strict=True):
                assert new >= old, f"{name} of job {number} fell from {old} to {new}"
        over = dict(zip(numbers, is_over, strict=True))
        self._accounts = {number: now[number] for number in numbers if not over[number]}


def assert_same_but_for_time(before: FleetState, after: FleetState) -> None:
    """Nothing was decided, stopped, learnt or saved."""
    for name in ("phase", "device_type", "partner", "attempt", "failures", "saved_steps", "rate"):
        assert np.array_equal(before.jobs.rows[name], after.jobs.rows[name]), name
    assert np.array_equal(before.jobs.steps_per_s, after.jobs.steps_per_s)
    assert np.array_equal(before.holders, after.holders)
