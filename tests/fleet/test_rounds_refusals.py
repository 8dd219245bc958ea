"""What rounds refuse: jobs, rules, events and stored states that make no sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.base.errors import UsageError
from hocket.fleet.rounds import (
    AddDevices,
    Cancel,
    Fail,
    FleetDevice,
    Job,
    Progress,
    RemoveDevices,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)

from .round_fleets import fleet, job, submit


@pytest.mark.parametrize(
    "wrong",
    [
        {"spread_steps_per_s": (1.0,)},
        {"fast": float("nan")},
        {"fast": -1.0},
        {"steps": float("nan")},
        {"steps": 0.0},
        {"weight": float("inf")},
        {"gang": 0},
        {"team": 3},
        {"deadline_s": float("nan")},
    ],
)
def test_jobs_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="does not fit"):
        submit(fleet(1), job(0, **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"round_s": 0.0},
        {"round_s": float("inf")},
        {"restart_s": -1.0},
        {"slack_rounds": float("nan")},
        {"mechanism": "gavl"},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        fleet(1, rules=Rules(**wrong))  # type: ignore[arg-type]


def test_what_cannot_be_is_refused() -> None:
    state = submit(fleet(1), job(5))
    for event in (
        Tick(time_s=float("nan")),
        Tick(time_s=float("inf")),
        Fail(time_s=0.0, number=5, attempt=1, done_steps=float("nan")),
        Progress(time_s=0.0, number=5, attempt=1, done_steps=-1.0),
        Progress(time_s=0.0, number=5, attempt=1, saved_steps=float("inf")),
        Submit(time_s=0.0, jobs=(job(5),)),
        Submit(time_s=0.0, jobs=(Job(number=9, name="", steps_per_s=(1.0,)),)),
        Cancel(time_s=0.0, numbers=(7,)),
        Tick(time_s=-1.0),
        AddDevices(time_s=0.0, devices=(FleetDevice(name="x", device_type="unheard"),)),
    ):
        with pytest.raises(UsageError):
            step(state, event)
    with pytest.raises(UsageError, match="at least one device type"):
        new_state((), ())


def test_a_device_that_works_is_not_moved_to_another_server() -> None:
    state = fleet(2)
    known = FleetDevice(name="fast0", device_type="fast", server="f0")
    state, _ = step(state, AddDevices(time_s=0.0, devices=(known,)))
    moved = AddDevices(time_s=0.0, devices=(replace(known, server="f7"),))
    with pytest.raises(UsageError, match="works on another server"):
        step(state, moved)
    state, _ = step(state, RemoveDevices(time_s=0.0, names=("fast0",)))
    state, _ = step(state, moved)
    assert state.layout.largest_server[0] == 1
