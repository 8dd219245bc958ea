from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.list_schedule_oracle import Oracle, StuckError
from simulate.problems import problems

from hocket.errors import NoFeasiblePlanError
from hocket.plan.problem import Problem
from hocket.planners.placement.list_schedule.schedule import list_schedule


@st.composite
def hard_problems(draw: Any, max_ops: int = 12) -> Problem:
    """Generated problems with groups, ops that some kinds cannot run, and little memory."""
    problem = draw(problems(max_ops=max_ops))
    graph, costs = problem.graph, problem.costs
    group = draw(st.lists(st.sampled_from([-1, -1, 0, 7]), min_size=graph.num_ops, max_size=graph.num_ops))
    op_s = costs.op_s.copy()
    for op in draw(st.lists(st.integers(0, graph.num_ops - 1), max_size=2)):
        op_s[draw(st.integers(0, len(op_s) - 1)), op] = np.inf
    memory = st.sampled_from([2**30, 2**30, 400, 250, 150, 60])
    devices = tuple(replace(d, memory_bytes=draw(memory)) for d in problem.cluster.devices)
    return replace(
        problem,
        graph=replace(graph, group=np.array(group, dtype=np.int32)),
        cluster=replace(problem.cluster, devices=devices),
        costs=replace(costs, op_s=op_s),
    )


def assert_as_oracle(problem: Problem, favourite: Any = None, spared_s: Any = None) -> None:
    lists = [None if values is None else values.tolist() for values in (favourite, spared_s)]
    try:
        device_of, start_s = Oracle(problem, *lists).run()
    except StuckError as stuck:
        op, lacking = stuck.args
        with pytest.raises(NoFeasiblePlanError, match=repr(problem.graph.op_names[op])) as caught:
            list_schedule(problem, favourite, spared_s)
        del lacking, caught
        return
    except ValueError:
        with pytest.raises(NoFeasiblePlanError):
            list_schedule(problem, favourite, spared_s)
        return
    found = list_schedule(problem, favourite, spared_s)
    assert found.device_of.tolist() == device_of
    assert found.start_s.tolist() == start_s


@given(hard_problems())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_a(problem):
    assert_as_oracle(problem)

@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_b(data):
    problem = data.draw(hard_problems())
    graph = problem.graph
    favourite = np.full(graph.num_ops, -1, dtype=np.int32)
    taken = set()
    src, dst = graph.edges
    for op in range(graph.num_ops):
        kids = [d for s, d in zip(src.tolist(), dst.tolist()) if s == op and d not in taken]
        if kids:
            pick = data.draw(st.sampled_from([-1, *kids]))
            favourite[op] = pick
            taken.add(pick)
    spared = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=graph.num_ops, max_size=graph.num_ops)))
    assert_as_oracle(problem, favourite, spared)
