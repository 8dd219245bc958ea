"""Orders: what each promises, and that the best of them is the best."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import joined, placements, plans, problem_of, problems

from hocket.base.errors import UsageError
from hocket.graph import GraphBuilder
from hocket.graph.generators import generate
from hocket.plan.plan import Plan
from hocket.plan.verify import require_structure
from hocket.planners.order import (
    GIVEN,
    ORDERS,
    best_order,
    bottom_level,
    critical_refined,
    earliest_start,
    topological,
)
from hocket.planners.order.levels import latest_starts, levels
from hocket.simulate.engine import simulate
from hocket.simulate.evaluate import Evaluator


def _score(problem, plan):
    timeline = simulate(problem, plan)
    over = np.maximum(timeline.peak_bytes - problem.memory_bytes, 0).sum()
    return over, timeline.makespan_s


def _plain_levels(problem, device_of):
    """Longest paths by recursion on the definition."""
    graph, costs = problem.graph, problem.costs
    to_end, from_start = {}, dict.fromkeys(range(graph.num_ops), 0.0)

    def hops(op):
        for tensor in graph.made_by(op):
            for user in graph.users_of(tensor).tolist():
                yield user, costs.transfer_s(tensor, int(device_of[op]), int(device_of[user]))

    def op_s(op):
        return float(costs.op_s[costs.device_row[device_of[op]], op])

    for op in reversed(range(graph.num_ops)):
        to_end[op] = op_s(op) + max((s + to_end[user] for user, s in hops(op)), default=0.0)
    for op in range(graph.num_ops):
        for user, sent_s in hops(op):
            from_start[user] = max(from_start[user], from_start[op] + op_s(op) + sent_s)
    return list(to_end[op] for op in range(graph.num_ops)), list(from_start.values())


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_levels_are_the_longest_paths_of_the_placement(data):
    problem = data.draw(problems(max_ops=10))
    device_of = data.draw(placements(problem))
    found = levels(problem, device_of)
    to_end_s, from_start_s = _plain_levels(problem, device_of)
    np.testing.assert_allclose(found.to_end_s, to_end_s, rtol=1e-12)
    np.testing.assert_allclose(found.from_start_s, from_start_s, rtol=1e-12)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_every_order_is_legal_and_keeps_the_placement(data):
    problem = data.draw(problems(max_ops=10))
    plan = data.draw(plans(problem))
    for order in ORDERS.values():
        ordered = order(problem, plan)
        require_structure(ordered, problem)
        np.testing.assert_array_equal(ordered.device_of, plan.device_of)
        again = order(problem, plan)
        np.testing.assert_array_equal(ordered.priority, again.priority)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_best_order_is_the_best_of_all_and_says_which(data):
    problem = data.draw(problems(max_ops=10))
    plan = replace(data.draw(plans(problem)), notes={"kept": 1})
    tried = {GIVEN: plan, **{name: order(problem, plan) for name, order in ORDERS.items()}}
    best = best_order(problem, plan)
    scores = {name: _score(problem, ordered) for name, ordered in tried.items()}
    assert _score(problem, best) == min(scores.values())
    assert scores[best.claims.order] == min(scores.values())
    assert best.notes["kept"] == 1


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_refinement_is_never_worse_than_the_bottom_levels_it_starts_from(data):
    problem = data.draw(problems(max_ops=12))
    plan = data.draw(plans(problem, orders=("none",)))
    before = _score(problem, bottom_level(problem, plan))
    assert _score(problem, critical_refined(problem, plan)) <= before


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_no_op_starts_after_its_latest_start_and_some_have_no_slack(data):
    problem = data.draw(problems(max_ops=10))
    evaluator = Evaluator(problem)
    score = evaluator.plan(data.draw(plans(problem)))
    latest_s = latest_starts(evaluator, keeps_order=True)
    alone_s = latest_starts(evaluator, keeps_order=False)
    tolerance_s = 1e-9 * max(score.step_s, 1.0)
    assert np.all(latest_s >= evaluator.op_start_s - tolerance_s)
    assert np.all(alone_s >= latest_s - tolerance_s), "fewer demands cannot mean earlier"
    is_last = evaluator.op_end_s >= score.step_s - tolerance_s
    slack_s = latest_s - evaluator.op_start_s
    assert np.all(slack_s[is_last] <= tolerance_s)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_holding_up_an_op_within_its_slack_does_not_make_the_step_longer(data):
    problem = data.draw(problems(max_ops=8, mode="parallel"))
    plan = data.draw(plans(problem, orders=("order",)))
    evaluator = Evaluator(problem)
    score = evaluator.plan(plan)
    slack_s = latest_starts(evaluator, keeps_order=True) - evaluator.op_start_s
    op = int(np.argmax(slack_s))
    op_s = problem.costs.op_s.copy()
    op_s[:, op] += max(slack_s[op], 0.0)
    slower = replace(problem, op_costs=replace(problem.costs, op_s=op_s))
    step_s = simulate(slower, plan).makespan_s
    assert step_s == pytest.approx(score.step_s, rel=1e-9, abs=1e-12)


def _forked():
    """A short op and the head of a long chain, both ready on one device; the chain goes away."""
    builder = GraphBuilder("fork")
    builder.op("short", reads=[])
    head = builder.op("head", reads=[])
    tensor = builder.tensor("sent", 0, producer=head)
    builder.op("rest", reads=[tensor])
    problem = problem_of(builder.build(), joined(2), np.array([1.0, 1.0, 5.0]))
    return problem, Plan().placing(np.array([0, 0, 1], np.int32))


def test_bottom_level_runs_the_head_of_the_long_chain_first():
    problem, plan = _forked()
    assert simulate(problem, topological(problem, plan)).makespan_s == 7.0
    assert simulate(problem, bottom_level(problem, plan)).makespan_s == 6.0
    assert best_order(problem, plan).claims.order == "bottom-level"


def test_earliest_start_prefers_what_could_start_first():
    problem, plan = _forked()
    priority = earliest_start(problem, plan).priority
    assert priority.tolist() == [1.0, 0.0, 2.0]


def test_of_equally_long_orders_the_one_with_less_memory_is_kept():
    builder = GraphBuilder("memory")
    small = [builder.op(f"make{index}", reads=[]) for index in range(2)]
    tensors = [builder.tensor(f"made{op}", 100, producer=op) for op in small]
    for tensor in tensors:
        builder.op(f"use{tensor}", reads=[tensor])
    problem = problem_of(builder.build(), joined(1), np.ones(4))
    wide = Plan().placing(np.zeros(4, np.int32), priority=np.arange(4.0))
    deep = wide.ordered(priority=np.array([0.0, 2.0, 1.0, 3.0]))
    assert simulate(problem, wide).peak_bytes[0] == 200
    assert simulate(problem, deep).peak_bytes[0] == 100
    kept = best_order(problem, deep, names=["topological"])
    assert kept.claims.order == GIVEN
    best = best_order(problem, wide)
    assert simulate(problem, best).peak_bytes[0] <= 200


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_order_needs_a_placement(order):
    problem = problem_of(generate("chain", 3), joined(1), np.ones(3))
    with pytest.raises(UsageError, match="does not say where"):
        order(problem, Plan())


def test_an_unknown_order_is_named():
    problem, plan = _forked()
    with pytest.raises(UsageError, match="bottom-levl"):
        best_order(problem, plan, names=["bottom-levl"])
