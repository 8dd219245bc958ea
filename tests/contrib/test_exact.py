"""The exact planner equals trying everything, and claims no more than it has proven."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.exhaustive import constrained_problems, shortest_parallel_step_s, shortest_step_s
from planners.golden import EXAMPLE_A, EXAMPLE_B
from simulate.problems import joined, problem_of

from hocket.api import make_problem
from hocket.base.errors import MissingExtraError, NoFeasiblePlanError, UsageError
from hocket.contrib.exact.instance import make_instance
from hocket.contrib.exact.planner import MAX_OPS, PROVEN_GAP, optimal
from hocket.graph.generators import generate
from hocket.plan.plan import Plan
from hocket.planners.bounds import lower_bound
from hocket.planners.bounds.units import find_units
from hocket.planners.compare import compare
from hocket.planners.placement.exact.symmetry import first_use_order, interchangeable
from hocket.planners.tables import task_table
from hocket.simulate.engine import simulate
from hocket.simulate.verify import violations


@pytest.mark.parametrize(
    ("example", "num_devices", "memory_bytes", "step_s"),
    [
        (EXAMPLE_A, 2, 100, 8),
        (EXAMPLE_A, 2, 5, 9),
        (EXAMPLE_B, 2, 100, 36),
        (EXAMPLE_B, 3, 100, 29),
    ],
    ids=["A", "A with little memory", "B on 2", "B on 3"],
)
def test_optimal_proves_the_published_optimum(example, num_devices, memory_bytes, step_s):
    problem = example.problem(num_devices, memory_bytes=memory_bytes)
    plan = optimal(problem, Plan())
    assert simulate(problem, plan).makespan_s == step_s
    assert plan.claims.proven
    assert plan.claims.step_bound_s == pytest.approx(step_s)


def test_what_is_proven_is_the_bound_that_is_shown():
    comparison = compare(EXAMPLE_B.problem(3), ["optimal"])
    assert comparison.bound.seconds == pytest.approx(29)
    assert comparison.bound.why == "proven by optimal"
    assert comparison.gap <= PROVEN_GAP


def test_what_is_proven_of_a_load_does_not_bound_a_step():
    problem = EXAMPLE_B.problem(3)
    assert compare(problem, ["throughput"]).bound.seconds == lower_bound(problem).seconds


@pytest.mark.parametrize("duplex", ["half", "full"])
@pytest.mark.parametrize(("memory_bytes", "step_s"), [(100, 8), (5, 9)])
def test_optimal_proves_example_a_with_queues(duplex, memory_bytes, step_s):
    problem = EXAMPLE_A.problem(2, memory_bytes=memory_bytes, transfers="queued", duplex=duplex)
    plan = optimal(problem, Plan())
    assert simulate(problem, plan).makespan_s == step_s
    assert plan.claims.proven


def test_queues_in_order_of_readiness_make_example_b_longer():
    # 36 needs a queue that lets a later tensor go first; the simulator's queues do not.
    problem = EXAMPLE_B.problem(2, transfers="queued", duplex="half")
    plan = optimal(problem, Plan())
    assert plan.claims.proven
    assert simulate(problem, plan).makespan_s == 38


def _checked(problem, shortest_s):
    """The claims of the optimal plan, which is legal and as good as they say; None for none."""
    try:
        plan = optimal(problem, Plan(planner="optimal"))
    except NoFeasiblePlanError:
        assert shortest_s == np.inf
        return None
    assert violations(plan, problem) == []
    step_s = simulate(problem, plan).makespan_s
    assert plan.claims.step_bound_s <= shortest_s <= step_s * (1 + 1e-12)
    if step_s > 0:
        assert plan.claims.gap == pytest.approx(1 - plan.claims.step_bound_s / step_s)
    if plan.claims.proven:
        assert step_s <= shortest_s * (1 + PROVEN_GAP)
    return plan.claims


@given(problem=constrained_problems(max_ops=6, max_devices=2, mode="parallel"))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_optimal_equals_trying_everything(problem):
    claims = _checked(problem, shortest_parallel_step_s(problem))
    assert claims is None or claims.proven


@given(problem=constrained_problems(max_ops=4, max_devices=3, mode="queued"))
@settings(derandomize=True, deadline=None, max_examples=15)
def test_optimal_equals_trying_everything_with_queues(problem):
    claims = _checked(problem, shortest_step_s(problem))
    assert claims is None or claims.proven


@given(problem=constrained_problems(max_ops=4, max_devices=2, mode="shared"))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_optimal_keeps_its_word_with_shared_channels(problem):
    _checked(problem, shortest_step_s(problem))


@pytest.mark.parametrize("mode", ["parallel", "queued"])
@given(
    problem=constrained_problems(max_ops=4, max_devices=2),
    memory_bytes=st.sampled_from([30, 60, 130, 200]),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_optimal_keeps_its_word_with_little_memory(problem, memory_bytes, mode):
    problem = replace(problem, transfers=mode)
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in problem.cluster.devices)
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    _checked(problem, shortest_step_s(problem))


@pytest.mark.parametrize("transfers", ["parallel", "queued"])
def test_optimal_is_deterministic_and_never_below_the_bound(transfers):
    problem = make_problem(generate("layered", 14, 3), "1xv100-16g+1xt4")
    problem = replace(problem, transfers=transfers)
    first, second = optimal(problem, Plan()), optimal(problem, Plan())
    assert np.array_equal(first.device_of, second.device_of)
    assert first.claims == second.claims
    assert first.claims.proven
    assert lower_bound(problem).seconds <= simulate(problem, first).makespan_s


def test_optimal_refuses_what_is_too_large():
    problem = make_problem(generate("chain", MAX_OPS + 1, 0), "2xt4")
    with pytest.raises(UsageError, match=f"up to {MAX_OPS} ops") as caught:
        optimal(problem, Plan())
    assert "auto" in caught.value.hint


def test_optimal_refuses_other_objectives():
    problem = make_problem(generate("chain", 4, 0), "2xt4")
    for changed in (replace(problem, objective="throughput"), replace(problem, contiguous=True)):
        with pytest.raises(UsageError, match="time of one step"):
            optimal(changed, Plan())


def test_optimal_names_the_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools", None)
    with pytest.raises(MissingExtraError, match="exact planner needs ortools"):
        optimal(make_problem(generate("chain", 4, 0), "2xt4"), Plan())


@given(
    step_s=st.floats(1e-6, 1e3),
    seconds=st.lists(st.floats(0, 1), min_size=2, max_size=9),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_ticks_of_a_sum_are_no_fewer_than_the_sum_of_ticks(step_s, seconds):
    graph = generate("chain", len(seconds), 0)
    problem = problem_of(graph, joined(2), np.array(seconds))
    instance = make_instance(problem, task_table(problem), find_units(graph), step_s)
    ticks = instance.ticks(np.array([sum(seconds), *seconds])).tolist()
    assert ticks[0] >= sum(ticks[1:])


def test_unequal_devices_are_not_exchanged():
    problem = make_problem(generate("chain", 4, 0), "1xv100-16g+3xt4")
    sets = interchangeable(problem, task_table(problem), frozenset())
    assert sets == [[0], [1, 2, 3]]
    fixed = interchangeable(problem, task_table(problem), frozenset({1}))
    assert fixed == [[0], [1], [2, 3]]
    renamed = first_use_order(np.array([3, 0, 3, 1], dtype=np.int32), sets)
    assert renamed.tolist() == [1, 0, 1, 2]
