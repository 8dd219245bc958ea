"""The daemon with its threads: what callers see, and that all of it ends."""

from __future__ import annotations

import threading

import pytest
from patience import wait_until
from service.fake_executor import FakeExecutor, fleet_devices

from hocket.fleet.rounds.state import Rules
from hocket.service.daemon import Daemon
from hocket.service.errors import NotFoundError, StaleAttemptError, UnavailableError
from hocket.service.executors.executor import AttemptName
from hocket.service.spec import JobSpec
from hocket.service.store import Store

SPEC = JobSpec(name="job", command=("python", "train.py"))


@pytest.fixture
def executor():
    return FakeExecutor(fleet_devices(v100=2))


@pytest.fixture
def daemon(tmp_path, executor):
    store = Store.open(tmp_path)
    daemon = Daemon(store, executor, Rules(round_s=60.0), ("v100",), poll_s=0.01)
    daemon.start()
    yield daemon
    daemon.close()
    store.close()


def test_a_job_runs_reports_commits_and_ends(daemon, executor, tmp_path):
    record = daemon.submit(SPEC)
    wait_until(lambda: daemon.job(1).status == "running")
    name = AttemptName(1, 1)
    token = executor.processes[name].assignment.environment["HOCKET_TOKEN"]
    assert daemon.report(name, token, 3.0).may_run
    assert daemon.commit_checkpoint(name, token, 3.0, "/c").step == 3.0
    assert [one.path for one in daemon.store.checkpoints(1)] == ["/c"]
    assert [one.jobs for one in daemon.devices()] in ([(1,), ()], [(), (1,)])
    (tmp_path / "logs" / "1" / "attempt-1.log").write_bytes(b"printed")
    assert daemon.log(1, 1).read(2, 9) == b"inted"
    executor.exit(name, 0)
    wait_until(lambda: daemon.job(record.number).status == "succeeded")
    assert [one.number for one in daemon.store.jobs(status="succeeded")] == [1]
    assert daemon.store.attempts(1)[0].outcome == "finished"
    with pytest.raises(StaleAttemptError):
        daemon.report(name, token, 4.0)
    for missing in (lambda: daemon.job(9), lambda: daemon.log(1, 2)):
        with pytest.raises(NotFoundError):
            missing()
    assert (daemon.is_running, daemon.trouble) == (True, "")


def test_many_callers_at_once_are_all_answered(daemon):
    numbers: list[int] = []

    def submit() -> None:
        for _ in range(10):
            numbers.append(daemon.submit(SPEC).number)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 81))
    assert len(daemon.store.jobs(limit=1000)) == 80


def test_waiting_for_events_ends_with_the_next_one(daemon):
    wait_until(lambda: daemon.devices())
    last = daemon.last_event()
    assert daemon.wait_for_events(last, 0.01) == last
    waiter = threading.Timer(0.05, daemon.submit, (SPEC,))
    waiter.start()
    assert daemon.wait_for_events(last, 20.0) > last
    waiter.join()
    assert daemon.store.events(last)[0].kind in ("round", "submitted")


def test_rounds_begin_by_themselves(tmp_path):
    store = Store.open(tmp_path)
    daemon = Daemon(store, FakeExecutor(fleet_devices(v100=1)), Rules(round_s=0.05), ("v100",))
    daemon.start()
    daemon.submit(SPEC)
    wait_until(lambda: daemon.state.round_number > 3)
    daemon.close()
    assert (
        sum(event.kind == "round" for event in daemon.store.events()) == daemon.state.round_number
    )
    store.close()


def test_a_closed_daemon_refuses_and_leaves_jobs_running(tmp_path, executor):
    store = Store.open(tmp_path)
    daemon = Daemon(store, executor, Rules(), ("v100",), poll_s=0.01)
    daemon.start()
    daemon.submit(SPEC)
    wait_until(executor.running)
    daemon.close()
    with pytest.raises(UnavailableError, match="ends"):
        daemon.submit(SPEC)
    assert executor.running() == [AttemptName(1, 1)]
    assert not daemon.is_running
    assert daemon.wait_for_events(daemon.last_event(), 30.0) == daemon.last_event()
    store.close()


def test_an_engine_that_breaks_is_asked_again(daemon, executor, caplog):
    def broken(call: str) -> None:
        raise ValueError("a bug")

    executor.on_call = broken
    wait_until(lambda: "a bug" in daemon.trouble)
    executor.on_call = None
    wait_until(lambda: daemon.trouble == "")
    daemon.submit(SPEC)
    wait_until(executor.running)
    assert executor.running() == [AttemptName(1, 1)]
    assert "a bug" in caplog.text
