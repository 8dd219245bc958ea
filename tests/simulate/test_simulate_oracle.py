"""The compiled engine against the plain-Python oracle, bit for bit, on generated problems."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate.oracle import Oracle, homes_of
from simulate.problems import placements, plans, problems
from simulate.test_simulate_models import random_problem

from hocket.plan.plan import Plan
from hocket.plan.problem import TRANSFER_MODES
from hocket.simulate import owner_devices, simulate

GENERATED = settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@GENERATED
@given(st.data())
def test_simulate_equals_the_oracle_exactly(data):
    problem = data.draw(problems(has_streams=True))
    plan = data.draw(plans(problem))
    timeline = simulate(problem, plan)
    oracle = Oracle(problem, plan).run()
    for name, expected in oracle.arrays().items():
        np.testing.assert_array_equal(getattr(timeline, name), expected, err_msg=name)
    assert timeline.makespan_s == max(
        [0.0, *oracle.op_end, *(transfer.end for transfer in oracle.transfers)]
    )


@settings(GENERATED, max_examples=80)
@given(st.data())
def test_home_devices_are_the_first_readers(data):
    problem = data.draw(problems(has_streams=True))
    device_of = data.draw(placements(problem))
    homes = owner_devices(problem.graph, device_of)
    assert homes.tolist() == homes_of(problem.graph, device_of.tolist())


@settings(GENERATED, max_examples=30)
@given(st.data())
def test_simulate_is_the_same_twice(data):
    problem = data.draw(problems(has_streams=True))
    plan = data.draw(plans(problem))
    first, second = simulate(problem, plan), simulate(problem, plan)
    for spec in fields(first):
        np.testing.assert_array_equal(getattr(first, spec.name), getattr(second, spec.name))


@pytest.mark.parametrize("mode", TRANSFER_MODES)
@pytest.mark.parametrize("seed", range(4))
def test_simulate_equals_the_oracle_on_times_that_round(mode, seed):
    """Many transfers at once and numbers that binary fractions cannot hold."""
    problem = random_problem(seed, mode, num_ops=50)
    problem = replace(problem, op_costs=replace(problem.costs, op_s=problem.costs.op_s * 0.01))
    plan = Plan().placing(np.random.default_rng(seed).integers(0, 4, 50))
    timeline = simulate(problem, plan)
    for name, expected in Oracle(problem, plan).run().arrays().items():
        np.testing.assert_array_equal(getattr(timeline, name), expected, err_msg=name)
