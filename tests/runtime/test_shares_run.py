"""Shares carried out: the training of one device with the whole batch, up to rounding."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from forked_command import ForkedCommand
from forked_worker_group import forked_worker_groups
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.sizes import capture_sizes
from hocket.cost.profile import read_profile
from hocket.graph.generators import generate
from hocket.graph.graph import Phase
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.files import SavedPlan, read_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Replica
from hocket.runtime import run_limits
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunOptions
from hocket.runtime.strategies.parallel_task import ParallelWarning
from hocket.training import prepare
from hocket.transformer import ParallelConfig
from tests.cli.terminal import hocket

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x, y):
        hidden = torch.tanh(self.second(nn.functional.gelu(self.first(x))))
        return nn.functional.cross_entropy(self.last(hidden), y)

def net(batch: int = 8):
    torch.manual_seed(3)
    return Net(), (torch.randn(batch, 6), torch.randint(0, 4, (batch,)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("shares")
    (place / "m.py").write_text(MODEL)
    hocket("plan", "m.py:net", "--on", "2xcpu-core", "-o", "plan.json", cwd=place)
    return place


def with_shares(folder, replicas):
    data = json.loads((folder / "plan.json").read_text())
    names = ["cpu0", "cpu1"]
    data["sections"] = {
        "parallel": {
            "tensor": 1,
            "context": 1,
            "expert": 1,
            "zero": 0,
            "schedule": "1f1b",
            "recompute": "none",
            "sequence_parallel": False,
            "layers": None,
            "replicas": [
                {
                    "devices": [names[i]],
                    "microbatches": sizes,
                    "cuts": [],
                    "recomputed": [],
                    "update": "device",
                }
                for i, sizes in enumerate(replicas)
            ],
        }
    }
    (folder / "shared.json").write_text(json.dumps(data))


def losses(folder, *options):
    said = hocket("run", "shared.json", "--steps", 4, "--json", *options, cwd=folder).stdout
    return json.loads(said)["losses"]


@pytest.fixture(scope="module")
def whole(folder):
    with_shares(folder, [[8]])
    return losses(folder, "--backend", "single")


@pytest.mark.parametrize("replicas", [[[3, 3, 2]], [[5], [3]], [[2, 2], [3, 1]]])
def test_shares_in_one_process_train_as_the_whole_batch_does(folder, whole, replicas):
    with_shares(folder, replicas)
    assert losses(folder, "--backend", "single") == pytest.approx(whole, rel=1e-6)


def test_unequal_replicas_in_two_processes_train_as_the_whole_batch_does(folder, whole):
    with_shares(folder, [[3, 2], [3]])
    with forked_worker_groups():
        assert losses(folder, "--backend", "gloo") == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_shards_and_pipelines_run_as_planned_and_train_as_the_whole_batch_does(
    folder, whole, is_sharded
):
    with_shares(folder, [[5], [3]] if is_sharded else [[4, 4]])
    data = json.loads((folder / "shared.json").read_text())
    shares = data["sections"]["parallel"]
    shares["zero"] = 3 if is_sharded else 0
    if not is_sharded:
        graph = read_plan(folder / "shared.json").problem.graph
        forward = np.flatnonzero(graph.op_phase == Phase.FORWARD)
        cut = int(forward[len(forward) // 2])
        shares["replicas"][0] |= {"devices": ["cpu0", "cpu1"], "cuts": [cut]}
    (folder / "shared.json").write_text(json.dumps(data))
    with forked_worker_groups():
        saved = read_plan(folder / "shared.json")
        options = RunOptions(steps=4, backend="gloo", model=f"{folder / 'm.py'}:net")
        found = run_plan(saved.problem, saved.plan, options)
    assert found.losses == pytest.approx(whole, rel=1e-5)
    assert list(found.runs_on) == ["cpu0", "cpu1"], "a process per device, not per replica"


def test_who_waits_for_minutes_is_told_before(folder, monkeypatch):
    with_shares(folder, [[8]])
    run = ("run", "shared.json", "--steps", 1, "--backend", "single")
    monkeypatch.setattr(run_limits, "cpu_step_s", lambda problem: 240.0)
    assert "about 4 min per step" in hocket(*run, cwd=folder).stderr
    monkeypatch.setattr(run_limits, "cpu_step_s", lambda problem: 3.0)
    assert "per step" not in hocket(*run, cwd=folder).stderr


def test_only_steps_that_take_long_on_this_processor_are_rated(monkeypatch):
    rated = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(
        run_limits, "detect_cpu", lambda: rated.append(1) or cluster_from_text("1xcpu-core")
    )
    problem = make_problem(generate("layered", 30, 0), "2xt4")
    flops = np.full(problem.graph.num_ops, 1e12)
    large = replace(problem, work=replace(problem.graph, flops=flops))
    assert run_limits.cpu_step_s(problem) is None
    assert not rated
    whole_s = run_limits.cpu_step_s(large)
    peak = cluster_from_text("1xcpu-core").kinds[0].peak_flops["float32"]
    assert whole_s >= flops.sum() / peak
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert run_limits.cpu_step_s(large) is None


def test_the_whole_batch_is_what_plain_pytorch_does(whole):
    space = {}
    exec(MODEL, space)
    model, (x, y) = space["net"]()
    update, plain = torch.optim.AdamW(model.parameters()), []
    for _ in range(4):
        update.zero_grad()
        loss = model(x, y)
        loss.backward()
        update.step()
        plain.append(loss.item())
    assert whole == pytest.approx(plain, rel=1e-5)


SCRIPT = """
import hocket, torch
from m import net

