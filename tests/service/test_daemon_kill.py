"""Real daemons with real jobs, killed by SIGKILL at random moments; and two daemons at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from service.kill_trials import JOB, PROGRAM, Findings, Served, check_log, run_trials
from service.killable_daemon import RULES
from service.waiting import until


@pytest.mark.slow
def test_killed_daemons_lose_no_job_and_run_none_twice(tmp_path):
    findings = run_trials(tmp_path, trials=3)
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


@pytest.mark.slow
def test_a_second_daemon_on_the_same_folder_refuses(tmp_path):
    first = Served(tmp_path)
    assert first.next_line() is not None
    second = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (
        f"another daemon runs on this state folder (process {first.process.pid})" in second.stderr
    )
    assert "exit 3" in second.stderr
    first.end()


def test_the_checker_sees_devices_given_twice_jobs_run_twice_and_lost_work(tmp_path):
    def begin(job: int, attempt: int) -> subprocess.Popen[bytes]:
        names = {"HOCKET_JOB": str(job), "HOCKET_ATTEMPT": str(attempt), "HOCKET_DEVICES": "a"}
        command = [sys.executable, "-I", "-S", "-c", JOB, str(tmp_path), "0.2"]
        process = subprocess.Popen(command, env=names)
        did = tmp_path / f"did-{job}"
        until(lambda: did.exists() and did.stat().st_size)
        return process

    first = begin(1, 1)
    second = begin(2, 1)
    first.kill()
    first.wait()
    third = begin(1, 1)
    assert (second.wait(), third.wait()) == (0, 0)
    findings = Findings()
    check_log(findings, (tmp_path / "log").read_text().splitlines())
    assert findings.overlaps[0] == "overlap 2-1 a"
    assert findings.begun_twice == ["begin 1-1"]
    assert findings.num_attempts == 2
    assert 0.0 < max(findings.lost_work_s) <= 0.2
