"""Which memory plans get a dry run, and which one is chosen."""

from dataclasses import replace

import pytest
from planners.memory.steps import chain_step, placed

from hocket.base.errors import NoFeasiblePlanError, RunError
from hocket.base.units import parse_bytes
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.memory.maker import PLAIN
from hocket.runtime.offload import plan_choice as fitting
from hocket.runtime.offload.plan_choice import fastest_within_budget
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.step import budgeted


@pytest.fixture(scope="module")
def frontier():
    problem, plan = placed(chain_step(num_layers=9))
    return find_frontier(problem, plan)


class DryRuns:
    """Find a part more or less than the simulator."""

    def __init__(self, frontier, ratio):
        self.frontier, self.ratio, self.simulated = frontier, ratio, []

    def __call__(self, section):
        problem, plan = self.frontier.problem, self.frontier.plan
        if not section.blocks:
            peak = self.frontier.find(PLAIN).peak_bytes
        else:
            step = budgeted(problem, plan, section)
            peak = int(simulate(step.problem, step.plan).peak_bytes.max())
        self.simulated.append(peak)
        return int(peak * self.ratio)


def budgets(frontier):
    least, most = frontier.smallest.peak_bytes, frontier.find(PLAIN).peak_bytes
    return [int(least + part * (most - least)) for part in (0.3, 0.5, 0.7, 0.9)]


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.05])
@pytest.mark.parametrize("most_ops", [0, 10**6])
def test_what_is_taken_keeps_the_budget_when_it_is_rehearsed(
    frontier, ratio, most_ops, monkeypatch
):
    monkeypatch.setattr(fitting, "MANY_OPS", most_ops)
    times = []
    for budget in budgets(frontier):
        kept = fastest_within_budget(budget, frontier, DryRuns(frontier, ratio))
        assert kept.peak_bytes <= budget
        times.append(kept.step_s)
    assert times == sorted(times, reverse=True)


def test_of_a_deep_model_no_plan_is_rehearsed_that_is_too_large_as_others_were(
    frontier, monkeypatch
):
    monkeypatch.setattr(fitting, "MANY_OPS", 0)
    for budget in budgets(frontier):
        dry_runs = DryRuns(frontier, 1.05)
        fastest_within_budget(budget, frontier, dry_runs)
        assert all(1.05 * peak <= budget for peak in dry_runs.simulated[1:])


def test_of_a_deep_model_plans_that_hold_ever_more_beside_what_was_simulated_are_found(
    frontier, monkeypatch
):
    """As where autograd saves more than a recorded step reads: the more is kept, the more."""
    least = frontier.smallest.peak_bytes
    faster = 0
    for budget in budgets(frontier):
        found = []
        for most_ops in (10**6, 0):
            monkeypatch.setattr(fitting, "MANY_OPS", most_ops)
            dry_runs = DryRuns(frontier, 1.0)

            def dry_run(section, dry_runs=dry_runs):
                peak = dry_runs(section)
                return int(peak + 2 * (peak - least) ** 2 / least)

            found.append(fastest_within_budget(budget, frontier, dry_run))
        thorough, deep = found
        assert deep.peak_bytes <= budget
        assert deep.step_s == thorough.step_s
        faster += deep.step_s < frontier.smallest.step_s
    assert faster


def test_plans_that_hold_less_than_simulated_may_be_faster(frontier):
    for budget in budgets(frontier)[:2]:
        exact = fastest_within_budget(budget, frontier, DryRuns(frontier, 1.0))
        lucky = fastest_within_budget(budget, frontier, DryRuns(frontier, 0.85))
        assert lucky.step_s <= exact.step_s


def test_a_plain_step_that_holds_more_than_simulated_hides_no_other_plan(frontier):
    plain = frontier.find(PLAIN)
    lean = replace(plain, timeline=frontier.smallest.timeline)
    others = tuple(plan for plan in frontier.plans if plan.memory is not None)
    dry_runs, budget = DryRuns(frontier, 1.0), frontier.smallest.peak_bytes
    kept = fastest_within_budget(budget, replace(frontier, plans=(lean, *others)), dry_runs)
    assert dry_runs.simulated[0] == plain.peak_bytes > budget
    assert kept.section.blocks
    assert kept.peak_bytes <= budget


def test_what_does_not_fit_names_the_least_that_was_rehearsed(frontier):
    dry_runs = DryRuns(frontier, 3.0)
    budget = frontier.smallest.peak_bytes
    with pytest.raises(NoFeasiblePlanError, match="the minimum-memory plan needs"):
        fastest_within_budget(budget, frontier, dry_runs)


def test_plans_far_beyond_a_budget_are_rehearsed_where_lean_ones_hold_more(frontier):
    """As those do that move or make again what the model makes again by itself."""
    plain = frontier.find(PLAIN).peak_bytes
    exact = DryRuns(frontier, 1.0)

    def dry_run(section):
        is_kept = all(block.activations == "kept" for block in section.blocks)
        return exact(section) if is_kept else 3 * plain

    with pytest.raises(NoFeasiblePlanError) as refused:
        fastest_within_budget(frontier.smallest.peak_bytes // 3, frontier, dry_run)
    assert parse_bytes(refused.value.hint.split('"')[1]) <= 1.01 * plain


def test_plans_that_the_model_cannot_be_carried_out_by_are_passed_over(frontier):
    exact = DryRuns(frontier, 1.0)

    def without_recompute(section):
        if any(block.activations == "recomputed" for block in section.blocks):
            raise RunError("it cannot be computed again")
        return exact(section)

    budget = budgets(frontier)[1]
    kept = fastest_within_budget(budget, frontier, without_recompute)
    assert kept.peak_bytes <= budget
    assert all(block.activations != "recomputed" for block in kept.section.blocks)
    # What no plan keeps is refused by what others hold, not for what could not be tried.
    with pytest.raises(NoFeasiblePlanError, match="the minimum-memory plan needs"):
        fastest_within_budget(frontier.smallest.peak_bytes // 2, frontier, without_recompute)


def test_where_nothing_can_be_updated_on_the_device_the_host_updates(frontier):
    exact = DryRuns(frontier, 1.0)

    def without_device(section):
        if not section.blocks or any(block.update == "device" for block in section.blocks):
            raise RunError("its update cannot be rehearsed")
        return exact(section)

    kept = fastest_within_budget(frontier.find(PLAIN).peak_bytes, frontier, without_device)
    assert kept.section.blocks
    assert all(block.update == "host" for block in kept.section.blocks)

    def never(section):
        raise RunError("it cannot be carried out")

    with pytest.raises(RunError, match="carried out"):
        fastest_within_budget(frontier.smallest.peak_bytes, frontier, never)


def test_the_minimum_memory_plan_has_a_dry_run_before_a_budget_is_refused(frontier):
    """Also where the recorded plain step seems to be near, as dry_runs may find much less."""
    budget = frontier.smallest.peak_bytes
    lean = replace(frontier.find(PLAIN), timeline=frontier.smallest.timeline)
    large = tuple(p for p in frontier.plans if p.memory is not None and p.peak_bytes > 2 * budget)
    assert large
    seeming = replace(frontier, plans=(lean, *large), keeping=())
    kept = fastest_within_budget(
        budget, seeming, lambda section: budget if section.blocks else 2 * budget
    )
    assert kept.section.blocks
