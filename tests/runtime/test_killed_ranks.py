"""A rank that is killed is named, whatever strategy it trains by, and no process is left."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from forked_command import ForkedCommand
from runtime.endless_training import CONFIGS
from runtime.parallel_plans import GPT, divided, plan_of

from hocket.plan.files import write_plan

SCRIPT = Path(__file__).with_name("endless_training.py")
GONE_S = 60.0
"""Processes end within 10 s of a kill on an idle machine; a loaded one gets more."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A plan of two devices, which says how many ranks are started; the script has its own."""
    path = tmp_path_factory.mktemp("killed") / "plan.json"
    plan = plan_of(*divided(GPT, "1f1b", 2))
    write_plan(path, plan.problem, plan.plan)
    return path


@pytest.mark.parametrize("strategy", CONFIGS)
def test_a_killed_rank_is_named_and_no_process_is_left(strategy, two_ranks, tmp_path):
    command = ("launch", two_ranks, SCRIPT, strategy)
    with ForkedCommand(*command, cwd=tmp_path, forks_ranks=True) as launched:
        pids = {}
        while len(pids) < 2:
            rank, _, said = next(launched.stdout).partition(": ")
            if said.startswith("pid "):
                pids[rank] = psutil.Process(int(said.split()[1]))
        os.kill(pids["[rank1]"].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        _, said = launched.communicate()
        took_s = time.monotonic() - killed_s
    assert launched.returncode == 5, said
    assert "rank 1 (gpu1) was killed by signal 9 (SIGKILL)" in said
    assert took_s < GONE_S
    for process in pids.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
