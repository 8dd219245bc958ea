"""Planning on coarse graphs: the small problem tells the truth, its plans are plans of the ops."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from graph.training_graphs import training_graphs, units_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import DURATIONS, clusters, costs_of, joined, numbers, problem_of, problems

from hocket.base.errors import NoFeasiblePlanError
from hocket.cost.costs import TimeSource
from hocket.graph import GraphBuilder, Phase, generate, read_graph
from hocket.graph.coarsen import bound_ops, co_placed, forward_only, fuse
from hocket.graph.verify import verify_graph
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.coarse import (
    coarse_problem,
    coarsely,
    coarsened,
    expand,
    forward_coarsely,
    forward_coarsened,
)
from hocket.planners.placement.m_topo import m_topo
from hocket.simulate.engine import simulate
from hocket.simulate.verify import violations

DATA = Path(__file__).parents[3] / "shared" / "data" / "placement"
PUBLIC = sorted(
    [*(DATA / "dnn-partitioning").glob("throughput-inputs/*/*.json"),
     *(DATA / "pipedream").rglob("graph.txt")]
)  # fmt: skip
COARSENINGS = {"fused": coarsened, "forward": forward_coarsened}


@st.composite
def training_problems(draw):
    graph, cluster = draw(training_graphs()), draw(clusters())
    count = len(cluster.kinds) * graph.num_ops
    op_s = numbers(draw, count, DURATIONS)
    costs = costs_of(graph, cluster, op_s.reshape(len(cluster.kinds), graph.num_ops))
    return Problem(work=graph, cluster=cluster, op_costs=costs, transfers="queued")


@st.composite
def coarse_plans(draw, problem, coarse):
    """A placement of nodes that keeps groups together, perhaps with an order or priorities."""
    last = problem.cluster.num_devices - 1
    count = coarse.graph.num_ops
    device_of = np.array(draw(st.lists(st.integers(0, last), min_size=count, max_size=count)))
    for group in set(coarse.graph.group[coarse.graph.group >= 0].tolist()):
        device_of[coarse.graph.group == group] = device_of[coarse.graph.group == group][0]
    plan = Plan(planner="drawn").placing(device_of.astype(np.int32))
    form = draw(st.sampled_from(["none", "priority", "order"]))
    if form == "priority":
        keys = draw(st.lists(st.integers(0, 3).map(float), min_size=count, max_size=count))
        return plan.ordered(priority=np.array(keys))
    order = tuple(np.flatnonzero(device_of == device) for device in range(last + 1))
    return plan.ordered(by_device=order) if form == "order" else plan


def _broken(plan, problem):
    return [violation for violation in violations(plan, problem) if violation.rule != "memory"]


@pytest.mark.parametrize("name", COARSENINGS)
@given(data=st.data())
@settings(derandomize=True, deadline=None, max_examples=50)
def test_every_legal_plan_of_the_coarse_problem_expands_to_a_legal_plan(name, data):
    problem = data.draw(training_problems())
    coarse = COARSENINGS[name](problem)
    verify_graph(coarse.graph)
    plan = data.draw(coarse_plans(problem, coarse))
    assert _broken(expand(problem, coarse, plan), problem) == []


@pytest.mark.parametrize("make", [fuse, forward_only])
@given(data=st.data())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_units_that_contain_what_is_bound_keep_the_law_whatever_else_they_join(make, data):
    problem = data.draw(training_problems())
    graph = problem.graph
    bound = bound_ops(graph)
    units = data.draw(units_of(graph))[np.unique(bound, return_index=True)[1]][bound]
    coarse = make(graph, units, np.ones(graph.num_ops))
    plan = data.draw(coarse_plans(problem, coarse))
    assert _broken(expand(problem, coarse, plan), problem) == []


@given(problem=training_problems())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_times_of_ops_are_conserved_for_every_kind(problem):
    for coarsen in COARSENINGS.values():
        coarse = coarsen(problem)
        small = coarse_problem(problem, coarse)
        for fine_s, coarse_s in zip(problem.costs.op_s, small.costs.op_s, strict=True):
            assert coarse_s.sum() == pytest.approx(fine_s.sum())
            for node in range(coarse.graph.num_ops):
                assert coarse_s[node] == pytest.approx(fine_s[coarse.node_of == node].sum())


@given(problem=problems())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_wrapped_planners_are_legal_and_deterministic(problem):
    for wrap in (coarsely, forward_coarsely):
        try:
            plan = wrap(m_topo)(problem, Plan(planner="m-topo"))
        except NoFeasiblePlanError:
            continue
        assert _broken(plan, problem) == []
        again = wrap(m_topo)(problem, Plan(planner="m-topo"))
        assert np.array_equal(plan.device_of, again.device_of)


def test_a_node_that_no_device_of_a_kind_can_run_stays_impossible_there():
    problem = problem_of(generate("chain", 6), joined(2), np.ones(6))
    op_s = problem.costs.op_s.copy()
    op_s[0, 2] = np.inf
    source = np.full(op_s.shape, TimeSource.PROFILE, dtype=np.uint8)
    source[0, 3] = TimeSource.MODEL
    problem = replace(problem, op_costs=replace(problem.costs, op_s=op_s, op_source=source))
    units = np.array([0, 0, 1, 1, 2, 2], dtype=np.int32)
    costs = coarse_problem(problem, fuse(problem.graph, units, np.ones(6))).costs
    assert costs.op_s.tolist() == [[2.0, np.inf, 2.0]]
    assert costs.op_source.tolist() == [[TimeSource.PROFILE, TimeSource.MODEL, TimeSource.PROFILE]]


def test_bytes_sent_are_those_that_leave_each_counted_once():
    builder = GraphBuilder("sent")
    source = builder.op("product", flops=1.0)
    whole = builder.tensor("whole", 30, producer=source)
    views = [builder.op(f"view{index}", reads=[whole]) for index in range(2)]
    pieces = [
        builder.tensor(f"piece{index}", 10, producer=view, alias_of=whole)
        for index, view in enumerate(views)
    ]
    readers = [builder.op(f"reader{i}", reads=[piece], flops=1.0) for i, piece in enumerate(pieces)]
    problem = problem_of(builder.build(), joined(2), np.ones(5))
    assert readers == [3, 4]
    coarse = fuse(problem.graph, np.array([0, 0, 0, 1, 2], dtype=np.int32), np.ones(5))
    small = coarse_problem(problem, coarse)
    assert small.graph.tensor_bytes.tolist() == [30]
    assert small.costs.tensor_bytes.tolist() == [20]


def test_an_order_of_nodes_becomes_priorities_of_ops():
    problem = problem_of(generate("chain", 4), joined(1), np.ones(4))
    coarse = fuse(problem.graph, np.array([0, 0, 1, 1], dtype=np.int32), np.ones(4))
    plan = Plan(
        planner="p",
        work_hash=coarse.graph.content_hash,
        cluster_hash=problem.cluster.content_hash,
        notes={"said": 1},
    ).placing(np.zeros(2, dtype=np.int32), by_device=(np.array([0, 1], dtype=np.int32),))
    expanded = expand(problem, coarse, plan)
    assert expanded.by_device is None
    assert expanded.priority.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert (expanded.planner, expanded.notes) == ("p", {"said": 1})
    assert expanded.work_hash == problem.graph.content_hash
    assert _broken(expanded, problem) == []


def test_later_ops_of_a_forward_node_come_in_the_mirrored_order():
    graph = generate("transformer", 200, 0)
    problem = problem_of(graph, joined(2), np.ones(graph.num_ops))
    coarse = forward_coarsened(problem)
    count = coarse.graph.num_ops
    plan = Plan().placing(np.zeros(count, dtype=np.int32), priority=np.arange(count, dtype=float))
    priority = expand(problem, coarse, plan).priority
    by_phase = [priority[graph.op_phase == phase] for phase in Phase]
    assert by_phase[0].max() < by_phase[1].min()
    assert by_phase[1].max() < by_phase[2].min()
    backward = graph.op_phase == Phase.BACKWARD
    assert np.all(np.diff(priority[backward][np.argsort(coarse.node_of[backward])]) <= 0)


@pytest.mark.parametrize(("family", "num_ops"), [("transformer", 1200), ("gnmt", 1200)])
@pytest.mark.parametrize("name", COARSENINGS)
def test_training_steps_become_smaller_and_stay_legal(name, family, num_ops):
    problem = make_problem(generate(family, num_ops, 3), "4xv100-16g")
    coarse = COARSENINGS[name](problem)
    small = coarse_problem(problem, coarse)
    assert coarse.graph.num_ops < problem.graph.num_ops
    assert name == "fused" or coarse.graph.num_ops <= problem.graph.num_ops // 2
    on_one = Plan().placing(np.zeros(coarse.graph.num_ops, dtype=np.int32))
    expanded = expand(problem, coarse, on_one)
    step_s = simulate(problem, expanded).makespan_s
    assert simulate(small, on_one).makespan_s == pytest.approx(step_s)
    random = np.random.default_rng(5)
    unit_device = random.integers(0, 4, coarse.graph.num_ops)
    group = coarse.graph.group
    device_of = np.where(group >= 0, unit_device[group % len(group)], unit_device)
    plan = expand(problem, coarse, Plan().placing(device_of.astype(np.int32)))
    assert _broken(plan, problem) == []


def test_no_unit_of_a_large_step_is_too_large_to_even_out_loads():
    problem = make_problem(generate("transformer", 3000, 0), "4xv100-16g")
    op_s = problem.costs.op_s.min(axis=0)
    coarse = coarsened(problem)
    units = co_placed(problem.graph, op_s, max_group_s=0.0, max_group_bytes=0)
    forced_s = np.bincount(units, op_s).max()
    group = np.where(
        coarse.graph.group >= 0, coarse.graph.group, -1 - np.arange(len(coarse.graph.group))
    )
    _, unit_of_node = np.unique(group, return_inverse=True)
    unit_s = np.bincount(unit_of_node[coarse.node_of], op_s)
    assert unit_s.max() <= max(forced_s, op_s.sum() / 32) * (1 + 1e-9)
    assert len(unit_s) >= 32


@pytest.mark.skipif(not PUBLIC, reason="no ../shared/data beside the repository")
@pytest.mark.parametrize("name", COARSENINGS)
def test_published_graphs_become_smaller_and_stay_legal(name):
    for path in PUBLIC:
        problem = make_problem(read_graph(path), "4xv100-32g")
        coarse = COARSENINGS[name](problem)
        verify_graph(coarse.graph)
        assert coarse.graph.num_ops <= problem.graph.num_ops
        plan = m_topo(coarse_problem(problem, coarse), Plan())
        assert _broken(expand(problem, coarse, plan), problem) == []
