"""m-ETF: as its oracle decides, the published cases, and what a plan of it must have."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from planners.list_schedule_facts import in_breadth_first_order
from planners.list_schedule_oracle import assert_as_oracle
from planners.list_schedule_problems import PUBLISHED, hard_problems, random_problem
from simulate.problems import device_kind, joined, problem_of

from hocket.base.errors import NoFeasiblePlanError
from hocket.graph import GraphBuilder, Role, generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.verify import structure_violations
from hocket.planners.placement.list_schedule.schedule_tables import breadth_first
from hocket.planners.placement.m_etf import m_etf
from hocket.simulate import simulate
from hocket.simulate.verify import update_violations


@given(hard_problems())
@settings(derandomize=True, deadline=None, max_examples=30)
def test_m_etf_decides_as_the_oracle_on_generated_problems(problem):
    assert_as_oracle(problem)


@pytest.mark.parametrize("seed", range(50))
def test_m_etf_decides_as_the_oracle_on_larger_problems(seed):
    assert_as_oracle(random_problem(np.random.default_rng(seed), 40))


@pytest.mark.parametrize("seed", range(40))
def test_m_etf_plans_have_legal_structure_and_updates_at_home(seed):
    problem = random_problem(np.random.default_rng(1000 + seed), 40)
    try:
        plan = m_etf(problem, Plan())
    except NoFeasiblePlanError:
        return
    assert not list(structure_violations(plan, problem))
    assert not list(update_violations(plan.device_of, problem))


@pytest.mark.parametrize(
    ("example", "num_devices", "memory_bytes", "step_s"),
    PUBLISHED,
    ids=["talk", "talk with 5 bytes", "hanen on 2", "hanen on 3"],
)
def test_m_etf_reaches_the_published_values(example, num_devices, memory_bytes, step_s):
    setting = {"memory_bytes": memory_bytes, "transfers": "queued"}
    problem = example.problem(num_devices, duplex="half", **setting)
    plan = m_etf(problem, Plan())
    assert plan.claims.estimated_step_s == step_s
    # The simulator sends tensors when they are made, not when their reader is chosen; on three
    # devices with one queue each, one that is not urgent then goes first.
    duplex = "full" if num_devices == 3 else "half"
    simulated = example.problem(num_devices, duplex=duplex, **setting)
    timeline = simulate(simulated, plan)
    assert timeline.makespan_s == step_s
    assert (timeline.peak_bytes <= memory_bytes).all()


def test_m_etf_notes_its_starts_as_priorities_and_drops_an_older_order():
    problem = make_problem(generate("transformer", 300, 0), "2xv100-16g", transfers="queued")
    older = Plan(planner="x", notes={"kept": 1}).ordered(by_device=(np.arange(3), np.arange(0)))
    plan = m_etf(problem, older)
    assert plan.by_device is None
    assert plan.notes["kept"] == 1
    src, dst = problem.graph.edges
    assert (plan.priority[src] <= plan.priority[dst]).all()
    again = m_etf(problem, Plan())
    assert plan.device_of.tobytes() == again.device_of.tobytes()
    assert plan.priority.tobytes() == again.priority.tobytes()


@pytest.mark.parametrize("family", ["layered", "gnmt", "series-parallel"])
def test_rank_is_the_breadth_first_order(family):
    problem = make_problem(generate(family, 500, 3), "2xt4")
    order = breadth_first(problem.graph)
    assert order.tolist() == in_breadth_first_order(problem.graph)


def test_error_names_the_op_and_the_bytes_that_it_lacks():
    builder = GraphBuilder("large")
    small = builder.tensor("small", 10, role=Role.PARAMETER)
    large = builder.tensor("large", 2**31, role=Role.PARAMETER)
    builder.op("fits", reads=[small])
    builder.op("does not", reads=[large])
    problem = problem_of(builder.build(), joined(2), [1.0, 1.0])
    with pytest.raises(NoFeasiblePlanError, match="'does not'") as caught:
        m_etf(problem, Plan())
    assert "1.0 GiB" in caught.value.message
    assert caught.value.hint


def test_error_where_no_device_can_run_an_op_and_its_group():
    builder = GraphBuilder("apart")
    builder.op("a", group=0)
    builder.op("b", group=0)
    cluster = joined(2)
    devices = (cluster.devices[0], replace(cluster.devices[1], kind=device_kind("other")))
    op_s = np.array([[np.inf, 1.0], [1.0, np.inf]])
    problem = problem_of(builder.build(), replace(cluster, devices=devices), op_s)
    with pytest.raises(NoFeasiblePlanError, match="no device can run op 'a'"):
        m_etf(problem, Plan())


def test_group_goes_where_its_first_op_goes_and_takes_its_parameters_along():
    builder = GraphBuilder("group")
    weights = [builder.tensor(f"w{index}", 400, role=Role.PARAMETER) for index in range(4)]
    for index in range(4):
        builder.op(f"op{index}", reads=[weights[index]], group=index % 2)
    cluster = joined(2)
    devices = tuple(replace(device, memory_bytes=1000) for device in cluster.devices)
    problem = problem_of(builder.build(), replace(cluster, devices=devices), [1.0] * 4)
    # Without the reserve, the second op would join the first on the device that is free first.
    assert m_etf(problem, Plan()).device_of.tolist() == [0, 1, 0, 1]


def test_freed_memory_is_used_again_and_held_memory_is_not():
    def chain(role: Role) -> GraphBuilder:
        builder, last = GraphBuilder("chain"), []
        for index in range(20):
            op = builder.op(f"op{index}", reads=last)
            last = [builder.tensor(f"t{index}", 100, producer=op, role=role)]
        return builder

    cluster = joined(1)
    small = replace(cluster, devices=(replace(cluster.devices[0], memory_bytes=200),))
    m_etf(problem_of(chain(Role.ACTIVATION).build(), small, [1.0] * 20), Plan())
    with pytest.raises(NoFeasiblePlanError, match="'op2'"):
        m_etf(problem_of(chain(Role.GRADIENT).build(), small, [1.0] * 20), Plan())
