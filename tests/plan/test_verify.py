"""verify() accepts what planners make and rejects each single change that breaks a rule."""

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import placements, problems

from hocket.api.planned import plan_graph
from hocket.base.errors import CheckError
from hocket.graph import GraphBuilder, Role
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Order, Placement
from hocket.plan.verify import contiguity_violations, raise_violations, structure_violations
from hocket.plan.violation import Violation
from hocket.simulate.verify import verify, violations


@pytest.fixture(scope="module")
def planned():
    return plan_graph(generate("transformer", 150, 0), "2xv100-16g", planners=["m-topo"])


def _rules(plan, problem):
    return {violation.rule for violation in violations(plan, problem)}


def test_verify_accepts_the_plan_of_a_planner(planned):
    verify(planned.plan, planned.problem)


def test_verify_names_an_unplaced_op(planned):
    device_of = planned.plan.device_of.copy()
    device_of[7] = 2
    with pytest.raises(CheckError, match="is on device 2, but there are 2") as caught:
        verify(planned.plan.having(Placement(device_of)), planned.problem)
    assert planned.problem.graph.op_names[7] in str(caught.value)


def test_verify_wants_one_placement_per_op(planned):
    plan = planned.plan.having(Placement(planned.plan.device_of[:-1]))
    assert _rules(plan, planned.problem) == {"placed"}
    unplaced = planned.plan.without(Placement)
    assert _rules(unplaced.without(Order), planned.problem) == {"placed"}
    assert _rules(unplaced, planned.problem) == {"placed", "order"}


def test_verify_keeps_groups_together(planned):
    group = np.full(planned.problem.graph.num_ops, -1, dtype=np.int32)
    group[[3, 8]] = 5
    graph = replace(planned.problem.graph, group=group)
    problem = replace(planned.problem, work=graph)
    device_of = planned.plan.device_of.copy()
    device_of[[3, 8]] = 0, 1
    found = violations(replace(planned.plan, work_hash="").having(Placement(device_of)), problem)
    assert [violation.rule for violation in found] == ["groups"]
    assert found[0].op == graph.op_names[8]
    assert found[0].device == "gpu1"
    assert graph.op_names[3] in found[0].message


def test_verify_refuses_another_graph_or_cluster(planned):
    assert "identity" in _rules(replace(planned.plan, work_hash="f" * 64), planned.problem)
    assert "identity" in _rules(replace(planned.plan, cluster_hash="f" * 64), planned.problem)


def test_verify_finds_memory_above_capacity(planned):
    cluster = planned.problem.cluster
    small = replace(
        cluster, devices=tuple(replace(device, memory_bytes=1000) for device in cluster.devices)
    )
    problem = replace(planned.problem, cluster=small)
    found = violations(replace(planned.plan, cluster_hash=""), problem)
    assert {violation.rule for violation in found} == {"memory"}
    assert {violation.device for violation in found} == {"gpu0", "gpu1"}
    assert all(violation.op in problem.graph.op_names for violation in found)


def _two_step_problem():
    builder = GraphBuilder("two")
    x = builder.tensor("x", 8, role=Role.INPUT)
    a = builder.op("a", reads=[x])
    y = builder.tensor("y", 8, producer=a)
    b = builder.op("b", reads=[y])
    builder.tensor("z", 8, producer=b)
    return make_problem(builder.build(), "2xv100-16g")


def _plan(order, device_of=(0, 0)):
    arrays = tuple(np.array(sequence, dtype=np.int32) for sequence in order)
    return Plan().placing(np.array(device_of, dtype=np.int32), by_device=arrays)


def test_verify_finds_an_order_that_contradicts_a_dependency():
    problem = _two_step_problem()
    verify(_plan([[0, 1], []]), problem)
    found = list(structure_violations(_plan([[1, 0], []]), problem))
    assert [violation.rule for violation in found] == ["precedence"]


@pytest.mark.parametrize("order", [[[0], []], [[0, 1, 1], []], [[0], [1]], [[0, 1]], [[0, 5], []]])
def test_verify_wants_each_op_once_in_the_order_of_its_device(order):
    assert "order" in _rules(_plan(order), _two_step_problem())


def test_verify_refuses_order_together_with_priority():
    by_device = _plan([[0, 1], []]).by_device
    plan = _plan([[0, 1], []]).ordered(by_device=by_device, priority=np.zeros(2))
    assert "order" in _rules(plan, _two_step_problem())


def test_verify_refuses_an_op_on_a_device_that_cannot_run_it():
    problem = _two_step_problem()
    op_s = problem.costs.op_s.copy()
    op_s[:, 1] = np.inf
    costs = replace(problem.costs, op_s=op_s)
    plan = Plan().placing(np.zeros(2, dtype=np.int32))
    assert _rules(plan, replace(problem, op_costs=costs)) == {"can run"}


def test_verify_wants_in_place_updates_where_the_tensor_lives():
    builder = GraphBuilder("update")
    weight = builder.tensor("w", 8, role=Role.PARAMETER)
    use = builder.op("use", reads=[weight])
    gradient = builder.tensor("g", 8, producer=use, role=Role.GRADIENT)
    update = builder.op("update", reads=[weight, gradient])
    builder.tensor("w.new", 8, producer=update, role=Role.PARAMETER, alias_of=weight)
    problem = make_problem(builder.build(), "2xv100-16g")
    verify(Plan().placing(np.array([0, 0], dtype=np.int32)), problem)
    found = violations(Plan().placing(np.array([0, 1], dtype=np.int32)), problem)
    assert [violation.rule for violation in found] == ["updates"]
    assert "'w', which lives on 'gpu0'" in found[0].message


@given(data=st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_random_placements_break_only_the_rules_they_break(data):
    problem = data.draw(problems(has_streams=True))
    device_of = np.asarray(data.draw(placements(problem)), dtype=np.int32)
    found = violations(Plan().placing(device_of), problem)
    group = problem.graph.group
    split = any(
        len(set(device_of[group == number].tolist())) > 1 for number in set(group[group >= 0])
    )
    assert ("groups" in {violation.rule for violation in found}) == split


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_contiguity_is_what_paths_say(data):
    problem = data.draw(problems(max_ops=7, max_devices=3, has_streams=True))
    device_of = data.draw(placements(problem))
    walk = nx.DiGraph(zip(*(side.tolist() for side in problem.graph.edges), strict=True))
    walk.add_nodes_from(range(problem.graph.num_ops))
    returns = {
        int(device_of[first])
        for first in walk
        for between in nx.descendants(walk, first)
        for last in nx.descendants(walk, between)
        if device_of[first] == device_of[last] != device_of[between]
    }
    found = contiguity_violations(device_of, problem)
    names = problem.cluster.device_names
    assert {violation.device for violation in found} == {names[device] for device in returns}


def test_only_a_contiguous_problem_refuses_paths_that_come_back():
    problem = make_problem(generate("chain", 9, 0), "2xv100-16g")
    plan = Plan().placing(np.array([0, 1] * 5, dtype=np.int32)[: problem.graph.num_ops])
    assert violations(plan, problem) == []
    assert _rules(plan, replace(problem, contiguous=True)) == {"contiguous"}


def test_of_many_violations_three_are_told_and_the_rest_counted():
    found = [Violation("memory", f"rule {number}") for number in range(5)]
    with pytest.raises(CheckError) as caught:
        raise_violations(found, "mine")
    assert caught.value.message == "rule 0; rule 1; rule 2 (and 2 more)"
    with pytest.raises(CheckError, match=r": rule 0; rule 1; rule 2$"):
        raise_violations(found[:3], "mine")
