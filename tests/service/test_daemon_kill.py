"""Real daemons with real jobs, killed by SIGKILL at random moments."""

from __future__ import annotations

import fcntl
import subprocess
import sys

import pytest
from service.kill_trials import JOB, Findings, check_log, run_trials
from service.killable_daemon import RULES


@pytest.mark.slow
def test_killed_daemons_lose_no_job_and_run_none_twice(tmp_path):
    findings = run_trials(tmp_path, trials=2)
    assert findings.accepted
    assert findings.lost == []
    assert findings.overlaps == []
    assert findings.begun_twice == []
    assert findings.not_succeeded == []
    assert findings.failures == 0
    # At most a round of work; daemons do not take jobs along.
    assert max(findings.lost_work_s, default=0.0) <= RULES.round_s
    # The first daemon compiled whatever had to be.
    assert max(findings.start_cpu_s) < 5.0


def test_the_checker_sees_devices_given_twice_jobs_run_twice_and_lost_work(tmp_path):
    def run_job() -> None:
        names = {"HOCKET_JOB": "1", "HOCKET_ATTEMPT": "2", "HOCKET_DEVICES": "a,b"}
        command = [sys.executable, "-I", "-S", "-c", JOB, str(tmp_path), "0.1"]
        subprocess.run(command, env=names, check=True)

    (tmp_path / "did-1").write_bytes(b"...")
    with (tmp_path / "b").open("w") as device:
        fcntl.flock(device, fcntl.LOCK_EX)
        run_job()
    run_job()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["begin 1-2", "overlap 1-2 b", "lost 1-2 3", "begin 1-2", "lost 1-2 0"]
    findings = Findings()
    check_log(findings, lines)
    assert findings.overlaps == ["overlap 1-2 b"]
    assert (findings.num_attempts, findings.begun_twice) == (1, ["begin 1-2"])
    assert findings.lost_work_s == [pytest.approx(0.15)]
    assert not findings.is_sound
