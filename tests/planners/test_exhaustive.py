"""What trying every plan finds is the shortest step there is, and it stops."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planners.exhaustive import constrained_problems, shortest_step_s
from planners.tight_cases import tight_problem

from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.planners import find_planner
from hocket.planners.bounds import lower_bound
from hocket.planners.placement.exact import (
    all_placements,
    can_be_tried,
    is_tiny,
    optimal,
    try_all,
)
from hocket.simulate.engine import simulate
from hocket.simulate.verify import violations

ENOUGH = 1_000_000


def _step_s(problem, plan):
    """The step of a plan that breaks no rule; infinite for no plan."""
    if plan is None:
        return np.inf
    assert violations(plan, problem) == []
    return simulate(problem, plan).makespan_s


@pytest.mark.parametrize("seed", range(24))
def test_the_shortest_step_of_tight_problems_is_found(seed):
    problem = tight_problem(seed, num_ops=5)
    answer = try_all(problem, Plan(), ENOUGH)
    assert answer.is_complete
    assert _step_s(problem, answer.plan) == shortest_step_s(problem)
    assert answer.bound_s == pytest.approx(_step_s(problem, answer.plan), rel=1e-8)


@pytest.mark.parametrize("seed", [40_051, *range(40_060, 40_066)])
def test_equal_devices_are_not_exchanged_where_copies_queue_in_their_order(seed):
    problem = replace(tight_problem(seed, num_ops=4, num_devices=3), transfers="queued")
    answer = try_all(problem, Plan(), ENOUGH)
    assert _step_s(problem, answer.plan) == shortest_step_s(problem)


@given(problem=constrained_problems(max_ops=4, max_devices=3))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_groups_and_devices_that_cannot_run_an_op_are_kept_to(problem):
    assume(is_tiny(problem))  # no second stream
    answer = try_all(problem, Plan(), ENOUGH)
    assert _step_s(problem, answer.plan) == pytest.approx(shortest_step_s(problem), rel=1e-9)


def test_little_work_gives_a_plan_and_a_bound_that_hold():
    problem = tight_problem(8, num_ops=9)
    best_s = _step_s(problem, try_all(problem, Plan(), ENOUGH).plan)
    for max_runs in (1, 30, 100):
        answer = try_all(problem, Plan(), max_runs)
        assert answer.bound_s <= best_s <= _step_s(problem, answer.plan)


def test_only_what_is_better_than_the_known_step_is_an_answer():
    problem = tight_problem(3, num_ops=5)
    best_s = _step_s(problem, try_all(problem, Plan(), ENOUGH).plan)
    again = try_all(problem, Plan(), ENOUGH, known_s=best_s)
    assert (again.plan, again.is_complete) == (None, True)
    assert again.bound_s == pytest.approx(best_s, rel=1e-8)


@given(problem=constrained_problems(max_ops=5, max_devices=3), share=st.floats(1.0, 1.6))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_growing_drops_no_placement_that_may_be_shorter(problem, share):
    every = all_placements(problem, ENOUGH)
    known_s = share * float(every.bound_s.min(initial=np.inf))
    found = all_placements(problem, ENOUGH, known_s)
    assert found.rows.tolist() == every.rows[every.bound_s < known_s].tolist()


def test_a_known_step_leaves_few_placements_of_many():
    problem = make_problem(generate("series-parallel", 16, 3), "4xt4")
    assert can_be_tried(problem)
    assert not is_tiny(problem)
    known_s = _step_s(problem, find_planner("m-sct")(problem, Plan()))
    assert all_placements(problem, 1_000) is None
    assert len(all_placements(problem, 1_000, known_s).bound_s) < 100
    answer = try_all(problem, Plan(), 20_000, known_s)
    assert answer.is_complete
    assert lower_bound(problem).seconds <= _step_s(problem, answer.plan) < known_s
    assert answer.bound_s == pytest.approx(_step_s(problem, answer.plan), rel=1e-8)


@pytest.mark.parametrize("op", [0, 2, 4])
def test_an_op_that_no_device_can_run_leaves_no_plan(op):
    problem = tight_problem(3, num_ops=5)
    op_s = problem.costs.op_s.copy()
    op_s[:, op] = np.inf
    answer = try_all(replace(problem, op_costs=replace(problem.costs, op_s=op_s)), Plan(), ENOUGH)
    assert (answer.plan, answer.bound_s, answer.is_complete) == (None, np.inf, True)


def test_large_graphs_are_not_tried():
    assert is_tiny(make_problem(generate("chain", 6, 0), "2xt4"))
    assert not is_tiny(make_problem(generate("chain", 12, 0), "8xt4"))
    assert not is_tiny(make_problem(generate("chain", 40, 0), "2xt4"))


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_optimal_proves_what_is_tight(seed):
    problem = tight_problem(seed, num_ops=8)
    plan = optimal(problem, Plan())
    assert plan.claims.proven
    assert _step_s(problem, plan) == _step_s(problem, try_all(problem, Plan(), ENOUGH).plan)
