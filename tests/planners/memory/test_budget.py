"""Plans within a budget: kept in the simulator, monotone, never slower than the usual ones."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from planners.memory.steps import MIB, chain_step, placed

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.units import parse_bytes
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.blocks import cut_step, narrow_cuts
from hocket.planners.memory.budget import BudgetFit, bound_s, keep_budget
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.memory.maker import FULL_OFFLOAD, FULL_RECOMPUTE
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.step import budgeted
from hocket.simulate.verify import verify

STEPS = {
    "activations": chain_step(8, activation=32 * MIB, weight=1 * MIB),
    "weights": chain_step(6, activation=2 * MIB, weight=48 * MIB),
    "logits": chain_step(6, logits=256 * MIB),
    "slow link": chain_step(6, activation=32 * MIB, flops=1e9),
}


@pytest.fixture(scope="module", params=STEPS)
def frontier(request):
    return find_frontier(*placed(STEPS[request.param]), num_levels=16)


def test_budgets_are_kept_and_times_never_grow_with_them(frontier):
    most = frontier.find("plain").peak_bytes
    least = frontier.smallest.peak_bytes
    times = []
    for budget in np.linspace(least, most, 20).astype(int).tolist():
        fit = BudgetFit(frontier, budget)
        plan = fit.plan()
        assert fit.chosen.peak_bytes <= budget
        assert max(plan.claims.peak_bytes) <= budget
        times.append(fit.chosen.step_s)
        for usual in (FULL_RECOMPUTE, FULL_OFFLOAD):
            other = frontier.find(usual)
            assert other.peak_bytes > budget or fit.chosen.step_s <= other.step_s
    assert all(later <= earlier for earlier, later in itertools.pairwise(times))


def test_plans_stand_up_to_verify(frontier):
    least, most = frontier.smallest.peak_bytes, frontier.find("plain").peak_bytes
    for budget in (least, (least + most) // 2, most):
        verify(BudgetFit(frontier, budget).plan(), frontier.problem)


def test_bounds_are_below_every_plan(frontier):
    fit = BudgetFit(frontier, 0)
    for fitted in frontier.plans:
        assert fit.lower_bound_bytes <= fitted.peak_bytes
        assert bound_s(frontier.numbers, fitted.peak_bytes) <= fitted.step_s * (1 + 1e-9)


def test_what_fits_nowhere_is_told_with_the_smallest_budget(frontier):
    fit = BudgetFit(frontier, frontier.smallest.peak_bytes - 1)
    assert fit.chosen is None
    with pytest.raises(NoFeasiblePlanError, match="the minimum-memory plan needs") as caught:
        fit.plan()
    enough = parse_bytes(caught.value.hint.removeprefix("give it ").partition(",")[0])
    assert fit.smallest_bytes <= enough < 1.01 * fit.smallest_bytes  # what is told can be typed
    assert BudgetFit(frontier, fit.smallest_bytes).chosen is not None


def test_a_step_that_fits_is_left_alone():
    problem, plan = placed(STEPS["activations"])
    fit = keep_budget(problem, plan, 2**40)
    assert fit.chosen.name == "plain"
    assert fit.plan().get(Memory) is None
    assert fit.gap < 0.01


def test_host_memory_is_a_limit_too():
    problem, plan = placed(STEPS["weights"])
    free = find_frontier(problem, plan, num_levels=8)
    tight = find_frontier(problem, plan, num_levels=8, host_bytes=200 * MIB)
    assert tight.smallest.peak_bytes > free.smallest.peak_bytes
    none = find_frontier(problem, plan, num_levels=8, host_bytes=0)
    assert all(fitted.moved_bytes == 0 for fitted in none.plans)


SMALL_FLOPS, LARGE_FLOPS = 1.17e11, 2.34e11
LARGE_STEPS = {
    # Updates of a layer on the host take longer than its passes, or about as long.
    flops: chain_step(16, activation=64 * MIB, weight=256 * MIB, flops=flops)
    for flops in (SMALL_FLOPS, LARGE_FLOPS)
}


def test_links_host_and_device_work_at_once_whatever_their_rates():
    """Sums alone bound the step from below: each resource with all that it has to do. State that
    visits the device takes turns with updates on the host, so that none waits long for another."""
    draws, over = np.random.default_rng(0), []
    for number in range(10):
        link_bps, host_bps = draws.uniform(48e9, 96e9), draws.uniform(50e9, 160e9)
        graph = LARGE_STEPS[SMALL_FLOPS if number % 2 else LARGE_FLOPS]
        placing = placed(graph, link_bps=link_bps, host_update_bps=host_bps)
        frontier = find_frontier(*placing, num_levels=12, async_update=True)
        for share in (0.2, 0.3, 0.5):
            budget = share * frontier.find("plain").peak_bytes
            over.append(frontier.best(budget).step_s / bound_s(frontier.numbers, budget))
    assert max(over) < 1.35
    assert np.mean(over) < 1.07


@pytest.mark.parametrize("has_probes", [False, True])
def test_copies_that_take_less_than_the_passes_cost_next_to_nothing(has_probes):
    """Each layer's own passes hide its copies, also where small blocks come between layers."""
    graph = chain_step(12, activation=64 * MIB, flops=1e11, ops_per_layer=20, has_probes=has_probes)
    frontier = find_frontier(*placed(graph), num_levels=12)
    plain = frontier.find("plain")
    for share in (0.3, 0.5, 0.7):
        best = frontier.best(share * plain.peak_bytes)
        assert best.step_s < 1.02 * plain.step_s, share
        # What has room stays.
        assert best.moved_bytes < (2 * (1 - share) + 0.35) * plain.peak_bytes


