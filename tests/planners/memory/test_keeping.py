"""Plans that keep some blocks and make the others again."""

import itertools

import pytest
from planners.memory.steps import chain_step, placed

from hocket.planners.memory.maker import PlanMaker


@pytest.fixture(scope="module")
def family():
    problem, plan = placed(chain_step(num_layers=9))
    return PlanMaker(problem, plan, float("inf")).keeping()[0]


@pytest.fixture(scope="module")
def plans(family):
    return [family[number] for number in range(len(family))]


def test_each_block_that_is_kept_makes_the_step_shorter_and_no_smaller(plans):
    kept = [sum(block.activations == "kept" for block in plan.memory.blocks) for plan in plans]
    assert kept == list(range(kept[0], kept[0] + len(plans)))
    for fewer, more in itertools.pairwise(plans):
        assert more.step_s < fewer.step_s
        assert more.peak_bytes >= fewer.peak_bytes
        assert more.moved_bytes == 0


def test_the_best_within_a_budget_is_the_fastest_of_all_that_keep_it(family, plans):
    peaks = {plan.peak_bytes for plan in plans}
    for budget in sorted(peak + more for peak in peaks for more in (-1, 0, 1)):
        fits = [plan.step_s for plan in plans if plan.peak_bytes <= budget]
        best = family.best(budget)
        assert (best is None) == (not fits)
        if best is not None:
            assert best.peak_bytes <= budget
            assert best.step_s == min(fits)
