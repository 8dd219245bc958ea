"""Who is stopped, who is not, and what a stop costs."""

from __future__ import annotations

import numpy as np
import pytest

from hocket.fleet.rounds import (
    Drain,
    Fail,
    Finish,
    FleetState,
    Lose,
    Pause,
    Progress,
    Resume,
    Rules,
    Tick,
    step,
)

from .round_fleets import fleet, job, submit


@pytest.mark.parametrize("has_saved", [0, 1])
def test_who_lost_least_is_stopped_first(has_saved: int) -> None:
    state = submit(fleet(2), *(job(number, slow=0.0) for number in range(3)))
    assert sorted(state.holders[:, 0]) == [0, 1]
    saved = Progress(time_s=300.0, number=has_saved, attempt=1, done_steps=600.0, saved_steps=600.0)
    state, _ = step(state, saved)
    state, actions = step(state, Tick(time_s=state.next_tick_s))
    assert [stop.number for stop in actions.stops] == [has_saved]
    assert [start.number for start in actions.starts] == [2]


@pytest.mark.parametrize("mechanism", ["improved", "gavel"])
@pytest.mark.parametrize("policy", ["las", "fifo", "max-throughput"])
def test_what_cannot_be_preempted_runs_to_its_end(mechanism: str, policy: str) -> None:
    rules = Rules(policy=policy, mechanism=mechanism, min_reset_s=0.0)
    whole = job(0, steps=40 * 360.0 * 2.0, preemptible=False)
    state = submit(fleet(1, rules=rules), whole)
    state = submit(state, *(job(number, slow=0.0, weight=9.0) for number in (1, 2)))
    for _ in range(39):
        state, actions = step(state, Tick(time_s=state.next_tick_s))
        assert state.holders[0, 0] == 0
        assert len(actions.stopped) == 0
    assert state.jobs.rows["saved_steps"][0] == 0.0, "it saves nothing on the way"
    state, _ = step(state, Finish(time_s=state.time_s, numbers=(0,)))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert state.holders[0, 0] in (1, 2)


def turns_of_losers(rounds: int, *losers: int) -> tuple[list[int], np.ndarray]:
    """Rounds of each turn of two jobs on one device, and held s; losers save nothing."""
    state = submit(fleet(1), *(job(number, slow=0.0) for number in range(2)))
    turns = [0]
    for _ in range(rounds):
        state, actions = step(state, Tick(time_s=state.next_tick_s))
        turns[-1] += 1
        for stop in actions.stops:
            turns.append(0)
            if stop.number in losers:
                state, _ = step(state, Lose(time_s=state.time_s, number=stop.number))
                assert state.jobs.rows["done_steps"][stop.number] == 0.0
    return turns, state.jobs.rows["held_s"]


def test_jobs_that_lose_their_work_get_longer_turns_in_which_they_can_end() -> None:
    turns, held_s = turns_of_losers(400, 0, 1)
    assert len(turns) <= 16
    assert max(turns[-3:-1]) > 4 * max(turns[:3])
    assert 0.3 <= held_s[0] / held_s.sum() <= 0.7


def test_a_job_that_lost_its_work_gets_no_more_than_its_share() -> None:
    """One that died of a stop once had 98 of 100 s, where another should have had a third."""
    _, held_s = turns_of_losers(400, 0)
    assert held_s[1] / held_s.sum() == pytest.approx(0.5, abs=0.15)


def preemptions(state: FleetState, rounds: int) -> int:
    num_stopped = 0
    for _ in range(rounds):
        state, actions = step(state, Tick(time_s=state.next_tick_s))
        num_stopped += len(actions.stopped)
    return num_stopped


@pytest.mark.parametrize("policy", ["las", "las-agnostic", "finish-time-fairness", "makespan"])
def test_nobody_is_moved_between_types_that_are_equally_fast(policy: str) -> None:
    rules = Rules(policy=policy)
    alone = submit(fleet(2, 1, rules), job(0, fast=1.0, slow=1.0))
    assert preemptions(alone, 60) == 0
    full = submit(fleet(2, 1, rules), *(job(number, fast=1.0, slow=1.0) for number in range(3)))
    assert preemptions(full, 60) == 0


