"""Jobs after jobs, time limits, retries and drained devices: transitions of the state."""

from __future__ import annotations

import pytest
from fleet.round_fleets import fleet, job

from hocket.base.errors import UsageError
from hocket.fleet.rounds import (
    AddDevices,
    Cancel,
    Drain,
    Fail,
    Finish,
    FleetDevice,
    FleetState,
    Pause,
    Reopen,
    Resume,
    Submit,
    Tick,
    TimeOut,
    step,
)
from hocket.fleet.rounds.dependencies import next_limit_s, over_limit
from hocket.fleet.rounds.events import Leave
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import PHASES


def phases(state: FleetState) -> dict[int, str]:
    rows = state.jobs.rows
    return {int(n): PHASES[p] for n, p in zip(rows["number"], rows["phase"], strict=True)}


def chain(condition: str) -> FleetState:
    """Job 2 comes after job 1, job 3 after job 2, whatever becomes of that."""
    jobs = (
        job(1),
        job(2, after=((1, condition),)),
        job(3, after=((2, "any"),)),
    )
    return step(fleet(4), Submit(time_s=0.0, jobs=jobs))[0]


ENDS = {
    "finished": Finish(time_s=1.0, numbers=(1,)),
    "cancelled": Cancel(time_s=1.0, numbers=(1,)),
    "given up": Cancel(time_s=1.0, numbers=(1,), is_failure=True),
    "timed out": TimeOut(time_s=1.0, numbers=(1,)),
}


@pytest.mark.parametrize(
    ("condition", "end", "is_started"),
    [
        ("ok", "finished", True),
        ("ok", "cancelled", False),
        ("ok", "given up", False),
        ("ok", "timed out", False),
        ("failed", "finished", False),
        ("failed", "cancelled", False),
        ("failed", "given up", True),
        ("failed", "timed out", True),
        ("any", "finished", True),
        ("any", "cancelled", True),
    ],
)
def test_the_next_job_starts_or_ends_as_its_condition_says(condition, end, is_started):
    state = chain(condition)
    assert phases(state) == {1: "running", 2: "blocked", 3: "blocked"}
    assert "job 1 has" in reason(state, 2)
    state, actions = step(state, ENDS[end])
    if is_started:
        assert phases(state)[2] == "running"
        assert phases(state)[3] == "blocked"
        assert [start.number for start in actions.starts] == [2]
    else:
        assert phases(state) == {1: "ended", 2: "ended", 3: "running"}
        assert (2, "dependency") in [(stop.number, stop.reason) for stop in actions.stops]


def test_a_job_waits_for_all_that_it_comes_after():
    jobs = (job(1), job(2), job(3, after=((1, "ok"), (2, "any"))))
    state = step(fleet(4), Submit(time_s=0.0, jobs=jobs))[0]
    state, _ = step(state, Finish(time_s=1.0, numbers=(1,)))
    assert phases(state)[3] == "blocked"
    state, _ = step(state, Finish(time_s=2.0, numbers=(2,)))
    assert phases(state)[3] == "running"
    assert not len(state.dependencies)


@pytest.mark.parametrize(("condition", "phase"), [("any", "running"), ("ok", "ended")])
def test_a_job_waits_until_the_processes_of_an_ended_job_are_gone(condition, phase):
    state = chain(condition)
    state, actions = step(state, Cancel(time_s=1.0, numbers=(1,), living=frozenset({1})))
    assert phases(state)[2] == "blocked"
    # A job that is submitted now waits for them too, and a round forgets the ended job.
    late = job(4, after=((1, "any"),))
    state, _ = step(state, Submit(time_s=2.0, jobs=(late,), living=frozenset({1})))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert phases(state) == {2: "blocked", 3: "blocked", 4: "blocked"}
    state, actions = step(state, Leave(time_s=state.time_s, number=1, reason="cancelled"))
    assert phases(state)[2] == phase
    assert 4 in [start.number for start in actions.starts]


def test_a_long_chain_of_jobs_ends_with_its_first():
    size = 3_000
    jobs = (job(1), *(job(n, after=((n - 1, "ok"),)) for n in range(2, size + 1)))
    state = step(fleet(1), Submit(time_s=0.0, jobs=jobs))[0]
    state, actions = step(state, Cancel(time_s=1.0, numbers=(1,)))
    assert set(phases(state).values()) == {"ended"}
    assert len(list(actions.stops)) == size
    assert not len(state.dependencies)


def test_a_blocked_job_that_was_paused_is_blocked_again():
    state = chain("ok")
    state, _ = step(state, Pause(time_s=0.5, numbers=(2,)))
    assert phases(state)[2] == "paused"
    state, _ = step(state, Resume(time_s=0.6, numbers=(2,)))
    assert phases(state)[2] == "blocked"
    state, _ = step(state, Pause(time_s=0.7, numbers=(2,)))
    state, _ = step(state, Finish(time_s=1.0, numbers=(1,)))
    assert phases(state)[2] == "paused"
    state, _ = step(state, Resume(time_s=2.0, numbers=(2,)))
    assert phases(state)[2] == "running"


