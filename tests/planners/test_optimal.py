"""The exact planner equals trying everything, and claims no more than it has proven."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.exhaustive import constrained_problems, shortest_parallel_step_s, shortest_step_s
from planners.golden import EXAMPLE_A, EXAMPLE_B

from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.planners.bounds import lower_bound
from hocket.planners.compare import compare
from hocket.planners.placement.exact import (
    MAX_OPS,
    PROVEN_GAP,
    interchangeable,
    optimal,
)
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


def cp_sat_step_s(problem):
    """The shortest step by OR-tools, for whole seconds, free memory and transfers side by side."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    graph, num_devices = problem.graph, problem.cluster.num_devices
    seconds = problem.costs.op_s[problem.costs.device_row].astype(int)
    model = cp_model.CpModel()
    longest = 10 * int(seconds.max(axis=0).sum()) + 1000
    start = [model.new_int_var(0, longest, f"start {op}") for op in range(graph.num_ops)]
    end = [model.new_int_var(0, longest, f"end {op}") for op in range(graph.num_ops)]
    here = [[model.new_bool_var(f"{op} on {device}") for device in range(num_devices)]
            for op in range(graph.num_ops)]  # fmt: skip
    for op in range(graph.num_ops):
        model.add_exactly_one(here[op])
    for device in range(num_devices):
        model.add_no_overlap(
            [
                model.new_optional_interval_var(
                    start[op], int(seconds[device, op]), end[op], here[op][device], f"{op}@{device}"
                )
                for op in range(graph.num_ops)
            ]
        )
    for tensor in range(graph.num_tensors):
        maker = int(graph.tensor_producer[tensor])
        if maker < 0:
            continue
        for reader in np.flatnonzero([tensor in graph.reads_of(op) for op in range(graph.num_ops)]):
            for src in range(num_devices):
                for dst in range(num_devices):
                    delay = 0 if src == dst else int(problem.costs.transfer_s(tensor, src, dst))
                    model.add(start[reader] >= end[maker] + delay).only_enforce_if(
                        here[maker][src], here[reader][dst]
                    )
    step = model.new_int_var(0, longest, "step")
    model.add_max_equality(step, end)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


@pytest.mark.parametrize(("example", "num_devices"), [(EXAMPLE_A, 2), (EXAMPLE_B, 2)])
def test_optimal_equals_a_constraint_solver(example, num_devices):
    problem = example.problem(num_devices)
    assert simulate(problem, optimal(problem, Plan())).makespan_s == cp_sat_step_s(problem)


def test_unequal_devices_are_not_exchanged():
    problem = make_problem(generate("chain", 4, 0), "1xv100-16g+3xt4")
    assert interchangeable(replace(problem, transfers="parallel")) == [[0], [1, 2, 3]]
    assert interchangeable(replace(problem, transfers="queued")) == [[0], [1], [2], [3]]
