"""No plan beats the lower bound, and the bound is what it says it is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from planners.exhaustive import (
    constrained_problems,
    legal_placements,
    shortest_parallel_step_s,
    shortest_step_s,
)

from hocket.errors import NoFeasiblePlanError
from hocket.planners.bounds import lower_bound


def _bound_s(problem):
    try:
        return lower_bound(problem).seconds
    except NoFeasiblePlanError:
        assert not any(True for _ in legal_placements(problem))
        return np.inf


@given(problem=constrained_problems(max_ops=5, max_devices=3, mode="parallel"))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_no_plan_without_contention_beats_the_bound(problem):
    assert _bound_s(problem) <= shortest_parallel_step_s(problem)


@pytest.mark.parametrize("mode", ["queued", "shared"])
@given(problem=constrained_problems(max_ops=4, max_devices=2))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_no_plan_with_contention_beats_the_bound(problem, mode):
    problem = replace(problem, transfers=mode)
    assert _bound_s(problem) <= shortest_step_s(problem)