def test_a_loss_in_chunks_with_all_else_as_it_is_is_among_the_plans():
    """It takes far less than the budget that it is asked for, at which the plain step is faster."""
    plans = find_frontier(*placed(chain_step(3, logits=512 * MIB))).plans
    assert any(
        plan.memory is not None
        and plan.memory.loss_chunks > 1
        and {(b.activations, b.parameters, b.update) for b in plan.memory.blocks}
        == {("kept", "resident", "device")}
        for plan in plans
    )


def test_a_plan_for_a_faster_host_is_better_there():
    times = []
    for host_bps in (40e9, 60e9, 80e9, 120e9):
        placing = placed(LARGE_STEPS[SMALL_FLOPS], link_bps=48e9, host_update_bps=host_bps)
        frontier = find_frontier(*placing, num_levels=12)
        times.append(frontier.best(0.3 * frontier.find("plain").peak_bytes).step_s)
    assert all(later <= earlier for earlier, later in itertools.pairwise(times))


WAYS = (
    {},
    {"activations": "offloaded"},
    {"activations": "recomputed"},
    {"activations": "recomputed", "checkpoint": "offloaded"},
)


@pytest.mark.parametrize("flops", [3e10, 3e11])
def test_plans_are_near_the_best_of_all_on_small_chains(flops):
    """Every combination of whole-block ways is simulated, with parameters on the device. Plans may
    also stream parameters; those that do not are held against it by themselves, too."""
    graph = chain_step(4, activation=32 * MIB, weight=MIB, flops=flops)
    problem, plan = placed(graph)
    blocks = cut_step(graph)
    assert blocks.num_blocks == 5
    everything = []
    for ways in itertools.product(WAYS, repeat=4):
        memory = Memory(
            budget_bytes=(0,),
            blocks=tuple(
                MemoryBlock(name=name, start=int(a), stop=int(b), **way)
                for name, a, b, way in zip(
                    blocks.names, blocks.start[:-1], blocks.start[1:], (*ways, {}), strict=True
                )
            ),
        )
        step = budgeted(problem, plan, memory)
        timeline = simulate(step.problem, step.plan)
        everything.append((int(timeline.peak_bytes[0]), timeline.makespan_s))
    frontier = find_frontier(problem, plan)
    resident = replace(frontier, plans=tuple(p for p in frontier.plans if _is_resident(p.memory)))
    for budget in sorted({peak for peak, _ in everything}):
        best = min(seconds for peak, seconds in everything if peak <= budget)
        for plans in (frontier, resident):
            found = plans.best(budget)
            assert found is not None
            assert found.step_s <= 1.04 * max(best, frontier.find("plain").step_s)


def _is_resident(memory):
    blocks = () if memory is None else memory.blocks
    return all((b.parameters, b.update) == ("resident", "device") for b in blocks)


def test_blocks_without_modules_are_cut_where_little_crosses():
    graph = STEPS["activations"]
    bare = replace(graph, op_module=np.full(graph.num_ops, -1, dtype=np.int32))
    blocks = cut_step(bare)
    assert blocks.num_blocks >= 3
    assert len(set(blocks.names)) == blocks.num_blocks
    assert narrow_cuts(bare, int(blocks.start[-1]))[0] == 0


def test_a_module_that_runs_twice_gives_two_blocks_with_two_names():
    graph = chain_step(6)
    modules = tuple(f"net.{int(name.split('.')[1]) % 3}.part" if name.startswith("net.")
                    and name.endswith("part") else name for name in graph.modules)  # fmt: skip
    numbers = {name: at for at, name in enumerate(dict.fromkeys(modules))}
    folded = replace(
        graph,
        modules=tuple(numbers),
        op_module=np.array([numbers[modules[m]] for m in graph.op_module], dtype=np.int32),
    )
    names = cut_step(folded).names
    assert "net.0" in names
    assert "net.0:1" in names


def test_what_was_fitted_is_told_in_a_line_and_its_name_tells_chunks_once(frontier):
    """Printing a plan printed hundreds of lines of arrays."""
    fit = BudgetFit(frontier, frontier.smallest.peak_bytes)
    for value in (fit, fit.chosen, frontier, BudgetFit(frontier, 0)):
        told = repr(value)
        assert len(told) < 160
        assert "\n" not in told
    assert fit.chosen.name in repr(fit)
    for fitted in frontier.plans:
        assert fitted.name.count("chunk") <= 1, fitted.name
        if "chunk" in fitted.name and fitted.memory is not None:
            count = fitted.memory.loss_chunks
            assert f"{count} chunk" in fitted.name
