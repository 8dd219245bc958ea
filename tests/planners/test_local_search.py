"""Local search: legal, deterministic, never worse, and near the optimum where that is known."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import costs_of, device, device_kind, joined, plans, problem_of, problems

from hocket.base.errors import UsageError
from hocket.graph import GraphBuilder
from hocket.graph.generators import generate
from hocket.hardware import Cluster
from hocket.plan.plan import Plan
from hocket.planners.placement.local_search import local_search
from hocket.simulate.engine import simulate
from hocket.simulate.evaluate import Evaluator
from hocket.simulate.verify import violations


def _score(problem, plan):
    return Evaluator(problem).plan(plan)


def _require_legal(problem, plan):
    assert [v for v in violations(plan, problem) if v.rule != "memory"] == []


def _with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    kind = device_kind("small", memory_bytes)
    return replace(cluster, devices=tuple(device(d.name, kind) for d in cluster.devices))


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=8)
def test_the_result_is_legal_and_never_worse(data):
    problem = data.draw(problems(max_ops=8, max_devices=3))
    plan = data.draw(plans(problem))
    if any(v.rule != "memory" for v in violations(plan, problem)):
        return
    found = local_search(problem, plan)
    _require_legal(problem, found)
    assert _score(problem, found) <= _score(problem, plan)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=8)
def test_the_result_is_legal_where_memory_is_lacking(data):
    problem = data.draw(problems(max_ops=8, max_devices=3))
    problem = replace(problem, cluster=_with_memory(problem.cluster, 24))
    plan = data.draw(plans(problem))
    if any(v.rule != "memory" for v in violations(plan, problem)):
        return
    found = local_search(problem, plan)
    _require_legal(problem, found)
    assert _score(problem, found).step_s < np.inf


@pytest.mark.parametrize(
    ("family", "num_ops", "transfers"),
    [("gnmt", 300, "parallel"), ("layered", 90, "shared"), ("layered", 20, "queued")],
)
def test_it_is_deterministic_legal_and_better_than_blocks(family, num_ops, transfers):
    graph = generate(family, num_ops)
    op_s = 1e-5 + graph.flops / 1e13
    problem = problem_of(graph, joined(4, 1e10, 1e-5), op_s, transfers)
    device_of = (np.arange(graph.num_ops) * 4 // graph.num_ops).astype(np.int32)
    together = np.zeros(graph.num_ops, np.int32)
    start = Plan().placing(device_of if family == "layered" else together)
    one, other = local_search(problem, start), local_search(problem, start)
    np.testing.assert_array_equal(one.device_of, other.device_of)
    assert (one.priority is None) == (other.priority is None)
    if one.priority is not None:
        np.testing.assert_array_equal(one.priority, other.priority)
    _require_legal(problem, one)
    assert _score(problem, one).step_s < 0.9 * _score(problem, start).step_s


def _shortest_s(problem):
    """Over all placements and all strict orders."""
    evaluator, num_ops = Evaluator(problem), problem.graph.num_ops
    placements = product(range(problem.cluster.num_devices), repeat=num_ops)
    orders = [np.array(order, dtype=float) for order in permutations(range(num_ops))]
    return min(
        evaluator(np.array(devices, np.int32), order, is_strict=True).step_s
        for devices in placements
        for order in orders
    )


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_optimum_of_five_ops(seed):
    graph = generate("layered" if seed % 2 else "series-parallel", 5, seed)
    random = np.random.default_rng(seed)
    tensor_s = random.choice([0.2, 1.0, 3.0], graph.num_tensors)
    cluster = joined(2)
    costs = costs_of(graph, cluster, random.choice([0.5, 1.0, 2.0], (1, 5)), tensor_s)
    problem = replace(problem_of(graph, cluster, np.ones(5), "parallel"), op_costs=costs)
    found = local_search(problem, Plan().placing(np.arange(5, dtype=np.int32) % 2))
    assert _score(problem, found).step_s == pytest.approx(_shortest_s(problem), rel=1e-9)


CASE_A = {  # op: (time, {child: communication})
    0: (1, {1: 1, 4: 1}), 1: (3, {2: 1}), 2: (3, {3: 1}),
    3: (1, {}), 4: (3, {5: 1}), 5: (1, {3: 1}),
}  # fmt: skip
CASE_B = {
    0: (6, {2: 1, 3: 5, 4: 2}), 1: (7, {2: 1, 3: 1, 4: 1}), 2: (9, {5: 5, 6: 3}),
    3: (8, {5: 4, 6: 1, 7: 5}), 4: (10, {8: 1}), 5: (6, {}), 6: (6, {}), 7: (10, {}), 8: (6, {}),
}  # fmt: skip


def _published(case, num_devices, transfers):
    order = [0, 1, 2, 4, 5, 3] if case is CASE_A else sorted(case)
    builder, tensor_s, made = GraphBuilder("published"), [], {}
    for op in order:
        parents = [parent for parent in case if op in case[parent][1]]
        number = builder.op(f"op{op}", reads=[made[parent, op] for parent in parents])
        for child, seconds in case[op][1].items():
            made[op, child] = builder.tensor(f"{op}-{child}", 1, producer=number)
            tensor_s.append(float(seconds))
    graph, cluster = builder.build(), joined(num_devices)
    op_s = np.array([[float(case[op][0]) for op in order]])
    costs = costs_of(graph, cluster, op_s, np.array(tensor_s))
    return replace(problem_of(graph, cluster, op_s, transfers), op_costs=costs)


# The queued values are longer: a tensor is sent when it is made, so one that is needed later can be
# ahead in the queue. All are proven by the exact planner.
@pytest.mark.parametrize(
    ("case", "num_devices", "transfers", "step_s"),
    [
        (CASE_A, 2, "parallel", 8.0),
        (CASE_B, 2, "parallel", 36.0),
        (CASE_B, 3, "parallel", 29.0),
        (CASE_A, 2, "queued", 8.0),
        (CASE_B, 2, "queued", 38.0),
        (CASE_B, 3, "queued", 31.0),
    ],
)
def test_it_reaches_the_proven_optimum_of_published_cases(case, num_devices, transfers, step_s):
    problem = _published(case, num_devices, transfers)
    start = Plan().placing(np.zeros(problem.graph.num_ops, np.int32))
    assert _score(problem, local_search(problem, start)).step_s == step_s


def test_it_moves_what_does_not_fit():
    builder = GraphBuilder("wide")
    for index in range(4):
        op = builder.op(f"op{index}", reads=[])
        builder.tensor(f"made{index}", 100, producer=op, role=6)
    cluster = _with_memory(joined(4), 150)
    problem = problem_of(builder.build(), cluster, np.ones(4))
    start = Plan().placing(np.zeros(4, np.int32))
    assert _score(problem, start).overflow_bytes == 250
    found = local_search(problem, start)
    assert _score(problem, found).overflow_bytes == 0
    assert sorted(found.device_of.tolist()) == [0, 1, 2, 3]


def test_groups_stay_together_and_ops_stay_off_devices_that_cannot_run_them():
    graph = generate("layered", 120, 3)
    group = np.full(graph.num_ops, -1, np.int32)
    group[::10] = 0
    graph = replace(graph, group=group)
    cluster = joined(3, 1e10, 1e-5)
    kinds = tuple(device_kind(f"kind{index}") for index in range(3))
    devices = tuple(device(f"gpu{index}", kind) for index, kind in enumerate(kinds))
    cluster = replace(cluster, devices=devices)
    op_s = np.tile(1e-5 + graph.flops / 1e13, (3, 1))
    op_s[1, 5:15] = np.inf
    problem = problem_of(graph, cluster, op_s)
    found = local_search(problem, Plan().placing(np.zeros(graph.num_ops, np.int32)))
    assert len(set(found.device_of[::10].tolist())) == 1
    assert 1 not in found.device_of[5:15]
    assert len(set(found.device_of.tolist())) > 1, "nothing was moved at all"
    _require_legal(problem, found)


def test_a_strict_order_that_is_better_than_any_priority_is_kept():
    problem = _published(CASE_B, 2, "parallel")
    best = local_search(problem, Plan().placing(np.zeros(9, np.int32)))
    timeline = simulate(problem, best)
    order = tuple(
        np.array(
            sorted(np.flatnonzero(best.device_of == d), key=lambda op: timeline.op_start_s[op]),
            np.int32,
        )
        for d in range(2)
    )
    strict = best.ordered(by_device=order)
    assert _score(problem, strict).step_s == 36.0
    assert local_search(problem, strict) is strict


def test_it_goes_on_from_a_strict_order():
    problem = _published(CASE_B, 2, "parallel")
    order = (np.array([0, 1, 4, 8, 3, 7, 2, 5, 6], np.int32), np.array([], np.int32))
    start = Plan().placing(np.zeros(9, np.int32), by_device=order)
    found = local_search(problem, start)
    _require_legal(problem, found)
    assert simulate(problem, found).makespan_s == 36.0


@pytest.mark.parametrize("change", [{"contiguous": True}, {"objective": "throughput"}])
def test_other_aims_than_a_short_step_keep_the_plan(change):
    problem = replace(_published(CASE_A, 2, "parallel"), **change)
    plan = Plan().placing(np.zeros(6, np.int32))
    assert local_search(problem, plan) is plan


def test_it_needs_a_placement():
    problem = _published(CASE_A, 2, "parallel")
    with pytest.raises(UsageError, match="does not say where"):
        local_search(problem, Plan())
