"""A worker of an old attempt that comes back, against the real service: nothing of it counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from patience import wait_until
from service.rest_server import Served
from service.rest_service import is_problem, serving

from hocket.service.daemon import commands
from hocket.service.errors import StaleAttemptError
from hocket.service.executors.executor import AttemptName

FIRST, SECOND = AttemptName(1, 1), AttemptName(1, 2)
WORKER = """
import time
import hocket.service.lease as leases
def save(step):
    return f"/first/{step}"
try:
    for step in leases.lease(save=save, report_every_s=0.02, save_every_s=0.0).steps(0, 10**6):
        time.sleep(0.01)
except leases.StaleLeaseError:
    print("stale", flush=True)
    raise SystemExit(9)
"""


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path / "fleet") as service:
        made = Served(service)
        yield made
        made.close()


def environment_of(served, name: AttemptName) -> dict[str, str]:
    """What a process of an attempt has, with the address of the server."""
    given = served.service.executor.processes[name].assignment.environment
    address = {"HOCKET_URL": f"http://127.0.0.1:{served.port}", "HOCKET_ENDPOINT": ""}
    return {**os.environ, **given, **address}


def post(served, name: AttemptName, token: str, route: str, **body):
    path = f"/v1/jobs/{name.job}/attempts/{name.attempt}/{route}"
    headers = {"authorization": f"Bearer {token}"}
    return served.service.bare().post(path, json=body, headers=headers)


def test_a_worker_that_revives_can_neither_report_nor_commit(served, tmp_path):
    """It is halted, its attempt is given up, the next one works; then it goes on where it was."""
    service, daemon = served.service, served.service.daemon
    service.submit(total_steps=10**6)
    service.wait_for(1, "running")
    old = environment_of(served, FIRST)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], env=old, stdout=subprocess.PIPE, cwd=tmp_path
    )
    try:
        wait_until(lambda: len(daemon.store.checkpoints(1)) > 2)
        worker.send_signal(signal.SIGSTOP)
        service.executor.lose(FIRST)
        wait_until(lambda: SECOND in service.executor.running() and daemon.job(1).attempt == 2)
        new = environment_of(served, SECOND)
        assert new["HOCKET_CHECKPOINT"] == daemon.store.checkpoints(1)[-1].path
        told = post(served, SECOND, new["HOCKET_TOKEN"], "report", done_steps=7)
        assert told.json()["may_run"] is True
        committed = daemon.store.checkpoints(1)
        worker.send_signal(signal.SIGCONT)
        output, _ = worker.communicate(timeout=60)
    finally:
        worker.kill()
        worker.wait()
    assert (worker.returncode, output) == (9, b"stale\n")
    assert daemon.store.checkpoints(1) == committed
    assert {record.attempt for record in committed} == {1}
    assert (daemon.job(1).done_steps, daemon.job(1).attempt) == (7.0, 2)

    # Nor by lies: the number of the newest attempt, no token, or a job that is done.
    for name in (FIRST, SECOND):
        for token in (old["HOCKET_TOKEN"], "guessed"):
            last = post(served, name, token, "report", done_steps=9, is_finished=True)
            assert is_problem(last, 409)["code"] == "stale-attempt"
            is_problem(post(served, name, token, "checkpoints", step=9, path="/lie"), 409)
    is_problem(post(served, FIRST, new["HOCKET_TOKEN"], "checkpoints", step=9, path="/lie"), 409)
    assert daemon.store.checkpoints(1) == committed
    assert (daemon.job(1).status, daemon.job(1).done_steps) == ("running", 7.0)
    saved = post(served, SECOND, new["HOCKET_TOKEN"], "checkpoints", step=8, path="/second/8")
    assert saved.status_code == 201


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("ends", ["lost", "cancelled", "finished", "paused"])
def test_an_attempt_that_is_over_stays_so(rig, engine, ends, restarts):
    """However it ended, whatever became of the job, and also before the next daemon."""
    rig.submit(total_steps=100)
    rig.look(2)
    token = rig.token(FIRST)
    rig.checkpoint(FIRST, 10.0)
    if ends == "lost":
        engine.lose(FIRST)
    elif ends == "finished":
        engine.exit(FIRST, 0)
    else:
        rig.change("cancel" if ends == "cancelled" else "pause", 1)
    rig.look(3)
    assert rig.service_state.attempt(FIRST) is None
    if restarts:
        rig = rig.again()
        rig.look(2)
    before = rig.job(1)
    for name in (FIRST, SECOND):
        claim = {"name": name, "token": token, "done_steps": 90.0, "is_finished": True}
        with pytest.raises(StaleAttemptError):
            rig.ask(commands.report, **claim)
        with pytest.raises(StaleAttemptError):
            rig.checkpoint(name, 90.0, token=token)
    assert rig.job(1) == before
    assert [record.step for record in rig.store.checkpoints(1)] == [10.0]