model, batch = net()
train = hocket.prepare(model, torch.optim.AdamW(model.parameters()), batch)
for _ in range(4):
    print("loss", float(train.step(batch)))
"""


def test_launch_carries_shares_in_a_persons_own_loop(folder, whole):
    with_shares(folder, [[3, 2], [3]])
    (folder / "train.py").write_text(SCRIPT)
    command = ("launch", "--profile", "times.json", "shared.json", "train.py")
    with ForkedCommand(*command, cwd=folder, forks_ranks=True) as launched:
        printed, said = launched.communicate()
    assert launched.returncode == 0, said
    told = [float(line.split()[2]) for line in printed.splitlines() if "]: loss" in line]
    assert {line.split()[0] for line in printed.splitlines() if "loss" in line} == {
        "[rank0]:", "[rank1]:"
    }  # fmt: skip
    # Both ranks print the loss of the whole batch.
    assert sorted(told) == pytest.approx(sorted([*whole, *whole]), rel=1e-5)
    # The first one timed a step, with which the launcher has planned again.
    assert "planned again with measured times" in said
    assert {entry.kind for entry in read_profile(folder / "times.json").entries} >= {"aten.addmm"}
    assert read_plan(folder / "shared.refined.json").predicted_step_s > 0


@pytest.mark.parametrize("backend", ["single", "gloo"])
def test_shares_without_room_are_refused_with_the_part_that_has(folder, monkeypatch, backend):
    with_shares(folder, [[3, 2], [3]])
    monkeypatch.setattr(run_limits, "available_bytes", lambda: 1000)
    refused = hocket("run", "shared.json", "--backend", backend, cwd=folder, expect=2)
    assert "are free" in refused.stderr
    monkeypatch.setattr(run_limits, "available_bytes", lambda: 2 * run_limits.PROCESS_BYTES)
    if backend == "gloo":
        refused = hocket("run", "shared.json", "--backend", backend, cwd=folder, expect=2)
        assert "one microbatch after the other with --backend single" in refused.stderr


def test_a_persons_loop_takes_microbatches_in_one_process(folder, whole):
    with_shares(folder, [[3, 3, 2]])
    space = {}
    exec(MODEL, space)
    model, batch = space["net"]()
    update = torch.optim.AdamW(model.parameters())
    train = prepare(model, update, batch, plan=folder / "shared.json")
    assert [train.step(batch).item() for _ in range(4)] == pytest.approx(whole, rel=1e-5)
    assert "predicted" in train.progress()
    with pytest.raises(UsageError, match="forward and backward passes as one list"):
        train(batch)
    with pytest.raises(UsageError, match="2 samples cannot be cut into 3 microbatches"):
        train.step(tuple(part[:2] for part in batch))


def test_another_model_or_batch_than_the_planned_one_is_refused(folder):
    with_shares(folder, [[5], [3]])
    space = {}
    exec(MODEL, space)
    model, (x, y) = space["net"]()

    def carried(model, batch):
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        return prepare(model, update, batch, plan=folder / "shared.json")

    with pytest.raises(UsageError, match="8 samples per step, the batch has 4"):
        carried(model, (x[:4], y[:4]))
    with pytest.raises(UsageError, match="takes 2 ranks, and 1 is running"):
        carried(model, (x, y))
    model.last = torch.nn.Linear(32, 5)
    with pytest.raises(UsageError, match=r"'last\.weight' has 640 bytes"):
        carried(model, (x, y))
    del model.last
    with pytest.raises(UsageError, match=r"a model with 'last\.weight'"):
        carried(model, (x, y))


def test_microbatches_with_batch_norm_are_accumulated_as_in_pytorch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    twin, x = copy.deepcopy(model), torch.randn(5, 4)

    def loss_of(model, x):
        value = model(x).square().mean()
        return {"loss": value, "norm": value.sqrt(), "rows": x.sum(1)}

    update, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    graph = capture_sizes(model, x, forward=loss_of, optimizer=update, device="cpu")
    problem = make_problem(graph, "1xcpu-core")
    replica = Replica(devices=problem.cluster.device_names, microbatches=(3, 2))
    plan = SavedPlan(problem, Plan(planner="shares").having(Parallel(replicas=(replica,))))
    with pytest.warns(ParallelWarning, match="'1' normalises each microbatch"):
        train = prepare(model, update, x, plan=plan, forward=loss_of, outputs=True)
    for _ in range(3):
        train.step(x)
        found = [loss_of(twin, part) for part in (x[:3], x[3:])]
        (found[0]["loss"] * 0.6 + found[1]["loss"] * 0.4).backward()
        plain.step()
        plain.zero_grad()
    for name, tensor in twin.state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, atol=1e-6), name
    norm = found[0]["norm"] * 0.6 + found[1]["norm"] * 0.4
    assert train.outputs["norm"].item() == pytest.approx(norm.item(), rel=1e-5)
    assert torch.equal(train.outputs["rows"], x.sum(1))


def test_a_seed_holds_where_a_config_is_one_device():
    seen = []
    for elsewhere in (1, 2):
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
            torch.ones(3, 4),
        )
        torch.manual_seed(elsewhere)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        train = prepare(
            model, update, x, plan=ParallelConfig(), seed=7,
            forward=lambda model, x: model(x).square().mean(),
        )  # fmt: skip
        seen.append([train.step(x).item() for _ in range(3)])
    assert seen[0] == seen[1]
