"""Plans do not depend on the order in which a file lists the ops of a graph."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from simulate.problems import joined, problem_of

from hocket.api import make_problem
from hocket.graph import GraphBuilder, Role
from hocket.graph.coarsen import co_placed
from hocket.graph.generators import generate
from hocket.graph.graph import StatedTimes
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners import find_planner
from hocket.planners.placement.structural import by_structure, in_order, renumbered
from hocket.simulate import simulate


def shuffled(problem: Problem, seed: int, *, keeps_homes: bool = False) -> Problem:
    """The same problem, written in another topological order.

    Weights that several ops share live with the first of them in the file: with ``keeps_homes``
    that stays the first.
    """
    graph, random = problem.graph, np.random.default_rng(seed)
    key = random.random(graph.num_ops).tolist()
    readers: list[list[int]] = [[] for _ in key]
    src, dst = graph.edges
    if keeps_homes:
        reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.read_ptr))
        home = graph.owner_op[graph.reads]
        later = (graph.tensor_producer[graph.reads] < 0) & (home >= 0) & (home != reader)
        src, dst = np.append(src, home[later]), np.append(dst, reader[later])
    for maker, reader in zip(src.tolist(), dst.tolist(), strict=True):
        readers[maker].append(reader)
    waits = np.bincount(dst, minlength=graph.num_ops)
    ready = [(key[op], op) for op in np.flatnonzero(waits == 0).tolist()]
    heapq.heapify(ready)
    order = []
    while ready:
        op = heapq.heappop(ready)[1]
        order.append(op)
        for reader in readers[op]:
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, (key[reader], reader))
    return in_order(problem, np.array(order), random.random(graph.num_tensors)).problem


@pytest.mark.parametrize("family", ["layered", "gnmt", "series-parallel"])
@pytest.mark.parametrize(
    "name", ["m-topo", "m-etf", "m-sct", "pardnn", "pardnn-fine", "memory-split"]
)
def test_the_step_does_not_depend_on_the_order_of_the_file(family: str, name: str) -> None:
    problem = make_problem(generate(family, 200, 1), "2xv100-16g+2xt4")
    planner = find_planner(name)
    steps_s = [
        simulate(case, planner(case, Plan())).makespan_s
        for case in (problem, shuffled(problem, 0), shuffled(problem, 1))
    ]
    assert max(steps_s) <= 1.01 * min(steps_s)


@pytest.mark.parametrize(
    ("family", "num_ops", "seed", "on"),
    [
        ("layered", 40, 2, "2xv100-16g+1xt4"),
        ("layered", 120, 11, "1xv100-32g+2xt4"),
        ("gnmt", 120, 12, "1xv100-32g+2xt4"),
    ],
)
def test_the_step_of_auto_does_not_depend_on_the_order_of_the_file(
    family: str, num_ops: int, seed: int, on: str
) -> None:
    problem = make_problem(generate(family, num_ops, seed), on)
    planner = find_planner("auto")
    steps_s = [
        simulate(case, planner(case, Plan())).makespan_s
        for case in (problem, shuffled(problem, 102, keeps_homes=True))
    ]
    assert max(steps_s) <= (1 + 1e-9) * min(steps_s)


def test_plans_are_carried_there_and_back() -> None:
    problem = make_problem(generate("transformer", 150, 0), "2xv100-16g")
    there, random = renumbered(problem), np.random.default_rng(0)
    assert there is not None
    placed = random.integers(0, 2, problem.graph.num_ops).astype(np.int32)
    priority = random.permutation(problem.graph.num_ops).astype(np.float64)
    for plan in (
        Plan().placing(placed),
        Plan().placing(placed, priority=priority),
        Plan().placing(
            placed, by_device=(np.flatnonzero(placed == 0), np.flatnonzero(placed == 1))
        ),
    ):
        carried = there.to_renumbered(plan)
        back = there.to_original(carried, "")
        step_s = simulate(problem, plan).makespan_s
        assert simulate(there.problem, carried).makespan_s == pytest.approx(step_s, rel=1e-12)
        assert simulate(problem, back).makespan_s == step_s
        assert back.device_of is not None
        assert back.device_of.tolist() == placed.tolist()


def test_a_planner_that_changes_nothing_leaves_the_plan_itself() -> None:
    problem = make_problem(generate("transformer", 50, 0), "2xv100-16g")
    plan = Plan().placing(np.zeros(problem.graph.num_ops, dtype=np.int32))
    assert by_structure(lambda _, plan: plan)(problem, plan) is plan


def test_groups_partners_and_aliases_stay_what_they_were() -> None:
    problem = make_problem(generate("gnmt", 300, 0), "2xv100-16g")
    there = renumbered(problem)
    assert there is not None
    old, new = problem.graph, there.problem.graph
    names = [old.op_names[op] for op in there.order]
    assert list(new.op_names) == names
    for op in range(old.num_ops):
        at = int(there.rank[op])
        assert {new.tensor_names[t] for t in new.reads_of(at)} == {
            old.tensor_names[t] for t in old.reads_of(op)
        }
        partner = int(old.partner[op])
        assert int(new.partner[at]) == (-1 if partner < 0 else int(there.rank[partner]))
    same_group = old.group[there.order][:, None] == old.group[there.order]
    assert ((new.group[:, None] == new.group) == same_group).all()
    assert ((new.group < 0) == (old.group[there.order] < 0)).all()
    producer = {n: p for n, p in zip(new.tensor_names, new.tensor_producer.tolist(), strict=True)}
    for name, maker, base in zip(
        old.tensor_names, old.tensor_producer.tolist(), old.alias_of.tolist(), strict=True
    ):
        assert producer[name] == (-1 if maker < 0 else there.rank[maker])
        new_base = int(new.alias_of[new.tensor_names.index(name)])
        assert (base < 0) == (new_base < 0)
        assert base < 0 or new.tensor_names[new_base] == old.tensor_names[base]


def test_what_is_there_before_the_step_stays_with_its_first_reader() -> None:
    """The second reader has the longer path to the end, and would come first."""
    builder = GraphBuilder("shared")
    weight = builder.tensor("weight", 8, role=Role.PARAMETER)
    first = builder.op("first", reads=[weight])
    second = builder.op("second", reads=[weight])
    made = builder.tensor("made", 8, producer=second)
    builder.op("third", reads=[made])
    graph = builder.build()
    problem = problem_of(graph, joined(2), 1.0)
    there = renumbered(problem)
    assert there is not None
    assert int(there.problem.graph.owner_op[0]) == int(there.rank[first])
    assert list(there.order[:2]) == [first, second]


def test_ops_of_stated_times_are_co_placed_as_in_the_file() -> None:
    """Files of measured graphs state seconds and no flops: without the seconds no op would work."""
    graph = generate("layered", 120, 4)
    nothing = np.zeros(graph.num_ops)
    stated = StatedTimes(op_s={"v100-16g": np.linspace(1e-3, 2e-3, graph.num_ops)})
    measured = replace(graph, flops=nothing, bytes_touched=nothing.astype(np.int64), stated=stated)
    problem = make_problem(measured, "2xv100-16g")
    there = renumbered(problem)
    assert there is not None
    assert there.problem.graph.works.all()
    seconds = problem.costs.op_s[0]
    caps = {"max_group_s": float(seconds.sum()) / 16, "max_group_bytes": 2**33}
    units = co_placed(measured, seconds, **caps)
    again = co_placed(there.problem.graph, seconds[there.order], **caps)
    assert np.bincount(again).max() <= 2 * np.bincount(units).max()
    assert abs(again.max() - units.max()) <= 0.2 * units.max()
