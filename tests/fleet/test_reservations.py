"""Gangs among streams of small jobs: devices are reserved for them, and gaps are filled."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from fleet.round_fleets import fleet, job, submit

from hocket.fleet.explain import explain
from hocket.fleet.rounds import (
    Event,
    Finish,
    FleetDevice,
    FleetState,
    Job,
    Pause,
    Resume,
    Rules,
    Submit,
    Tick,
    new_state,
    step,
)
from hocket.fleet.rounds.assign import _parameters, reserve_after_s, speeds_of
from hocket.fleet.rounds.kernels import grant
from hocket.fleet.rounds.reasons import reason
from hocket.fleet.rounds.state import RUNNING, WAITING
from hocket.fleet.rounds.tables import NO_PAIRS, new_round

ROUND_S = 60.0
WIDE = 1000


@dataclass
class Stream:
    """Four devices, jobs of one device that come faster than they end, and one of all devices."""

    state: FleetState
    arrivals: list[tuple[float, Job]]
    wide: int = 0
    """Number of the gang."""
    came_s: float = 0.0

    @classmethod
    def drawn(cls, seed: int, policy: str = "las", **more: object) -> Stream:
        source = random.Random(seed)
        rules = Rules(policy=policy, round_s=ROUND_S)
        devices = tuple(FleetDevice(name=f"d{i}", device_type="v100", server="s") for i in range(4))
        arrivals, time_s, wide_s = [], 0.0, source.uniform(600.0, 1200.0)
        for number in range(400):
            time_s += source.expovariate(1.3 * 4.0 / 300.0)
            steps = source.uniform(60.0, 540.0)
            values = {"preemptible": False, "total_steps": steps, **more}
            arrivals.append((time_s, Job(number=number, name="", steps_per_s=(1.0,), **values)))  # type: ignore[arg-type]
        gang = Job(number=0, name="", steps_per_s=(1.0,), total_steps=1e5, gang=4, preemptible=None)
        arrivals.append((wide_s, gang))
        arrivals.sort(key=lambda pair: pair[0])
        # Numbers rise with arrivals; the gang's is looked up.
        renamed = [(at_s, replace(one, number=n)) for n, (at_s, one) in enumerate(arrivals)]
        wide = next(one.number for _, one in renamed if one.gang == 4)
        return cls(new_state(("v100",), devices, rules), renamed, wide, wide_s)

    def play(self, until_s: float) -> Iterator[FleetState]:
        """States after every event, until the gang has started or time is over."""
        while self.state.time_s < until_s:
            self.state, _ = step(self.state, self._next_event())
            yield self.state
            if self.state.devices_of(self.wide):
                return

    def _next_event(self) -> Event:
        rows = self.state.jobs.rows
        running = rows[rows["phase"] == RUNNING]
        ends_s = running["counted_s"] + (running["total_steps"] - running["done_steps"])
        end_s = float(ends_s.min(initial=math.inf))
        arrival_s = self.arrivals[0][0] if self.arrivals else math.inf
        time_s = min(end_s, arrival_s, self.state.next_tick_s)
        if time_s == end_s:
            number = int(running["number"][ends_s.argmin()])
            return Finish(time_s=max(end_s, self.state.time_s), numbers=(number,))
        if time_s == arrival_s:
            arrival_s, one = self.arrivals.pop(0)
            return Submit(time_s=arrival_s, jobs=(one,))
        return Tick(time_s=time_s)


def reserved_s(state: FleetState, number: int) -> float:
    rows = state.jobs.rows
    at = int(np.searchsorted(rows["number"], number))
    is_there = at < len(rows) and rows["number"][at] == number
    return float(rows["reserved_s"][at]) if is_there else 0.0


@pytest.mark.parametrize("policy", ["las", "finish-time-fairness", "fifo"])
@pytest.mark.parametrize("seed", range(20))
def test_a_gang_starts_within_its_reserved_time(policy: str, seed: int) -> None:
    stream = Stream.drawn(seed, policy)
    wide, came_s, told_s, state = stream.wide, stream.came_s, 0.0, stream.state
    for state in stream.play(8000.0):
        told_s = told_s or reserved_s(state, wide)
        if state.devices_of(wide):
            break
    assert len(state.devices_of(wide)) == 4
    assert told_s > 0.0
    assert state.time_s <= told_s + 1e-6
    assert state.time_s <= came_s + 600.0 + 540.0, "after the wait, nobody long starts before it"


def busy(*left_s: float, gang: int = 4, rules: Rules | None = None, **more: object) -> FleetState:
    """Bound jobs of so many seconds on as many devices, and a gang that has waited for long."""
    rules = rules or Rules(round_s=ROUND_S, reserve_after_s=100.0)
    held = [job(n, fast=1.0, slow=0.0, steps=s, preemptible=False) for n, s in enumerate(left_s)]
    state = submit(fleet(len(left_s), rules=rules), *held)
    state = submit(state, job(WIDE, fast=1.0, slow=0.0, steps=1e5, gang=gang, **more))
    for _ in range(2):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    return state


def test_the_start_that_is_told_is_the_end_of_the_last_job_that_must_end() -> None:
    state = busy(500.0, 1000.0, 700.0, 2000.0, gang=3)
    assert reserved_s(state, WIDE) == pytest.approx(1000.0)
    assert "its start is predicted in 880 s" in reason(state, WIDE)


FILLERS = [
    # bound?, seconds, time limit, does it start in the gap of 500 s?
    (False, 400.0, math.inf, True),
    (False, 600.0, math.inf, False),
    (False, math.inf, math.inf, False),
    (False, math.inf, 400.0, True),
    (False, math.inf, 600.0, False),
    (True, math.inf, math.inf, True),
]


@pytest.mark.parametrize(("preemptible", "steps", "limit_s", "starts"), FILLERS)
def test_only_what_ends_before_the_reservation_or_can_be_stopped_fills_the_gap(
    preemptible: bool, steps: float, limit_s: float, starts: bool
) -> None:
    state = busy(500.0, 1000.0, 1000.0, 1000.0)
    state, _ = step(state, Finish(time_s=500.0, numbers=(0,)))
    filler = job(
        WIDE + 1, fast=1.0, slow=0.0, steps=steps, preemptible=preemptible, time_limit_s=limit_s
    )
    state = submit(state, filler)
    assert bool(state.devices_of(WIDE + 1)) == starts
    state, _ = step(state, Tick(time_s=max(state.next_tick_s, state.time_s)))
    assert bool(state.devices_of(WIDE + 1)) == starts
    ends = [1, 2, 3] + ([WIDE + 1] if starts and not preemptible else [])
    state, _ = step(state, Finish(time_s=1000.0, numbers=tuple(ends)))
    state, _ = step(state, Tick(time_s=max(state.next_tick_s, state.time_s)))
    assert len(state.devices_of(WIDE)) == 4


def test_devices_are_kept_where_nobody_knows_when_the_others_end() -> None:
    state = busy(500.0, math.inf, math.inf, math.inf)
    assert reserved_s(state, WIDE) == math.inf
    assert "a time limit would tell when" in reason(state, WIDE)
    state, _ = step(state, Finish(time_s=500.0, numbers=(0,)))
    short = job(WIDE + 1, fast=1.0, slow=0.0, steps=10.0, preemptible=False)
    assert submit(state, short).devices_of(WIDE + 1) == ()
    can_stop = replace(short, preemptible=True)
    assert submit(state, can_stop).devices_of(WIDE + 1) == ("fast0",)


def test_a_gang_of_one_server_has_a_server_reserved() -> None:
    """Two servers of four; enough devices become free, but never on one server by chance."""
    rules = Rules(round_s=ROUND_S, reserve_after_s=100.0)
    ends_s = (300.0, 900.0, 800.0, 850.0, 1500.0, 1600.0, 200.0, 1700.0)
    held = [job(n, fast=1.0, slow=0.0, steps=s, preemptible=False) for n, s in enumerate(ends_s)]
    state = submit(fleet(8, rules=rules), *held)
    gang = job(WIDE, fast=1.0, slow=0.0, gang=4, spread_steps_per_s=(0.0, 0.0))
    state = submit(state, gang)
    for _ in range(3):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert reserved_s(state, WIDE) == pytest.approx(900.0)
    state, _ = step(state, Finish(time_s=200.0, numbers=(6,)))
    state, _ = step(state, Finish(time_s=300.0, numbers=(0,)))
    longer = [job(WIDE + n, fast=1.0, slow=0.0, steps=5e3, preemptible=False) for n in (1, 2)]
    state = submit(state, *longer)
    servers = {state.devices_of(WIDE + n) for n in (1, 2)}
    assert servers == {(), ("fast6",)}, "the server of the gang stays free"
    for at_s, number in ((800.0, 2), (850.0, 3), (900.0, 1)):
        state, _ = step(state, Finish(time_s=at_s, numbers=(number,)))
    assert state.devices_of(WIDE) == ("fast0", "fast1", "fast2", "fast3")


def test_fifo_fills_gaps_and_delays_nobody() -> None:
    rules = Rules(policy="fifo", round_s=ROUND_S)
    lengths = {0: (1, 1000.0), 1: (1, 400.0), 2: (4, 100.0), 3: (2, 900.0), 4: (2, 1000.0)}
    jobs = [
        job(n, fast=1.0, slow=0.0, steps=steps, gang=gang) for n, (gang, steps) in lengths.items()
    ]
    state = submit(fleet(4, rules=rules), *jobs)
    assert state.jobs.rows["phase"].tolist() == [1, 1, 0, 1, 0]
    assert reserved_s(state, 2) == pytest.approx(1000.0)
    assert reserved_s(state, 4) == pytest.approx(1100.0), "from 400 on it would delay job 2"


@pytest.mark.parametrize("seed", range(5))
def test_fifo_starts_nobody_later_than_it_was_told_at_first(seed: int) -> None:
    stream = Stream.drawn(seed, "fifo", preemptible=True)
    told: dict[int, float] = {}
    for state in stream.play(6000.0):
        rows = state.jobs.rows
        for number, at_s, phase in zip(
            rows["number"].tolist(), rows["reserved_s"], rows["phase"], strict=True
        ):
            if at_s > 0.0:
                told.setdefault(number, at_s)
            started = phase == RUNNING and number in told
            if started:
                assert rows["started_s"][rows["number"] == number] <= told.pop(number) + 1e-6
        late = [n for n, at_s in told.items() if at_s < state.time_s - 1e-6]
        waiting = set(rows["number"][rows["phase"] == WAITING].tolist())
        assert not waiting & set(late)


def test_a_gap_of_exactly_its_length_is_free() -> None:
    devices = tuple(FleetDevice(name=str(at), device_type="a") for at in range(9))
    state = new_state(("a",), devices, Rules())
    parameters, speeds = _parameters(state.rules, False, False, False), speeds_of(state)
    drawn = new_round(10.0, state.jobs, NO_PAIRS, parameters, speeds, state.layout, state.holders)
    grant.begin.function(drawn, 0, 2)
    for start_s, end_s in ((50.0, 90.0), (30.0, 50.0)):
        grant.add.function(drawn, 0, -2, start_s, end_s)
    found = [grant.earliest_s.function(drawn, 0, 2, length_s) for length_s in (20.0, 20.5)]
    assert found == [10.0, 90.0]
    assert grant.earliest_s.function(drawn, 0, 3, 1.0) == math.inf


@pytest.mark.parametrize(
    ("lengths_s", "asked_s", "after_s"),
    [
        ((900.0, 100.0, 500.0), None, 500.0),
        ((10.0, 20.0, 30.0), None, 2.0 * ROUND_S),
        ((math.inf,) * 3, None, 2.0 * ROUND_S),
        ((900.0, 100.0, 500.0), 7.0, 7.0),
    ],
)
def test_the_wait_is_two_rounds_or_the_median_job(
    lengths_s: tuple[float, ...], asked_s: float | None, after_s: float
) -> None:
    rules = Rules(round_s=ROUND_S, reserve_after_s=asked_s)
    jobs = [job(n, fast=1.0, slow=0.0, steps=s, preemptible=None) for n, s in enumerate(lengths_s)]
    state = submit(fleet(4, rules=rules), *jobs)
    assert reserve_after_s(state, state.jobs) == after_s


def test_a_gang_that_was_paused_has_to_wait_anew() -> None:
    state = busy(500.0, 1000.0, 1000.0, 1000.0)
    assert reserved_s(state, WIDE) > 0.0
    state, _ = step(state, Pause(time_s=130.0, numbers=(WIDE,)))
    assert reserved_s(state, WIDE) == 0.0
    state, _ = step(state, Resume(time_s=140.0, numbers=(WIDE,)))
    state, _ = step(state, Tick(time_s=state.next_tick_s))
    assert reserved_s(state, WIDE) == 0.0


def test_who_is_reserved_stays_so_when_all_others_can_be_stopped() -> None:
    state = busy(500.0, 1000.0)
    rows = state.jobs.rows.copy()
    rows["preemptible"] = 1
    movable = state.jobs._replace(rows=rows)
    assert reserve_after_s(state, movable) == 100.0
    rows["reserved_s"] = 0.0
    assert reserve_after_s(state, movable) == math.inf


def test_a_job_that_has_devices_reserved_is_not_told_when_they_will_be() -> None:
    state = busy(500.0, 1000.0, rules=Rules(round_s=ROUND_S, policy="fifo", reserve_after_s=5000.0))
    assert reserved_s(state, WIDE) > 0.0
    assert "are reserved for it after" not in explain(state, WIDE).sentence


def test_nobody_knows_the_end_of_a_job_that_runs_far_beyond_its_claim() -> None:
    rules = Rules(round_s=ROUND_S, reserve_after_s=100.0)
    state = submit(
        fleet(2, rules=rules),
        job(0, fast=1.0, slow=0.0, steps=100.0, preemptible=False),
        job(WIDE, fast=1.0, slow=0.0, steps=1e5, gang=2),
    )
    starts_s = []
    for _ in range(6):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        starts_s.append(reserved_s(state, WIDE))
    assert 100.0 < starts_s[2] < 240.0, "late, but believed still"
    assert starts_s[5] == math.inf


@pytest.mark.parametrize(
    ("rules", "reserved_after_rounds"),
    [
        # By the wait of 20 s, for which no server can be cleared; by patience.
        (Rules(round_s=10.0, slack_rounds=0.0, reserve_after_s=20.0), 4),
        (Rules(round_s=10.0, patience_rounds=20.0), 100),
    ],
)
def test_no_device_idles_for_a_gang_that_no_server_can_be_cleared_for(
    rules: Rules, reserved_after_rounds: int
) -> None:
    devices = tuple(
        FleetDevice(name=f"d{i}", device_type="v", server=f"s{i // 2}") for i in range(4)
    )
    state = new_state(("v",), devices, rules)
    # One job that must not be stopped on each server, beside one that may be.
    singles = [
        Job(number=n, name="", steps_per_s=(1.0,), total_steps=1e6, preemptible=n % 2 == 1)
        for n in range(4)
    ]
    state = submit(state, *singles)
    gang = {"gang": 2, "steps_per_s": (2.0,), "spread_steps_per_s": (0.0,)}
    state = submit(state, Job(number=WIDE, name="", total_steps=1000.0, **gang))  # type: ignore[arg-type]
    for _ in range(reserved_after_rounds):
        state, _ = step(state, Tick(time_s=state.next_tick_s))
        waits = (state.jobs.rows["phase"][:4] == WAITING).any()
        assert not (waits and (state.holders[:, 0] < 0).any()), "a device idles"
    assert reserved_s(state, WIDE) == pytest.approx(1e6), "the end of the jobs that stay"
