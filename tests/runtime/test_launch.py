"""`hocket launch`: the same script on one process and on one per device; who dies is named."""

import contextlib
import io
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from cli.terminal import hocket
from forked_command import ForkedCommand
from ports import reserved_port

from hocket.api.parallel_configs import limited, make_training
from hocket.api.planners import compare_candidates
from hocket.base.errors import UsageError
from hocket.cost.parallel.softwares import find_software
from hocket.plan.files import SavedPlan, read_plan, write_plan
from hocket.planners.parallel.transformer_search import plan_of
from hocket.runtime.checkpoint import read_state
from hocket.runtime.launch import launch
from hocket.transformer import Transformer

SCRIPT = Path(__file__).parents[2] / "examples/train_ranks.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The plan, and the checkpoint of the script on one process."""
    folder = tmp_path_factory.mktemp("launch")
    arguments = [str(SCRIPT), "--plan", str(folder / "plan.json"), "--save", str(folder / "one")]
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(printed):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return folder, printed.getvalue()


def test_ranks_train_as_one_process_does_bit_for_bit(alone):
    folder, printed = alone
    command = ("launch", "--json", folder / "plan.json", SCRIPT, "--save", "two")
    with ForkedCommand(*command, cwd=folder, forks_ranks=True) as launched:
        out, err = launched.communicate()
    assert launched.returncode == 0, err
    assert json.loads(out)["ranks"] == 2
    losses = [line for line in err.splitlines() if "loss" in line]
    assert losses == [f"[rank0]: {line}" for line in printed.splitlines()]
    one, two = (read_state(folder / name / "step-5") for name in ("one", "two"))
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, two["model"][name])
    for index, slots in one["optimizer"]["state"].items():
        for name, value in slots.items():
            assert torch.equal(value, two["optimizer"]["state"][index][name])


def test_a_killed_rank_is_named_and_all_are_gone(alone):
    folder, _ = alone
    saving = ("--save", "killed", "--every", "2")
    command = ("launch", folder / "plan.json", SCRIPT, "--steps", "1000000", *saving)
    with ForkedCommand(*command, cwd=folder) as launched:
        next(line for line in launched.stdout if line.startswith("[rank0]: step 3:"))
        children = psutil.Process(launched.pid).children(recursive=True)
        ranks = [c for c in children if "hocket.runtime.rank_script" in c.cmdline()]
        assert len(ranks) == 2
        second = next(rank for rank in ranks if rank.environ()["RANK"] == "1")
        os.kill(second.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        _, said = launched.communicate()
    assert time.monotonic() - killed_s < 60
    assert launched.returncode == 5
    assert "rank 1 (gpu1) was killed by signal 9 (SIGKILL)" in said
    assert not any(child.is_running() and child.status() != "zombie" for child in children)
    # What was saved before is whole, and goes on in one process.
    last = max((folder / "killed").glob("step-*"), key=lambda path: int(path.name[5:]))
    state = read_state(last)
    assert state["loop"]["num_steps"] == int(last.name[5:]) >= 2
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.fixture(scope="module")
def config(alone, tmp_path_factory):
    """A plan of `hocket parallel` with two stages, for the six modules of the script."""
    folder = tmp_path_factory.mktemp("config")
    shape = Transformer(
        name="six", hidden=64, layers=6, heads=4, kv_heads=4, head_width=16, mlp_width=64,
        mlp="gelu", vocabulary=64, sequence=64, tied_embeddings=False, learned_positions=True,
        biases=True, dropout=False,
    )  # fmt: skip
    training = make_training(shape, "2xv100-16g", 32, program=find_software("megatron-core"))
    problem = limited(training, fixed="pipeline=2")
    write_plan(folder / "plan.json", problem, plan_of(compare_candidates(problem)))
    return folder / "plan.json"


def test_a_config_trains_a_script_on_two_machines_as_on_one(config, tmp_path):
    command = ("launch", config, SCRIPT, "--save", "one")
    with ForkedCommand(*command, cwd=tmp_path, forks_ranks=True) as one:
        said = [one.communicate()]
    assert one.returncode == 0, said
    with reserved_port() as port, contextlib.ExitStack() as both:
        machines = [
            both.enter_context(ForkedCommand(
                "launch", "--nodes", "2", "--node-rank", index, "--address", f"127.0.0.1:{port}",
                config, SCRIPT, "--save", "two", cwd=tmp_path,
                forks_ranks=True,
            ))
            for index in range(2)
        ]  # fmt: skip
        said += [machine.communicate() for machine in machines]
        assert [machine.returncode for machine in machines] == [0, 0], said
    losses = [[line for line in out.splitlines() if "loss" in line] for out, _ in said]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    assert not losses[2]
    first, second = (read_state(tmp_path / name / "step-5")["model"] for name in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nodes", "2"), "place to meet"),
        (("--nodes", "2", "--node-rank", "2", "--address", "h:1"), "machine 2 of 2"),
        (("--nodes", "2", "--address", "nowhere"), "no HOST:PORT"),
    ],
)
def test_machines_that_cannot_meet_are_refused(alone, options, said):
    folder, _ = alone
    assert said in hocket("launch", *options, folder / "plan.json", SCRIPT, expect=2).stderr


def test_what_is_no_script_is_refused(alone, tmp_path):
    folder, _ = alone
    saved: SavedPlan = read_plan(folder / "plan.json")
    with pytest.raises(UsageError, match="is not a file"):
        launch(folder / "plan.json", saved, tmp_path / "nothing.py", [])
