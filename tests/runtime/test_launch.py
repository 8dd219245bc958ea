"""`hocket launch`: the same script on one process and on one per device; who dies is named."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from hocket.api.divisions import limited, make_training, plan_of
from hocket.api.planners import compare_ways
from hocket.base.errors import UsageError
from hocket.plan.files import SavedPlan, read_plan, write_plan
from hocket.runtime.launch import launch
from hocket.runtime.train.checkpoint import read_state
from hocket.transformer import Transformer

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
    saving = ("--save", "killed", "--every", "2")
    command = hocket(folder / "plan.json", SCRIPT, "--steps", "1000000", *saving)
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
    # What was saved before is whole, and goes on in one process.
    last = max((folder / "killed").glob("step-*"), key=lambda path: int(path.name[5:]))
    state = read_state(last)
    assert state["loop"]["num_steps"] == int(last.name[5:]) >= 2
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.fixture(scope="module")
def division(alone, tmp_path_factory):
    """A plan of `hocket parallel` with two stages, for the six modules of the script."""
    folder = tmp_path_factory.mktemp("division")
    shape = Transformer(
        name="six", hidden=64, layers=6, heads=4, kv_heads=4, head_width=16, mlp_width=64,
        mlp="gelu", vocabulary=64, sequence=64, tied_embeddings=False, learned_positions=True,
        biases=True, dropout=False,
    )  # fmt: skip
    problem = limited(make_training(shape, "2xv100-16g", 32), fixed="pipeline=2")
    write_plan(folder / "plan.json", problem, plan_of(compare_ways(problem)))
    return folder / "plan.json"


def test_a_division_trains_a_script_on_two_machines_as_on_one(division, tmp_path):
    one = subprocess.run(hocket(division, SCRIPT, "--save", "one"), cwd=tmp_path,
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert one.returncode == 0, one.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = [
        subprocess.Popen(
            hocket("--nodes", "2", "--node-rank", index, "--address", f"127.0.0.1:{port}",
                   division, SCRIPT, "--save", "two"),
            cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    said = [machine.communicate()[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    losses = [
        [line for line in text.splitlines() if "loss" in line] for text in (one.stderr, *said)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    assert not losses[2]
    first, second = (read_state(tmp_path / name / "step-5")["model"] for name in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_machines_that_cannot_meet_are_refused(alone):
    folder, _ = alone
    for options, said in (
        (("--nodes", "2"), "place to meet"),
        (("--nodes", "2", "--node-rank", "2", "--address", "h:1"), "machine 2 of 2"),
        (("--nodes", "2", "--address", "nowhere"), "no HOST:PORT"),
    ):
        done = subprocess.run(hocket(*options, folder / "plan.json", SCRIPT),
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 2
        assert said in done.stderr


def test_what_is_no_script_is_refused(alone, tmp_path):
    folder, _ = alone
    saved: SavedPlan = read_plan(folder / "plan.json")
    with pytest.raises(UsageError, match="is not a file"):
        launch(folder / "plan.json", saved, tmp_path / "nothing.py", [])
