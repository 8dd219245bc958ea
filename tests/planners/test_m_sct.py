"""m-SCT: as its oracle decides, the published cases, and when a device stays awake."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners.list_schedule_oracle import assert_as_oracle
from planners.list_schedule_problems import (
    HANEN,
    PUBLISHED,
    hard_problems,
    random_favourites,
    random_problem,
)
from simulate.problems import joined, problem_of

from hocket.graph import GraphBuilder, generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.m_etf import list_schedule
from hocket.planners.placement.m_sct import favourite_children, m_sct
from hocket.simulate import simulate
from hocket.simulate.verify import verify


@given(hard_problems(), st.integers(0, 99))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_m_sct_decides_as_the_oracle_on_generated_problems(problem, seed):
    assert_as_oracle(problem, *random_favourites(np.random.default_rng(seed), problem.graph))


@pytest.mark.parametrize("seed", range(50))
def test_m_sct_decides_as_the_oracle_on_larger_problems(seed):
    random = np.random.default_rng(seed)
    problem = random_problem(random, 40)
    assert_as_oracle(problem, *random_favourites(random, problem.graph))


@pytest.mark.parametrize("transfers", ["queued", "parallel"])
def test_m_sct_decides_as_the_oracle_with_its_own_favourites(transfers):
    problem = make_problem(generate("layered", 60, 1), "2xv100-16g+1xt4", transfers=transfers)
    favourites = favourite_children(problem)
    assert (favourites.child >= 0).any()
    assert_as_oracle(problem, favourites.child, favourites.spared_s)


@pytest.mark.parametrize(
    ("example", "num_devices", "memory_bytes", "step_s"),
    PUBLISHED,
    ids=["talk", "talk with 5 bytes", "hanen on 2", "hanen on 3"],
)
def test_m_sct_reaches_the_published_values(example, num_devices, memory_bytes, step_s):
    setting = {"memory_bytes": memory_bytes, "transfers": "queued"}
    problem = example.problem(num_devices, duplex="half", **setting)
    plan = m_sct(problem, Plan())
    assert plan.claims.estimated_step_s == step_s
    assert plan.claims.counts["favourites"] > 0
    # As for m-ETF: the simulator sends tensors when they are made.
    duplex = "full" if num_devices == 3 else "half"
    simulated = example.problem(num_devices, duplex=duplex, **setting)
    assert simulate(simulated, plan).makespan_s == step_s


def _late_favourite() -> Problem:
    """At 2 s, when 'first' ends, 'join' misses only what 'other' makes a second later."""
    builder = GraphBuilder("awake")
    first, other, _ = builder.op("first"), builder.op("other"), builder.op("long")
    sent = [builder.tensor("slow", 12, producer=first), builder.tensor("fast", 4, producer=other)]
    builder.op("join", reads=sent)
    builder.op("filler")
    cluster = joined(3, bandwidth_bps=4.0)
    return problem_of(builder.build(), cluster, [2, 3, 10, 1, 5], "parallel")


def test_m_sct_waits_only_for_children_that_long_paths_need():
    # Op 8 is the only child of op 4 and has no other parent, but its transfer delays no end.
    assert favourite_children(HANEN.problem(2)).child[4] == -1


@pytest.mark.parametrize(
    ("spared_s", "join_s", "filler_s"), [(2.0, 4.0, 3.0), (1.5, 5.0, 2.0)], ids=["soon", "late"]
)
def test_device_stays_awake_for_a_favourite_that_is_ready_soon(spared_s, join_s, filler_s):
    favourite = np.array([3, -1, -1, -1, -1], dtype=np.int32)
    found = list_schedule(_late_favourite(), favourite, np.array([spared_s, 0, 0, 0, 0]))
    assert found.start_s[3:].tolist() == [join_s, filler_s]
    assert (found.device_of[3] == found.device_of[0]) == (spared_s == 2.0)


@pytest.mark.parametrize("family", ["gnmt", "layered", "transformer"])
def test_m_sct_plans_of_generated_graphs_verify(family):
    problem = make_problem(generate(family, 400, 2), "2xv100-16g+1xt4", transfers="queued")
    plan = m_sct(problem, Plan())
    verify(plan, problem)
    assert 0 < plan.claims.counts["favourites"] < problem.graph.num_ops
