"""Snapshots: any state comes back exactly, and goes on deciding the same."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.fake_executor import fleet_devices
from service.store_story import packed

from hocket.base.errors import InputFileError
from hocket.fleet.rounds import (
    AddDevices,
    Cancel,
    Fail,
    Finish,
    Job,
    Pause,
    Progress,
    RemoveDevices,
    Resume,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.state import FleetState, PairTable
from hocket.service.store.snapshot import put_together

DEVICE_TYPES = ("v100", "k80")
DEVICES = fleet_devices(v100=3, k80=2)


@st.composite
def states(draw: st.DrawFn) -> FleetState:
    """A fleet after some events."""
    mechanism = draw(st.sampled_from(["improved", "improved", "gavel"]))
    policy = draw(st.sampled_from(["las", "fifo", "finish-time-fairness", "hierarchical"]))
    shares = mechanism == "improved" and policy == "las" and draw(st.booleans())
    table = PairTable(steps_per_s=np.full((2, 2, 2), 0.7)) if shares else None
    rules = Rules(policy=policy, mechanism=mechanism, round_s=10.0)
    state = new_state(DEVICE_TYPES, DEVICES, rules, pair_table=table, time_s=5.0)
    for number in range(draw(st.integers(0, 12))):
        state = _after(draw, state, number + 1)
    return state


def _after(draw: st.DrawFn, state: FleetState, number: int) -> FleetState:
    time_s = state.time_s + draw(st.floats(0.0, 20.0))
    live = state.jobs.rows["number"][state.jobs.rows["phase"] < 3].tolist()
    job = Job(
        number=number,
        name=draw(st.text(max_size=3)),
        steps_per_s=(draw(st.floats(0.1, 9.0)), draw(st.sampled_from([0.0, 1.0]))),
        total_steps=100.0 if "finish" in state.rules.policy else float("inf"),
        gang=draw(st.integers(1, 2)),
        profile=draw(st.integers(-1, 1)) if state.pair_table is not None else -1,
    )
    events = [Submit(time_s=time_s, jobs=(job,)), Tick(time_s=time_s)]
    events += [AddDevices(time_s=time_s, devices=DEVICES)]
    events += [RemoveDevices(time_s=time_s, names=("v100-1",))]
    if live:
        one = draw(st.sampled_from(live))
        attempt = int(state.jobs.rows["attempt"][state.row_of(one)])
        events += [how(time_s=time_s, numbers=(one,)) for how in (Finish, Cancel, Pause, Resume)]
        events += [Fail(time_s=time_s, number=one, attempt=attempt)]
        events += [Progress(time_s=time_s, number=one, attempt=attempt, done_steps=5.0)]
    return step(state, draw(st.sampled_from(events)))[0]


def assert_same(one, two):
    """Every field, down to the elements and types of arrays."""
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, two, strict=True)
    elif is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(two, field.name))
    elif isinstance(one, tuple):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            assert_same(left, right)
    else:
        assert one == two or one != one


@settings(derandomize=True, deadline=None, max_examples=60)
@given(state=states())
def test_a_state_comes_back_exactly_and_goes_on_the_same(state):
    head, *arrays = packed(state)
    back = put_together(head, arrays)
    assert packed(back) == [head, *arrays]
    assert_same(back, state)
    event = Tick(time_s=state.time_s + 30.0)
    (one, one_actions), (two, two_actions) = step(state, event), step(back, event)
    assert packed(one) == packed(two)
    assert list(one_actions.starts) == list(two_actions.starts)
    assert list(one_actions.stops) == list(two_actions.stops)


def test_anything_else_is_refused():
    head, *arrays = packed(new_state(DEVICE_TYPES, DEVICES))
    assert isinstance(put_together(head, arrays), FleetState)

    def changed(**changes: object) -> bytes:
        return json.dumps({**json.loads(head), **changes}).encode()

    wrong: list[bytes] = [
        b"", head[:-1], b"\xff" * 100, b"[]",
        changed(columns=["number", "unknown"]),
        changed(arrays=[["object", 1]] * len(arrays)),
        changed(arrays=[["int64", -7]] * len(arrays)),
        changed(state={"class": "Popen", "fields": {"args": "true"}}),
        changed(state={"class": "Rules", "fields": {}}),
        changed(state=[]),
    ]  # fmt: skip
    for data in wrong:
        with pytest.raises(InputFileError, match="damaged"):
            put_together(data, arrays)
    for others in (arrays[:-1], [*arrays, b""], [arrays[0] + b"x", *arrays[1:]]):
        with pytest.raises(InputFileError, match="damaged"):
            put_together(head, others)
