"""Real daemons with real jobs, killed by SIGKILL at random moments; and two daemons at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from service.kill_trials import PROGRAM, Served, run_trials
from service.killable_daemon import RULES


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
