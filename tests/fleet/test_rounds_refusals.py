"""What rounds refuse: jobs, rules, events and stored states that make no sense."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.base.errors import InputFileError, UsageError
from hocket.fleet.rounds import (
    AddDevices,
    Cancel,
    Device,
    Fail,
    Job,
    PairTable,
    Progress,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.files import state_from_data, state_to_data

from .round_fleets import NO_SLACK, fleet, job, submit


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
        AddDevices(time_s=0.0, devices=(Device(name="x", kind="unheard"),)),
    ):
        with pytest.raises(UsageError):
            step(state, event)
    with pytest.raises(UsageError, match="at least one kind"):
        new_state((), ())
    with pytest.raises(InputFileError):
        state_from_data({"format": "hocket-fleet-state", "version": 1})
    with pytest.raises(InputFileError, match="damaged"):
        state_from_data({**state_to_data(state), "rules": "none"})


@pytest.mark.parametrize(
    ("table", "name", "wrong"),
    [
        ("jobs", "number", [3, 3]),
        ("jobs", "phase", [1, 4]),
        ("jobs", "kind", [0, 7]),
        ("jobs", "kind", [-1, 1]),
        ("jobs", "profile", [0, 2]),
        ("jobs", "team", [0, -1]),
        ("by_kind", "shares", [[0.5, 0.5]]),
        ("by_kind", "credit_s", []),
        (None, "holders", [[0, -1], [9, -1]]),
        (None, "holders", [[0, -1]]),
        (None, "device_kind", [0, -1]),
        (None, "device_server", [0, 2]),
        (None, "price_per_hour", [1.0]),
        (None, "pair_plan", None),
        (None, "pair_steps_per_s", None),
        (None, "pair_steps_per_s", [[[0.0, 0.0]]]),
        ("pair_plan", "amount", []),
    ],
)
def test_a_state_that_points_to_nothing_is_refused(
    table: str | None, name: str, wrong: object
) -> None:
    devices = tuple(Device(name=kind, kind=kind) for kind in ("fast", "slow"))
    pairs = PairTable(steps_per_s=np.zeros((1, 1, 2)))
    state = new_state(("fast", "slow"), devices, NO_SLACK, pair_table=pairs)
    data = state_to_data(submit(state, job(0), job(1)))
    state_from_data(data)
    (data if table is None else data[table])[name] = wrong
    with pytest.raises(InputFileError, match="damaged"):
        state_from_data(data)
