"""What devices send together is told: in bytes, apart from the signals that it may begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.capture.sizes import capture_sizes
from hocket.graph import Role
from hocket.plan.make import make_problem
from hocket.plan.sections import Parallel, Replica
from hocket.planners.candidates import empty_plan
from hocket.simulate import bottleneck, simulate
from hocket.simulate.analysis import EXCHANGES
from hocket.view.facts import facts_of
from hocket.view.plan_view import PlanView, unfolded
from hocket.view.table import plain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    def forward(self, rows):
        return self.body(rows).square().mean()


@pytest.fixture(scope="module")
def problem():
    return make_problem(capture_sizes(Net(), torch.zeros(8, 512)), "4xv100-16g")


def planned(problem, num_replicas, **options):
    names = problem.cluster.device_names[:num_replicas]
    share = 8 // num_replicas
    section = Parallel(
        replicas=tuple(Replica(devices=(name,), microbatches=(share,)) for name in names), **options
    )
    return empty_plan(problem, "test").having(section)


def parameter_bytes(problem):
    graph = problem.graph
    is_given = (graph.tensor_role == Role.PARAMETER) & (graph.tensor_producer < 0)
    return int(graph.tensor_bytes[is_given].sum())


@pytest.mark.parametrize(
    ("num_replicas", "options", "halves"),
    [
        (2, {}, 2),  # one all-reduce of the gradients
        (4, {}, 2),
        # Gathers for both passes (the first layer's backward reads no weight) and one scatter.
        (2, {"zero": 3}, 1 + 3 / 4 + 1),
        (4, {"zero": 3}, 1 + 3 / 4 + 1),
    ],
)
def test_bytes_of_exchanges_follow_the_closed_form(problem, num_replicas, options, halves):
    plan = planned(problem, num_replicas, **options)
    timeline = simulate(problem, plan)
    facts = facts_of(*unfolded(problem, plan), timeline)
    expected = halves * (num_replicas - 1) / num_replicas * parameter_bytes(problem)
    assert len(facts.exchanges) == num_replicas
    for each in facts.exchanges:
        assert each.sent_bytes == pytest.approx(expected, rel=1e-3)
    assert facts.moved_bytes == sum(each.sent_bytes for each in facts.exchanges)
    assert (facts.num_transfers, facts.links) == (0, ()), "signals are no transfers"


def test_a_sharded_plan_shows_what_it_exchanges_and_what_limits_it(problem):
    plan = planned(problem, 4, zero=3)
    timeline = simulate(problem, plan)
    view = PlanView(problem, plan, timeline)
    text = plain(view.summary())
    assert "collectives, 33.0 MiB" in text  # 11/4 x 3/4 of 4 MiB, by each of four
    assert view.shown()["moved_bytes"] == 33 * 2**20
    assert "Collectives of" in view.report_html()
    assert "Nothing is sent" not in view.report_html()
    inner = unfolded(problem, plan)
    share = facts_of(*inner, timeline).path.shares[EXCHANGES]
    assert share > 0.5, "small layers: this step is collectives"
    assert bottleneck(timeline, inner[0]).startswith("limited by collectives between devices")
    assert "a plan that communicates less" in plain(view.explanation())
