"""One process per device: the same numbers, measured; and how it ends when a rank fails."""

import os
import re
import signal
import tempfile
import time
from multiprocessing import forkserver

import numpy as np
import psutil
import pytest
from forked_worker_group import forked_worker_groups
from runtime.placements import random_placement

from hocket.base.errors import RunError
from hocket.capture import capture, load_model
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.processes.worker import Worker
from hocket.runtime.ranks import MeetingStore
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunCallbacks, RunOptions

FOREVER = 10**6
SILENT = r"rank 1 \(gpu1\) has stopped answering for ([{}]|\d\d) s while "
"""The time that is allowed, and what a busy machine takes to look."""
LOOKUP = """
import torch
from torch import nn
class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    def forward(self, ids):
        return self.layers(self.table(ids)).square().mean()
def good(batch=3):
    return Lookup(), {"ids": torch.tensor([0, 1, 2])}
def bad(batch=3):
    return Lookup(), {"ids": torch.tensor([0, 1, 99])}
"""


@pytest.fixture(scope="module")
def warm():
    """What packages open once, when they are first used, is open."""
    MeetingStore().close()
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def nothing_left(warm, tmp_path, monkeypatch):
    """No process, file, descriptor or listening port may outlive a run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    me = psutil.Process()
    before, children = me.num_fds(), me.children(recursive=True)
    yield
    assert [child for child in me.children(recursive=True) if child not in children] == []
    # PyTorch makes a folder for its compiler when that is imported.
    assert [p for p in tmp_path.iterdir() if not p.name.startswith("torchinductor")] == []
    assert me.num_fds() <= before
    assert [c for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []


@pytest.fixture
def lookup(tmp_path_factory, monkeypatch):
    """A file with models of a user's own."""
    folder = tmp_path_factory.mktemp("models")
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(LOOKUP)


def placed(name, seed=1, num_devices=2, **options):
    """A problem of a model by name, and a random placement."""
    model, batch = load_model(name, **options)
    problem = make_problem(
        capture(model, batch, name=name, device="cpu"), f"{num_devices}xv100-16g"
    )
    return problem, Plan(planner="random").placing(
        random_placement(problem.graph, num_devices, seed)
    )


@forked_worker_groups()
def test_ranks_compute_what_one_process_computes_and_time_every_op():
    problem, plan = placed("mlp", num_devices=3, batch=4)
    expected = run_plan(problem, plan, RunOptions(steps=3, seed=5, backend="single"))
    options = RunOptions(steps=3, seed=5, backend="gloo")
    found = run_plan(problem, plan, options)
    assert found.losses == expected.losses
    graph, timeline = problem.graph, found.measured
    reads_s = {}
    for op in range(graph.num_ops):
        for tensor in graph.reads_of(op).tolist():
            key = tensor, int(plan.device_of[op])
            reads_s[key] = min(reads_s.get(key, np.inf), timeline.op_start_s[op])
    for index in range(len(timeline.transfer_tensor)):
        key = int(timeline.transfer_tensor[index]), int(timeline.transfer_dst[index])
        assert timeline.transfer_end_s[index] <= reads_s[key]
        assert timeline.transfer_ready_s[index] <= timeline.transfer_start_s[index]
    assert np.all(timeline.peak_bytes > 0)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def run_and_hurt(signal_number, rank, step, **options):
    """Run without end and send a signal to a rank after a step; the error and when it came."""
    problem, plan = placed("mine.py:good")
    pids, sent_s = [], []

    def begin(process_ids):
        pids.extend(process_ids)
        hurt(0, None)

    def hurt(number, record):
        if number == step:
            time.sleep(0.5)  # Steps pile up meanwhile, and their number has a limit.
            os.kill(pids[rank], signal_number)
            sent_s.append(time.monotonic())

    with pytest.raises(RunError) as caught:
        run_plan(
            problem, plan, RunOptions(steps=FOREVER, backend="gloo", **options),
            watch=RunCallbacks(on_start=begin, on_step=hurt),
        )  # fmt: skip
    took_s = time.monotonic() - sent_s[0]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    return caught.value, took_s


def test_a_rank_that_is_stopped_before_its_first_step_is_named_and_all_is_gone(lookup):
    error, took_s = run_and_hurt(signal.SIGSTOP, 1, step=0)
    assert re.fullmatch(SILENT.format("2-9") + "building the model", error.message), error.message
    assert took_s < 60


@forked_worker_groups()
def test_a_rank_that_gives_no_sign_of_life_is_named_and_all_is_gone(lookup, monkeypatch):
    monkeypatch.setattr(Worker, "is_stopped", False)
    error, took_s = run_and_hurt(signal.SIGSTOP, 1, step=2, silence_s=3.0)
    assert re.match(SILENT.format("3-9"), error.message), error.message
    assert took_s < 60


@forked_worker_groups()
def test_the_error_of_an_op_is_told_with_its_rank_and_op(lookup):
    problem, plan = placed("mine.py:bad")
    with pytest.raises(RunError, match="index out of range in self") as caught:
        run_plan(problem, plan, RunOptions(steps=3, backend="gloo"))
    op = problem.graph.op_names.index("table/embedding")
    rank = int(plan.device_of[op])
    assert f"rank {rank} (gpu{rank})" in caught.value.message
    assert "op 'table/embedding' failed on cpu in step 1" in caught.value.message
