"""No plan beats the lower bound, and each part of it is what it says it is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.exhaustive import (
    constrained_problems,
    legal_placements,
    shortest_parallel_step_s,
    shortest_step_s,
)
from planners.golden import EXAMPLE_A, EXAMPLE_B
from simulate.problems import joined, placements, problem_of, problems

from hocket.base.errors import NoFeasiblePlanError
from hocket.graph import GraphBuilder, Role
from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.planners.bounds import lower_bound
from hocket.planners.bounds.step_bound import PATH, SERIAL, WORK, find_units, windows_s
from hocket.planners.placement.baselines import one_device
from hocket.planners.placement.m_topo import m_topo
from hocket.simulate.engine import simulate

DATA = Path(__file__).parents[3] / "shared" / "data" / "placement"
PUBLIC = sorted(DATA.rglob("LayerGraphs/*.json")) + sorted(DATA.rglob("profiles/*/graph.txt"))


def _bound_s(problem):
    try:
        return lower_bound(problem).seconds
    except NoFeasiblePlanError:
        assert next(legal_placements(problem), None) is None
        return np.inf


@given(problem=constrained_problems(max_ops=5, max_devices=3, mode="parallel"))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_no_plan_without_contention_beats_the_bound(problem):
    assert _bound_s(problem) <= shortest_parallel_step_s(problem)


@pytest.mark.parametrize("mode", ["queued", "shared"])
@given(problem=constrained_problems(max_ops=4, max_devices=2))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_no_plan_with_contention_beats_the_bound(problem, mode):
    problem = replace(problem, transfers=mode)
    assert _bound_s(problem) <= shortest_step_s(problem)


@given(
    problem=constrained_problems(max_ops=4, max_devices=3, mode="parallel"),
    memory_bytes=st.sampled_from([24, 100, 130, 250]),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_no_plan_that_fits_beats_the_bound(problem, memory_bytes):
    sizes = (memory_bytes, 2 * memory_bytes, 10**6)
    devices = tuple(
        replace(device, memory_bytes=size)
        for device, size in zip(problem.cluster.devices, sizes, strict=False)
    )
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    assert _bound_s(problem) <= shortest_step_s(problem)


@given(data=st.data(), problem=problems(max_ops=10))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_the_busiest_device_works_at_least_the_load_bound(data, problem):
    # Ops that change a tensor in place are with those that read it, in every legal plan.
    device_of = data.draw(placements(problem))[find_units(problem.graph).of_op]
    rows = problem.costs.device_row[device_of]
    seconds = problem.costs.op_s[rows, np.arange(len(device_of))]
    load_s = np.bincount(device_of, seconds, problem.cluster.num_devices)
    assert lower_bound(replace(problem, objective="throughput")).seconds <= load_s.max()


TIMES = st.floats(0, 10)


@given(st.lists(st.tuples(st.integers(0, 2), TIMES, TIMES, TIMES), min_size=1, max_size=7))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_windows_equal_the_best_of_all_subsets(ops):
    part, head_s, tail_s, work_s = (np.array(column) for column in zip(*ops, strict=True))
    found = windows_s(part.astype(np.int64), head_s, tail_s, work_s)
    for number in set(part.tolist()):
        members = np.flatnonzero(part == number)
        subsets = (
            members[[bool(mask >> bit & 1) for bit in range(len(members))]]
            for mask in range(1, 2 ** len(members))
        )
        expected = max(head_s[s].min() + work_s[s].sum() + tail_s[s].min() for s in subsets)
        assert found[number] == pytest.approx(expected)


def _split_chain(num_ops, tensor_bytes):
    """Two chains from one op to another."""
    builder = GraphBuilder("two chains")
    first = builder.op("first")
    left = right = builder.tensor("start", tensor_bytes, producer=first)
    for index in range(num_ops):
        op = builder.op(f"left{index}", reads=[left])
        left = builder.tensor(f"l{index}", tensor_bytes, producer=op)
        op = builder.op(f"right{index}", reads=[right])
        right = builder.tensor(f"r{index}", tensor_bytes, producer=op)
    builder.op("last", reads=[left, right])
    return builder.build()


@pytest.mark.parametrize(("tensor_bytes", "bound_s"), [(0, 5), (1, 6), (100, 8)])
def test_transfers_that_cannot_be_avoided_count(tensor_bytes, bound_s):
    # Transfers are free, take as long as an op, or longer than all ops on one device.
    problem = problem_of(_split_chain(3, tensor_bytes), joined(2), 1.0)
    assert lower_bound(problem).parts[PATH] == pytest.approx(bound_s)
    assert simulate(problem, one_device(problem, Plan())).makespan_s == 8


def test_one_device_needs_the_sum_of_its_ops():
    problem = make_problem(generate("layered", 50, 0), "1xt4")
    bound = lower_bound(problem)
    assert bound.seconds == bound.parts[bound.why] == max(bound.parts.values())
    assert bound.parts[WORK] == pytest.approx(problem.costs.op_s.sum())


def test_ops_of_a_group_follow_each_other():
    builder = GraphBuilder("group")
    for index in range(6):
        builder.op(f"op{index}", group=0 if index < 4 else -1)
    bound = lower_bound(problem_of(builder.build(), joined(3), 1.0))
    assert bound.parts[SERIAL] == pytest.approx(4)
    assert bound.seconds == pytest.approx(4)


def test_ops_that_update_a_parameter_join_its_first_reader():
    builder = GraphBuilder("update")
    weight = builder.tensor("w", 8, role=Role.PARAMETER)
    builder.op("read", reads=[weight])
    builder.op("other")
    update = builder.op("update", reads=[weight])
    builder.tensor("new w", 8, producer=update, role=Role.PARAMETER, alias_of=weight)
    units = find_units(builder.build())
    assert units.of_op.tolist() == [0, 1, 0]
    assert units.held_bytes.tolist() == [8, 0]


def test_published_examples_are_bounded_closely():
    assert lower_bound(EXAMPLE_A.problem(2)).seconds == pytest.approx(8)
    assert 34 <= lower_bound(EXAMPLE_B.problem(2)).seconds <= 36
    assert 26 - 1e-9 <= lower_bound(EXAMPLE_B.problem(3)).seconds <= 29


def test_the_bound_of_nothing_is_nothing():
    assert lower_bound(problem_of(GraphBuilder("empty").build(), joined(2), 1.0)).seconds == 0


@pytest.mark.skipif(not PUBLIC, reason="no ../shared/data beside the repository")
@pytest.mark.parametrize("cluster", ["4xv100-32g", "1xv100-32g+2xt4"])
def test_public_graphs_are_never_faster_than_the_bound(cluster):
    for path in PUBLIC:
        problem = make_problem(read_graph(path), cluster)
        for planner in (one_device, m_topo):
            step_s = simulate(problem, planner(problem, Plan())).makespan_s
            assert lower_bound(problem).seconds <= step_s
