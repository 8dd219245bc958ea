"""Elastic jobs on a fleet that runs: another number of devices brings the plan for that number."""

import sys

import pytest
from patience import wait_until
from service.daemon_rig import Rig, Time
from service.fake_executor import FakeExecutor, fleet_devices
from service.local_attempts import DEVICES, kill_everything

from hocket.base.errors import UsageError
from hocket.fleet.rounds.state import Rules
from hocket.service.daemon import Daemon
from hocket.service.executors.executor import AttemptName
from hocket.service.executors.local import LocalExecutor
from hocket.service.server_config import ServerConfig
from hocket.service.spec import JobSpec
from hocket.service.store import Store

GANGS = (1, 2, 4)
ELASTIC = {
    "gangs": GANGS, "total_steps": 1e6,
    "throughputs": {"1xv100": 1.0, "2xv100": 1.9, "4xv100": 3.5},
    "plans": {f"{gang}xv100": f"/plans/{gang}.json" for gang in GANGS},
}  # fmt: skip


def test_a_job_shrinks_for_others_and_grows_again_with_the_plan_for_its_devices(tmp_path):
    engine = FakeExecutor(fleet_devices(v100=4))
    rig = Rig(tmp_path, engine, Time())
    rig.look()

    def told(job, attempt):
        assignment = engine.processes[AttemptName(job, attempt)].assignment
        return len(assignment.devices), assignment.environment["HOCKET_PLAN"]

    rig.submit(**ELASTIC)
    rig.look()
    assert told(1, 1) == (4, "/plans/4.json")
    rig.submit(gang=2, total_steps=1e6)
    rig.later(60)
    rig.look(3)
    assert told(1, 2) == (2, "/plans/2.json")
    assert len(rig.job(2).devices) == 2
    second = next(name for name in engine.running() if name.job == 2)
    engine.exit(second, 0)
    rig.look(2)
    rig.later(60)
    rig.look(3)
    assert told(1, 3) == (4, "/plans/4.json")
    rig.later(60)
    rig.look(2)
    assert rig.job(1).attempt == 3, "nothing changes where nothing came or went"
    assert rig.again().job(1).spec.gangs == GANGS
    rig.lives[-1].die()


@pytest.mark.parametrize("who", [{"owner": "ann"}, {"team": "vision"}])
def test_a_job_takes_no_more_devices_than_its_quota_allows(tmp_path, who):
    limits = {"max_devices": 2}
    config = ServerConfig.model_validate({"users": {"ann": limits}, "teams": {"vision": limits}})
    rig = Rig(tmp_path, FakeExecutor(fleet_devices(v100=4)), Time(), config=config)
    rig.look()
    rig.submit(**ELASTIC, **who)
    rig.look(2)
    rig.later(60)
    rig.look(2)
    assert (rig.status(1), len(rig.job(1).devices)) == ("running", 2)
    rig.die()


def test_work_that_a_new_size_loses_is_lost_and_the_size_stays_then(tmp_path):
    engine = FakeExecutor(fleet_devices(v100=4))
    rig = Rig(tmp_path, engine, Time())
    rig.look()
    rig.submit(**ELASTIC)
    rig.look()
    rig.later(60)
    rig.report(AttemptName(1, 1), 200.0)
    rig.submit(gang=2, total_steps=1e6)
    rig.later(60)
    # The process dies of the signal, with no checkpoint.
    rig.look(3)
    row = rig.service_state.state.jobs.rows[0]
    assert (row["gang"], row["losses"], row["done_steps"]) == (2, 1, 0.0)
    engine.exit(next(name for name in engine.running() if name.job == 2), 0)
    rig.look(2)
    rig.later(60)
    rig.look(3)
    assert rig.job(1).attempt == 2, "it would lose its work once more"
    rig.die()


def test_two_elastic_jobs_share_what_there_is(tmp_path):
    engine = FakeExecutor(fleet_devices(v100=4))
    rig = Rig(tmp_path, engine, Time())
    rig.look()
    for _ in range(2):
        rig.submit(**ELASTIC)
    rig.look()
    rig.later(60)
    rig.look(3)
    assert [len(rig.job(number).devices) for number in (1, 2)] == [2, 2]
    rig.die()


def test_a_job_that_comes_before_the_devices_waits_for_as_many_as_it_can_use(tmp_path):
    engine = FakeExecutor(fleet_devices(v100=2))
    rig = Rig(tmp_path, engine, Time())
    rig.submit(gangs=(1, 2), throughputs={"2xv100": 1.0})
    rig.look()
    rig.later(60)
    rig.look(2)
    assert len(rig.job(1).devices) == 2
    rig.die()


def test_a_job_of_which_no_size_has_devices_is_refused(tmp_path):
    rig = Rig(tmp_path, FakeExecutor(fleet_devices(v100=1)), Time())
    with pytest.raises(UsageError, match="unknown device type '1xt4'"):
        rig.submit(gangs=(1,), throughputs={"1xt4": 1.0})
    rig.die()


TELLS = """
import os, pathlib, signal, sys, time
place, attempt = pathlib.Path(sys.argv[1]), os.environ["HOCKET_ATTEMPT"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
(place / f"seen-{attempt}-{os.environ.get('RANK', '0')}").write_text(os.environ["HOCKET_PLAN"])
while not (place / "end").exists():
    time.sleep(0.02)
"""
WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


def test_real_processes_move_between_one_and_two_devices(tmp_path):
    store = Store.open(tmp_path / "state")
    executor = LocalExecutor(tmp_path / "state" / "attempts", DEVICES)
    daemon = Daemon(store, executor, Rules(round_s=0.3), ("v100",), poll_s=0.05)
    daemon.start()

    def seen(attempt):
        files = sorted(tmp_path.glob(f"seen-{attempt}-*"))
        return [file.read_text() for file in files]

    try:
        first = JobSpec(
            name="elastic", command=(sys.executable, "-S", "-c", TELLS, str(tmp_path)),
            processes="per-device", preemptible=True, gangs=(1, 2), total_steps=1e6,
            throughputs={"1xv100": 1.0, "2xv100": 1.9}, plans={"1xv100": "one", "2xv100": "two"},
        )  # fmt: skip
        wait_until(lambda: len(daemon.devices()) == 2, "devices are there")
        number = daemon.submit(first).number
        wait_until(lambda: seen(1) == ["two", "two"], "it began with both devices")
        guest = JobSpec(
            name="guest", command=(sys.executable, "-S", "-c", WAITS, str(tmp_path / "go")),
            total_steps=1e6,
        )  # fmt: skip
        daemon.submit(guest)
        wait_until(lambda: seen(2) == ["one"], "it made room")
        (tmp_path / "go").touch()
        wait_until(lambda: seen(3) == ["two", "two"], "it grew again")
        (tmp_path / "end").touch()
        wait_until(lambda: daemon.job(number).ended_s, "it ended")
        assert daemon.job(number).status == "succeeded"
    finally:
        daemon.close()
        executor.close()
        store.close()
        kill_everything(tmp_path / "state")
