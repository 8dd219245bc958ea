"""Captured steps as ops that run again: the same bytes and seconds as the plain step, and less."""

import numpy as np
import pytest
import torch
from torch import nn

from hocket.api import make_problem
from hocket.capture import capture
from hocket.graph.graph import Phase
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.memory.recompute import replayed, schedule_graph
from hocket.planners.memory.step_ops import step_ops
from hocket.simulate.engine import simulate


class Skipping(nn.Module):
    """A net that reads what it made first again at its end."""

    def __init__(self, width=24):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.low = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(4))
        )
        self.up = nn.Conv2d(2 * width, 2, 3, padding=1)

    def forward(self, images):
        high = self.down(images)
        low = self.low(nn.functional.max_pool2d(high, 2))
        return self.up(
            torch.cat([high, nn.functional.interpolate(low, scale_factor=2.0)], 1)
        ).mean()


@pytest.fixture(scope="module")
def problem():
    graph = capture(Skipping(), (torch.zeros(4, 3, 32, 32),), name="skipping")
    return make_problem(graph, "1xh200")


@pytest.fixture(scope="module")
def plan(problem):
    return empty_plan(problem, "memory").placing(np.zeros(problem.graph.num_ops, dtype=np.int32))


def ops_and_bytes_there(problem):
    graph = problem.graph
    ops = step_ops(graph, problem.costs.op_s[problem.costs.device_row[0]])
    return ops, int(graph.held_bytes[graph.tensor_producer < 0].sum())


def test_ops_of_a_step_hold_and_take_what_the_simulator_says(problem, plan):
    ops, there = ops_and_bytes_there(problem)
    timeline = simulate(problem, plan)
    once = replayed(ops, tuple(range(ops.num_ops)))
    assert once.seconds == pytest.approx(timeline.makespan_s)
    # Gradients that updates use up at once are the only difference.
    graph = problem.graph
    gradients = {
        int(tensor)
        for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER)
        for tensor in graph.root_of[graph.reads_of(op)]
        if graph.tensor_producer[tensor] >= 0
    }
    used_up = int(graph.held_bytes[list(gradients)].sum())
    peak = int(timeline.peak_bytes.max())
    assert peak - used_up <= once.peak_bytes + there <= peak


def test_recompute_of_a_step_takes_less_and_runs_nothing_after_its_inputs_changed(problem):
    ops, _ = ops_and_bytes_there(problem)
    most = replayed(ops, tuple(range(ops.num_ops))).peak_bytes
    found = schedule_graph(ops, int(0.7 * most), num_rounds=1)
    assert found is not None
    assert found.peak_bytes <= 0.7 * most
    newest = np.maximum.accumulate(found.runs)
    is_again = np.array([run in found.runs[:at] for at, run in enumerate(found.runs)])
    assert is_again.any()
    assert np.all(newest[is_again] <= ops.last_turn[np.array(found.runs)[is_again]])


def test_step_with_recompute_alone_is_the_better_of_chain_and_graph(problem, plan):
    frontier = find_frontier(problem, plan, num_levels=4)
    plain = frontier.find("plain")
    ops, there = ops_and_bytes_there(problem)
    took_s = []
    for share in (1.0, 0.9, 0.75):
        budget = int(share * plain.peak_bytes)
        found_s = BudgetFit(frontier, budget).recompute_alone_s
        of_graph = schedule_graph(ops, budget - there, num_rounds=2)
        assert found_s is not None
        assert of_graph is None or found_s <= of_graph.seconds
        took_s.append(found_s)
    assert took_s == sorted(took_s)
    assert took_s[0] == pytest.approx(plain.step_s)
    assert took_s[-1] > took_s[0]
