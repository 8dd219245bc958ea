"""The real daemon on local processes: kills and a restart under way, and every job ends well."""

import os
import signal
import sys
from pathlib import Path

import pytest
from patience import wait_until
from service.local_attempts import DEVICES, kill_everything

from hocket.fleet.rounds.state import Rules
from hocket.service.daemon import Daemon
from hocket.service.executors.attempt_folder import BEGUN, read_json
from hocket.service.executors.local import LocalExecutor
from hocket.service.spec import JobSpec
from hocket.service.store import Store

WORKS = """
import fcntl, os, sys, time
held = [open(f"{sys.argv[1]}/{name}", "a") for name in os.environ["HOCKET_DEVICES"].split(",")]
for file in held:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        open(f"{sys.argv[1]}/double", "a").write(file.name)
time.sleep(0.7)
"""


class Fleet:
    def __init__(self, folder: Path, rules: Rules | None = None):
        self.store = Store.open(folder)
        self.executor = LocalExecutor(folder / "attempts", DEVICES)
        self.daemon = Daemon(self.store, self.executor, rules or Rules(), ("v100",), poll_s=0.05)
        self.daemon.start()

    def close(self):
        self.daemon.close()
        self.executor.close()
        self.store.close()


@pytest.mark.parametrize("who", ["supervisor", "daemon"])
def test_every_job_ends_well_though_somebody_is_killed(tmp_path, who):
    state = tmp_path / "state"
    spec = JobSpec(
        name="works",
        command=(sys.executable, "-S", "-c", WORKS, str(tmp_path)),
        total_steps=10,
    )
    fleet = Fleet(state)
    try:
        numbers = [fleet.daemon.submit(spec).number for _ in range(4)]
        begun = wait_until(lambda: read_json(state / "attempts" / "1-1" / BEGUN))
        if who == "supervisor":
            os.kill(begun["pid"], signal.SIGKILL)
        else:
            fleet.close()
            fleet = Fleet(state)
        wait_until(lambda: all(fleet.daemon.job(one).ended_s for one in numbers), "all jobs ended")
        jobs = [fleet.daemon.job(one) for one in numbers]
    finally:
        fleet.close()
        kill_everything(state)
    assert [job.status for job in jobs] == ["succeeded"] * 4
    assert jobs[0].attempt == (2 if who == "supervisor" else 1)
    assert not (tmp_path / "double").exists()


def test_a_gang_starts_though_small_jobs_keep_coming(tmp_path):
    sleeps = (sys.executable, "-S", "-c", "import time; time.sleep(0.4)")
    small = JobSpec(name="small", command=sleeps, time_limit_s=30.0)
    fleet = Fleet(tmp_path / "state", Rules(round_s=0.2, reserve_after_s=0.5))
    daemon = fleet.daemon
    try:
        for _ in range(4):
            daemon.submit(small)
        wide = daemon.submit(JobSpec(name="wide", command=sleeps, gang=2)).number

        def has_started() -> bool:
            if sum(job.status == "queued" for job in daemon.service_state.jobs.values()) < 4:
                daemon.submit(small)
            return daemon.job(wide).started_s is not None

        wait_until(has_started)
        overtook = [
            job for job in daemon.store.jobs(wide, 1000)
            if job.started_s is not None and job.started_s < daemon.job(wide).started_s
        ]  # fmt: skip
        lines = (tmp_path / "state" / "decisions.log").read_text()
        assert f"job {wide} has 2 devices reserved: starts in " in lines
        assert len(overtook) <= 10, "none with a limit of 30 s fits before the reservation"
    finally:
        for number in list(daemon.service_state.jobs):
            daemon.change("cancel", number)
        wait_until(lambda: not daemon.service_state.attempts)
        fleet.close()
        kill_everything(tmp_path / "state")
