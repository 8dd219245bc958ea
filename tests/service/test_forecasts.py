"""Questions about the future: a process of their own gives the same answers, and few may wait."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from processes.groups import spec

from hocket.base.errors import UsageError
from hocket.fleet.explain import explain
from hocket.fleet.forecast import at_moment, forecast
from hocket.fleet.rounds import FleetDevice, FleetState, Job, Rules, new_state, step
from hocket.fleet.rounds.events import Submit
from hocket.fleet.what_if import what_if
from hocket.processes.worker_group import WorkerGroup
from hocket.service.errors import BusyError, UnavailableError
from hocket.service.forecasts import process
from hocket.service.forecasts.forecaster import MAX_ASKED, FleetForecaster
from hocket.service.forecasts.process import ForecastProcess
from hocket.service.page.router import Shared


def fleet(num_jobs: int = 6) -> FleetState:
    devices = tuple(FleetDevice(name=f"v100-{at}", device_type="v100") for at in range(2))
    jobs = tuple(
        Job(number=at + 1, name=f"job {at}", steps_per_s=(2.0,), total_steps=1000.0 * (at + 1))
        for at in range(num_jobs)
    )
    state = new_state(("v100",), devices, Rules(), time_s=1e9)
    return step(state, Submit(time_s=1e9, jobs=jobs))[0]


@pytest.fixture(scope="module")
def beside():
    forecaster = ForecastProcess()
    yield forecaster
    forecaster.close()


def assert_same_forecast(found, expected) -> None:
    for name in ("numbers", "start_s", "end_s", "submitted_s", "busy_device_s", "up_device_s"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.to_data() == expected.to_data()


@pytest.mark.parametrize("where", ["here", "beside"])
def test_answers_are_those_of_the_fleet_itself(where, request):
    forecaster = FleetForecaster() if where == "here" else request.getfixturevalue("beside")
    state, now_s = fleet(), 1e9 + 7.0
    then = at_moment(state, now_s)
    for number in (1, 6):
        assert forecaster.explain(state, now_s, number) == explain(then, number)
    assert_same_forecast(
        forecaster.forecast(state, now_s, "fifo", {}), forecast(then, policy="fifo")
    )
    found, expected = (
        forecaster.what_if(state, now_s, None, {"v100": 3}),
        what_if(then, num_devices={"v100": 3}),
    )
    assert_same_forecast(found.now, expected.now)
    assert_same_forecast(found.then, expected.then)
    assert found.average_completion_s == expected.average_completion_s
    assert forecaster.starts(state, now_s, [5, 6]).start_of(5) is not None
    with pytest.raises(UsageError, match="unknown policy"):
        forecaster.forecast(state, now_s, "fiffo", {})
    with pytest.raises(UsageError, match="there is no job 9"):
        forecaster.explain(state, now_s, 9)


def test_the_process_ends_when_nobody_can_ask_it_any_more(beside):
    beside.explain(fleet(), 1e9, 6)
    member = beside._group._workers[0]
    os.close(member.writer.descriptor)
    member.writer.descriptor = os.open(os.devnull, os.O_WRONLY)
    assert member.process.wait(120) == 0
    beside._let_go()


def test_a_process_that_was_killed_is_started_again(beside):
    state = fleet()
    before = beside.explain(state, 1e9, 6)
    os.kill(beside._group.process_ids[0], signal.SIGKILL)
    with pytest.raises(UnavailableError):
        beside.explain(state, 1e9, 6)
    assert beside.explain(state, 1e9, 6) == before


def test_a_process_that_hangs_is_given_up(beside):
    state = fleet()
    beside.explain(state, 1e9, 6)
    child = beside._group._workers[0].process
    child.send_signal(signal.SIGSTOP)
    beside._patience_s = 0.3
    try:
        with pytest.raises(UnavailableError, match="in time"):
            beside.explain(state, 1e9, 6)
    finally:
        beside._patience_s = 60.0
    assert child.returncode == -signal.SIGKILL, "it does not stay, nor as a zombie"


def test_a_process_that_is_started_while_the_service_ends_does_not_stay(monkeypatch):
    forecaster, started = ForecastProcess(), []
    closing = threading.Thread(target=forecaster.close)

    def slowly():
        closing.start()
        closing.join(0.2)
        # One that never answers: the end of the service must not depend on who is faster.
        started.append(WorkerGroup([spec("sleep")]).__enter__())
        return started[-1]

    monkeypatch.setattr(process, "_started", slowly)
    try:
        with pytest.raises(UnavailableError):
            forecaster.explain(fleet(), 1e9, 6)
        closing.join(20)
        assert not closing.is_alive()
        assert started[0].process_ids == []
    finally:
        started[0].close()
    with pytest.raises(UnavailableError, match="the service ends"):
        forecaster.explain(fleet(), 1e9, 6)


def test_whoever_comes_when_some_wait_is_refused_at_once():
    begun, may_end = threading.Event(), threading.Event()
    most = [0, 0]

    def slow(question, state, time_s, asked):
        most[0] += 1
        most[1] = max(most)
        begun.set()
        assert may_end.wait(120)
        most[0] -= 1
        return explain(state, asked["number"])

    forecaster, state = FleetForecaster(slow), fleet()
    threads = [
        threading.Thread(target=forecaster.explain, args=(state, 1e9, 6)) for _ in range(MAX_ASKED)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(120)
    while forecaster._places._value:
        time.sleep(0.01)
    start_s = time.monotonic()
    with pytest.raises(BusyError):
        forecaster.explain(state, 1e9, 6)
    assert time.monotonic() - start_s < 60.0
    assert forecaster.explain(state, 1e9, 1).sentence, (
        "what needs no forecast is answered all the same"
    )
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert most[1] == 1, "one at a time"
    assert forecaster.explain(state, 1e9, 6).number == 6


def test_what_is_shared_was_begun_after_it_was_asked_for():
    """Sixteen ask at once: few are made, and nobody sees what was before his own change."""
    changes = [0]
    num_made = [0]
    running = threading.Lock()

    def make() -> int:
        assert running.acquire(blocking=False), "one is made at a time"
        num_made[0] += 1
        seen = changes[0]
        time.sleep(0.02)
        running.release()
        return seen

    shared = Shared(make)
    barrier = threading.Barrier(16)
    stale: list[tuple[int, int]] = []

    def ask() -> None:
        barrier.wait(120)
        for _ in range(5):
            changes[0] += 1
            mine = changes[0]
            if (seen := shared.get()) < mine:
                stale.append((mine, seen))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not stale
    assert num_made[0] <= 20, "80 asked"