def test_blocked_jobs_earn_nothing():
    state = chain("ok")
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    rows = state.jobs.rows
    assert rows["target_s"][1] == 0.0 < rows["target_s"][0]


@pytest.mark.parametrize("needed", [2, 7])
def test_a_job_after_itself_or_nothing_is_refused(needed):
    state = step(fleet(1), Submit(time_s=0.0, jobs=(job(1),)))[0]
    with pytest.raises(UsageError, match="depends on a job that does not exist"):
        step(state, Submit(time_s=0.0, jobs=(job(2, after=((needed, "ok"),)),)))


def test_time_held_over_all_attempts_counts_towards_the_limit():
    state = step(fleet(1), Submit(time_s=0.0, jobs=(job(1, time_limit_s=10.0),)))[0]
    assert next_limit_s(state) == 10.0
    state, _ = step(state, Pause(time_s=4.0, numbers=(1,)))
    assert next_limit_s(state) == float("inf")
    state, _ = step(state, Resume(time_s=100.0, numbers=(1,)))
    assert next_limit_s(state) == 106.0
    assert over_limit(state, 105.9) == ()
    assert over_limit(state, 106.0) == (1,)
    state, actions = step(state, TimeOut(time_s=106.0, numbers=(1,)))
    assert [stop.reason for stop in actions.stops] == ["timed out"]


def test_retries_of_a_job_come_before_those_of_the_rules():
    jobs = (job(1, max_failures=1), job(2, max_failures=2), job(3))
    state = step(fleet(3), Submit(time_s=0.0, jobs=jobs))[0]
    for number in (1, 2, 3):
        state, _ = step(state, Fail(time_s=1.0, number=number, attempt=1))
    assert phases(state) == {1: "ended", 2: "running", 3: "running"}
    for number in (2, 3):
        state, _ = step(state, Fail(time_s=2.0, number=number, attempt=2))
    assert phases(state) == {1: "ended", 2: "ended", 3: "running"}


def test_drained_devices_finish_what_cannot_be_saved_and_take_nothing_new():
    jobs = (job(1, preemptible=False), job(2))
    state = step(fleet(2), Submit(time_s=0.0, jobs=jobs))[0]
    names = (*state.devices_of(1), *state.devices_of(2))
    state, actions = step(state, Drain(time_s=1.0, names=names))
    assert [(stop.number, stop.reason) for stop in actions.stops] == [(2, "drained")]
    assert phases(state) == {1: "running", 2: "waiting"}
    assert state.jobs.rows["done_steps"][1] > 0.0
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert phases(state) == {1: "running", 2: "waiting"}
    state, _ = step(state, Finish(time_s=state.time_s + 1.0, numbers=(1,)))
    assert phases(state)[2] == "waiting"
    state, _ = step(state, Reopen(time_s=state.time_s + 1.0, names=names))
    assert phases(state)[2] == "running"


def test_a_device_that_comes_back_is_still_drained():
    state = step(fleet(1), Drain(time_s=0.0, names=("new",)))[0]
    device_type = state.device_types[0]
    new = FleetDevice(name="new", device_type=device_type)
    state, _ = step(state, AddDevices(time_s=1.0, devices=(new,)))
    state, _ = step(state, Submit(time_s=2.0, jobs=(job(1), job(2))))
    assert sorted(phases(state).values()) == ["running", "waiting"]


def test_a_job_that_is_cancelled_waits_for_nothing_any_more() -> None:
    state, _ = step(chain("ok"), Cancel(time_s=1.0, numbers=(2,)))
    assert phases(state)[3] == "running"
    assert not len(state.dependencies)
    state, actions = step(state, Cancel(time_s=2.0, numbers=(1,)))
    assert [stop.number for stop in actions.stops] == [1]


def test_the_wait_of_a_job_begins_when_nothing_blocks_it_any_more() -> None:
    jobs = (job(1, slow=0.0), job(2, slow=0.0), job(3, slow=0.0, after=((1, "any"),)))
    state, _ = step(fleet(1), Submit(time_s=0.0, jobs=jobs))
    state, _ = step(state, Finish(time_s=50.0, numbers=(1,)))
    assert phases(state)[3] == "waiting"
    assert state.jobs.rows["waiting_since_s"][state.row_of(3)] == 50.0


def test_the_reason_of_a_job_names_drained_devices():
    state, _ = step(fleet(4), Drain(time_s=0.0, names=fleet(4).device_names))
    state, _ = step(state, Submit(time_s=0.0, jobs=(job(1),)))
    first = ", ".join(state.device_names[:3])
    assert reason(state, 1) == (
        "needs a device of one type that it can run on; at most 0 take jobs; "
        f"{first} and 1 more are drained"
    )
    state, _ = step(state, Reopen(time_s=1.0, names=state.device_names[1:]))
    state, _ = step(state, Submit(time_s=1.0, jobs=(job(2, gang=4),)))
    assert reason(state, 2).endswith(f"; {state.device_names[0]} is drained")
