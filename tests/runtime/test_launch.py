"""`hocket launch`: the same script on one process and on one per device; who dies is named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hocket.base.errors import UsageError
from hocket.plan.files import SavedPlan, read_plan
from hocket.runtime.launch import launch
from hocket.runtime.train.checkpoint import read_state

SCRIPT = Path(__file__).parents[2] / "examples/train_ranks.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The plan, and the checkpoint of the script on one process."""
    folder = tmp_path_factory.mktemp("launch")
    command = [sys.executable, str(SCRIPT), "--plan", str(folder / "plan.json"), "--save", "one"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return folder, done.stdout


def hocket(*arguments):
    return [sys.executable, "-m", "hocket", "launch", *map(str, arguments)]


def test_ranks_train_as_one_process_does_bit_for_bit(alone):
    folder, printed = alone
    done = subprocess.run(
        hocket("--json", folder / "plan.json", SCRIPT, "--save", "two"), cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    assert [line for line in done.stderr.splitlines() if "loss" in line] == printed.splitlines()
    one, two = (read_state(folder / name / "step-5") for name in ("one", "two"))
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, two["model"][name])
    for index, slots in one["optimizer"]["state"].items():
        for name, value in slots.items():
            assert torch.equal(value, two["optimizer"]["state"][index][name])


def test_a_killed_rank_is_named_and_all_are_gone(alone):
    folder, _ = alone
    command = hocket(folder / "plan.json", SCRIPT, "--steps", "1000000")
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("step 3:"))
        children = psutil.Process(process.pid).children(recursive=True)
        ranks = [c for c in children if "hocket.runtime.launched" in c.cmdline()]
        assert len(ranks) == 2
        second = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
        os.kill(second.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        said = process.stderr.read()
    assert process.returncode == 5
    assert "rank 1 (gpu1) was killed by signal 9 (SIGKILL)" in said
    assert time.monotonic() - killed_s < 10
    assert not any(child.is_running() and child.status() != "zombie" for child in children)


def test_what_is_no_script_is_refused(alone, tmp_path):
    folder, _ = alone
    saved: SavedPlan = read_plan(folder / "plan.json")
    with pytest.raises(UsageError, match="is not a file"):
        launch(folder / "plan.json", saved, tmp_path / "nothing.py", [])
