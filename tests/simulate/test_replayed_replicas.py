"""Replicas that replay their step as a graph: no launches, and all sums of gradients after it."""

import pytest
import torch
from torch import nn

from hocket.capture.sizes import capture_sizes
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Replica
from hocket.simulate import simulate
from hocket.simulate.parallel.replayed import replayed_step_s


@pytest.fixture(scope="module")
def graphs():
    """Many small layers, and few large ones; both with a batch of 64."""

    def captured(width, depth):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        return capture_sizes(
            model, torch.randn(64, width), loss=lambda out: out.square().mean(), device="cpu",
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip

    return captured(32, 12), captured(2048, 4)


def _seconds(graph, cluster):
    problem = make_problem(graph, cluster)
    replicas = tuple(
        Replica(devices=(name,), microbatches=(32,)) for name in problem.cluster.device_names
    )
    shares = Parallel(replicas=replicas)
    overlapped_s = simulate(problem, Plan().having(shares)).makespan_s
    return replayed_step_s(problem, shares, None), overlapped_s


def test_small_ops_gain_by_the_replay_and_large_gradients_by_the_overlap(graphs):
    small, large = graphs
    replayed_s, overlapped_s = _seconds(small, "2xv100-16g")
    assert 0 < replayed_s < overlapped_s
    replayed_s, overlapped_s = _seconds(large, "2xt4")
    assert replayed_s > overlapped_s
