"""Recomputed blocks of traced steps, and updates on the host: the same training."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from runtime.executed_program import execute, named_tensors
from torch import nn

from hocket.capture.model import capture_program
from hocket.capture.sizes import capture_sizes
from hocket.plan.files import SavedPlan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Placement, Replica
from hocket.planners.parallel.closed_form import block_edges
from hocket.runtime.optimizer_parts import HostUpdate
from hocket.runtime.traced_recompute import with_recompute
from hocket.simulate import simulate
from hocket.simulate.parallel.recompute_and_host import blocks_of
from hocket.training import prepare


class Block(nn.Module):
    """Has running statistics, draws, writes in place to what it made, and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), 0.3
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.norm(self.conv(x)).relu_() + 0.1
        y[:, 0] *= 2
        return x + nn.functional.dropout(y, self.drop) * self.calls


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3))).square().mean()


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net(), torch.randn(5, 4, 6, 6)


@pytest.fixture(scope="module")
def recorded(net):
    return capture_program(*net, optimizer="adamw", device="cpu")


def blocks(graph):
    return tuple(pairwise(block_edges(graph)))


def test_a_step_whose_blocks_run_again_has_the_same_bits(net, recorded):
    graph, program = recorded
    _, again = with_recompute(graph, program, blocks_of(graph, blocks(graph)))
    given = dict(named_tensors(*net))
    for tensor, name in program.names.items():
        given.setdefault(name, torch.zeros(program.tensors[tensor].layout.shape))
    found, expected = execute(again, given, seed=3), execute(program, given, seed=3)
    assert len(again.repeats) > 12
    assert torch.equal(found.outputs[0], expected.outputs[0])
    for part in ("gradients", "state"):
        for name, tensor in getattr(expected, part).items():
            assert torch.equal(getattr(found, part)[name], tensor), name
    assert expected.state["blocks.0.calls"] == 1


def test_blocks_that_run_again_hold_less(recorded):
    graph, program = recorded
    rewritten, _ = with_recompute(graph, program, blocks_of(graph, blocks(graph)))
    peaks = []
    for each in (graph, rewritten):
        where = Placement(device_of=np.zeros(each.num_ops, dtype=np.int32))
        found = simulate(make_problem(each, "1xv100-16g"), Plan(planner="one").having(where))
        peaks.append(int(found.peak_bytes[0]))
    assert peaks[1] < 0.9 * peaks[0]


def test_what_cannot_run_again_is_kept():
    """A second run would read what was written since, or write to what others made."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.register_buffer("vector", torch.ones(4))

        def forward(self, x):
            for layer in self.layers:
                self.vector.copy_(nn.functional.normalize(self.vector + 1, dim=0))
                x += layer(torch.tanh(x)) * self.vector.clone()
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Grows(), torch.randn(3, 4)
    graph, program = capture_program(
        model, x, optimizer="sgd", device="cpu",
        forward=lambda model, x: model(x.clone()),
    )  # fmt: skip
    every = np.where(graph.op_phase == 0, np.arange(graph.num_ops) // 6, -1).astype(np.int32)
    _, again = with_recompute(graph, program, every)
    found, expected = (execute(p, dict(named_tensors(model, x))) for p in (again, program))
    assert again.repeats
    for name, tensor in expected.gradients.items():
        assert torch.equal(found.gradients[name], tensor), name


def test_a_persons_loop_draws_again_what_it_drew(net):
    """One device takes a batch, with and without blocks that run again."""
    model, x = net
    graph = capture_sizes(model, x, optimizer="adamw", device="cpu")
    problem = make_problem(graph, "1xcpu-core")
    states = []
    for recomputed in ((), blocks(graph)):
        own = copy.deepcopy(model)
        update = torch.optim.AdamW(own.parameters(), lr=1e-2)
        replica = Replica(
            devices=problem.cluster.device_names, microbatches=(5,), recomputed=recomputed
        )
        plan = SavedPlan(problem, Plan(planner="shares").having(Parallel(replicas=(replica,))))
        train = prepare(own, update, x, plan=plan)
        torch.manual_seed(1)
        losses = [train.step(x).item() for _ in range(3)]
        states.append((losses, torch.rand(1), own.state_dict()))
    (losses, drawn, expected), (again, drawn_again, found) = states
    assert losses == again
    assert torch.equal(drawn, drawn_again)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("fused", [False, True])
def test_updates_on_the_host_are_those_of_the_optimizer(fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    twin, make = copy.deepcopy(model), HostUpdate()
    ours, plain = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin))
    others = [torch.optim.SGD(m.parameters(), lr=0.1, fused=fused) for m in (model, twin)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, plain)]
    for step in range(4):
        x = torch.randn(5, 3)
        for each in (model, twin):
            each(x).square().mean().backward()
        if step == 2:  # weights that someone else changes are seen
            for other in others:
                other.step()
        make(ours)
        plain.step()
        for optimizer, schedule in zip((ours, plain), schedules, strict=True):
            optimizer.zero_grad()
            schedule.step()
    for name, tensor in twin.state_dict().items():
        assert torch.allclose(model.state_dict()[name], tensor, atol=1e-7), name
    assert ours.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
