"""Plans that keep some blocks and make the others again."""

import itertools
from types import SimpleNamespace

import pytest
from planners.memory.steps import MIB, chain_step, placed

from hocket.planners.memory import frontier
from hocket.planners.memory.keeping import KeepingPlans
from hocket.planners.memory.maker import FULL_RECOMPUTE, PlanMaker


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


def test_a_budget_that_nothing_keeps_is_known_by_the_smallest_plan_alone():
    asked = []

    def judge(name, is_kept):
        asked.append(name)
        return SimpleNamespace(peak_bytes=100 + int(is_kept.sum()))

    maker = PlanMaker(*placed(chain_step(40)), float("inf"))
    plans = KeepingPlans(maker.numbers, judge)
    assert plans.best(100) is None
    assert len(asked) == 1, asked
    assert plans.best(1000).peak_bytes == plans[len(plans) - 1].peak_bytes


def test_of_steps_of_very_many_ops_fewer_plans_are_made_and_the_usual_ones_are_among_them(
    monkeypatch,
):
    """A step of a thousand layers was planned for six minutes."""
    problem = placed(chain_step(12, activation=32 * MIB, weight=4 * MIB))
    made = []

    def counted(self, name, memory, judged=PlanMaker._judged):
        made.append(name)
        return judged(self, name, memory)

    monkeypatch.setattr(PlanMaker, "_judged", counted)
    monkeypatch.setattr(frontier, "NUM_ALL_LEVELS_OPS", 1)
    usual = frontier.find_frontier(*problem)
    num_usual = len(made)
    made.clear()
    monkeypatch.setattr(frontier, "NUM_FEW_LEVELS_OPS", problem[0].graph.num_ops - 1)
    few = frontier.find_frontier(*problem)
    assert len(made) < 0.7 * num_usual
    assert few.smallest.peak_bytes == usual.smallest.peak_bytes
    for budget in (usual.smallest.peak_bytes, usual.find(FULL_RECOMPUTE).peak_bytes):
        assert few.best(budget).step_s <= 1.1 * usual.best(budget).step_s
