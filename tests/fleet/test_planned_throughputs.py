"""Gangs that get plans of their own: more devices are never slower, and what fits is planned."""

import pytest
import torch
from torch import nn

from hocket.api.fleet import find_servers, plan_gangs, planned_throughputs
from hocket.base.errors import UsageError
from hocket.capture.sizes import capture_sizes
from hocket.planners.whole import compare


def stack(width=1024, num_layers=4):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def graph():
    return capture_sizes(stack(), torch.zeros(4, 64, 1024), name="stack")


def test_a_gang_is_never_slower_than_a_part_of_it_and_has_a_plan(graph, monkeypatch):
    monkeypatch.setattr(compare, "_MOST_PLACED_OPS", 0)  # a search that nothing here looks at
    plans = plan_gangs(graph, [find_servers("t4"), find_servers("v100")], (2, 1))
    table = planned_throughputs(plans, "mine")
    assert table.kinds == ("t4", "v100")
    assert [tuple(profile) for profile in table.profiles] == [("mine", 1), ("mine", 2)]
    assert (table.alone > 0).all()
    assert (table.alone[1] >= table.alone[0] * 0.995).all()
    assert (table.alone[:, 1] > table.alone[:, 0]).all()
    assert all(plan.comparison.winner.plan is not None for plan in plans)


def test_a_batch_of_one_sample_is_refused(graph):
    alone = capture_sizes(stack(64, 1), torch.zeros(1, 64))
    with pytest.raises(UsageError, match="cannot be shared"):
        plan_gangs(alone, [find_servers("t4")], (1,))
