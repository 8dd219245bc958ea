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
    def __init__(self, folder: Path):
        self.store = Store.open(folder)
        self.executor = LocalExecutor(folder / "attempts", DEVICES)
        self.daemon = Daemon(self.store, self.executor, Rules(), ("v100",), poll_s=0.05)
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