def test_a_job_stays_on_a_type_that_nobody_else_wants() -> None:
    # The first has a deficit on both types; when the other has ended it is on the faster one.
    both = submit(fleet(1, 1, Rules(policy="las-agnostic")), job(0))
    assert both.holders[:, 0].tolist() == [0, -1]
    assert preemptions(both, 60) == 0
    cheap = fleet(1, 1, Rules(policy="min-cost")).but(price_per_hour=np.array([9.0, 1.0]))
    cheap = submit(cheap, job(0, fast=1.0, slow=1.0))
    assert cheap.holders[:, 0].tolist() == [-1, 0], "but not where the other costs less"


def test_what_a_stop_costs_counts_like_a_debt() -> None:
    def first_stop(restart_s: float) -> int:
        rules = Rules(slack_rounds=0.0, stickiness_rounds=0.0, restart_s=restart_s)
        state = submit(fleet(1, rules=rules), job(0, slow=0.0), job(1, slow=0.0))
        for number in range(40):
            state, actions = step(state, Tick(time_s=state.next_tick_s))
            if len(actions.stopped):
                return number
        return -1

    assert [first_stop(rounds * 360.0) for rounds in (0.0, 4.0, 8.0)] == [0, 4, 8]


def test_first_come_first_served_neither_overtakes_nor_preempts() -> None:
    rules = Rules(policy="fifo-strict")
    state = submit(fleet(4, 4, rules), job(0, gang=3), job(1, gang=4), job(2, gang=4), job(3))
    assert state.jobs.rows["phase"].tolist() == [1, 1, 0, 0], "the last would fit"
    assert preemptions(state, 60) == 0
    state, _ = step(state, Finish(time_s=state.time_s, numbers=(0,)))
    assert state.jobs.rows["phase"].tolist() == [3, 1, 1, 0]
    assert state.jobs.rows["device_type"].tolist()[1:3] == [1, 0], (
        "who runs stays, though slower there"
    )


def test_what_a_checkpoint_saved_is_not_lost_twice() -> None:
    state = submit(fleet(1), job(0))
    state, _ = step(state, Fail(time_s=200.0, number=0, attempt=1, done_steps=300.0))
    state, _ = step(state, Fail(time_s=210.0, number=0, attempt=2))
    assert state.jobs.rows["done_steps"][0] == 300.0
    state, _ = step(state, Pause(time_s=310.0, numbers=(0, 0)))
    state, _ = step(state, Resume(time_s=320.0, numbers=(0,)))
    state, _ = step(state, Fail(time_s=330.0, number=0, attempt=4))
    assert state.jobs.rows["done_steps"][0] == 500.0, "it was saved when it was paused"


def test_the_wait_of_a_paused_job_begins_when_it_is_resumed() -> None:
    state = submit(fleet(1), job(0, slow=0.0), job(1, slow=0.0))
    state, _ = step(state, Pause(time_s=10.0, numbers=(1,)))
    state, _ = step(state, Resume(time_s=500.0, numbers=(1,)))
    assert state.jobs.rows["waiting_since_s"][state.row_of(1)] == 500.0


def test_a_job_that_leaves_a_drained_device_has_saved_its_work() -> None:
    state = submit(fleet(1), job(0, slow=0.0))
    state, actions = step(state, Drain(time_s=100.0, names=("fast0",)))
    assert [stop.reason for stop in actions.stops] == ["drained"]
    row = state.jobs.rows[state.row_of(0)]
    assert row["saved_steps"] == row["done_steps"] == 200.0


def test_a_job_leaves_a_drained_device_once_it_has_shown_that_it_saves() -> None:
    state = submit(fleet(2), job(0, slow=0.0, preemptible=None), job(1, slow=0.0, preemptible=None))
    (device,) = state.devices_of(0)
    state, actions = step(state, Drain(time_s=10.0, names=(device,)))
    assert len(actions.stopped) == 0
    state, actions = step(state, Tick(time_s=state.next_tick_s))
    assert len(actions.stopped) == 0
    rows = state.jobs.rows.copy()
    rows["preemptible"] = 1
    state = state.but(jobs=state.jobs._replace(rows=rows))
    state, actions = step(state, Tick(time_s=state.next_tick_s))
    assert (0, "drained") in [(stop.number, stop.reason) for stop in actions.stops]
    assert state.holders[state.device_names.index(device), 0] == -1
