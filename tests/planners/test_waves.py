"""Two waves: when the second begins, what both hold, and that their addresses are safe."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from planners.plain_kernels import plain_kernels  # noqa: F401
from torch import nn

from hocket.api import make_problem
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.capture.sizes import capture_sizes
from hocket.cost import demand
from hocket.cost.host import HostOverhead
from hocket.cost.profile import Profile, ProfileEntry
from hocket.cost.roofline import estimate_costs
from hocket.graph.graph import Phase
from hocket.plan.sections import Lanes
from hocket.planners.parallel.simulated import simulated as judged
from hocket.planners.waves.candidate import in_lanes
from hocket.planners.waves.search import CLOSE, fit_waves
from hocket.planners.waves.waits_for_room import held_bytes, room_waits
from hocket.planners.waves.way import own_slabs, placed, plan_of, slab_of
from hocket.planners.waves.why import reasons
from hocket.simulate import simulate
from hocket.simulate.parallel import priced_at
from hocket.simulate.parallel.lanes import pass_order
from hocket.simulate.verify import violations


def replayed(graph, on):
    """No host in the way: launches follow each other on the device."""
    problem = make_problem(graph, on)
    costs = estimate_costs(graph, problem.cluster, launches="replayed")
    return replace(problem, op_costs=costs)


class Rated(NamedTuple):
    """A way of which nothing but its rate is asked for."""

    samples_per_s: float


@pytest.fixture(scope="module")
def problem():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)]
    return replayed(capture_sizes(nn.Sequential(*layers), torch.zeros(5460, 64)), "1xv100-16g")


@pytest.fixture(scope="module")
def steady(problem):
    return fit_waves(problem, num_waves=4)


def ratio(problem, size):
    """How much longer than the forward the backward pass of so many samples takes."""
    wave = priced_at(problem, size)
    phase, seconds = wave.graph.op_phase, wave.costs.op_s[0]
    return seconds[phase == Phase.BACKWARD].sum() / seconds[phase == Phase.FORWARD].sum()


@pytest.fixture
def half_filled(monkeypatch):
    """The same times, of kernels that fill half of a device, sums of gradients too."""
    monkeypatch.setattr(demand, "_fill", lambda graph, kind: np.full(graph.num_ops, 0.5))


@pytest.mark.parametrize("on", ["1xt4", "1xk80"])
def test_the_best_start_alone_holds_what_the_closed_form_says(problem, on, half_filled):
    """Of what rises over f and falls over b half a period apart, and as much as one of the twelve
    layers on top: memory comes in steps. On quicker devices starts of kernels decide, not these,
    and kernels that take turns would keep each other back op by op."""
    problem = replayed(problem.graph, on)
    steady = fit_waves(problem, num_waves=4)
    times = ratio(problem, steady.accumulated.shares.replicas[0].microbatches[0])
    assert times == pytest.approx(2.0, abs=0.05)
    one = steady.one_wave_bytes
    graph = problem.graph
    before = int(graph.held_bytes[graph.tensor_producer < 0].sum())
    closed = 1 + (times - 1) / (2 * times)
    by_start = min(way.peak_bytes for way in steady.tried if not way.lanes.waits)
    assert by_start - before <= (one - before) * (closed + 0.11)
    assert steady.aligned.peak_bytes - before > 1.9 * (one - before)
    # Waits keep less, and cost some of the time that is gained.
    assert steady.leanest.peak_bytes <= 1.25 * one
    assert steady.leanest.step_s <= 1.25 * steady.chosen.step_s


def test_waves_hold_the_workspaces_of_their_own_size(problem):
    graph = problem.graph
    wave = priced_at(problem, 1365).graph
    products = [op for op in range(graph.num_ops) if "addmm" in graph.kind_of(op)]
    entries = tuple(
        ProfileEntry(
            signature=each.signatures[int(each.op_signature[products[0]])], kind="aten.addmm",
            dtype="float32", flops=1.0, bytes_touched=1, count=1, seconds=1e-4,
            workspace_bytes=workspace,
        )
        for each, workspace in ((graph, 8 << 20), (wave, 3 << 20))
    )  # fmt: skip
    profile = Profile(
        device_kind="v100-16g", device="V100", versions={}, host=HostOverhead(),
        entries=entries,
    )  # fmt: skip
    profiled = make_problem(graph, "1xv100-16g", profile=profile)
    assert int(profiled.graph.workspace_bytes[products[0]]) == 8 << 20
    assert int(priced_at(profiled, 1365).graph.workspace_bytes[products[0]]) == 3 << 20


def test_waits_keep_the_room_however_fast_the_lanes_are(problem):
    graph = priced_at(problem, 1024).graph
    held, order = held_bytes(graph), pass_order(graph)
    at = {int(op): n for n, op in enumerate(order)}
    assert room_waits(graph, 2, int(held.max()) - 1) is None
    for room in (held.max(), 1.2 * held.max(), 1.7 * held.max(), 2 * held.max()):
        waits = room_waits(graph, 2, int(room))
        passed = np.full(len(order), -1)
        for wait in waits:
            passed[at[wait.op]] = at[wait.on_op]
        passed = np.maximum.accumulate(passed)
        later = [int(held[done + 1 :].max(initial=0)) for done in passed.tolist()]
        assert (held + np.array(later) <= room).all()
        assert room < 2 * held.max() or not waits


def test_waves_of_small_kernels_overlap(steady):
    assert steady.leanest.step_s < 0.8 * steady.accumulated.step_s


def test_lanes_and_both_together_add_up(steady):
    blocks = steady.blocks(steady.leanest)
    times, both = blocks.curve()
    alone = [blocks.curve(lane) for lane in (0, 1)]
    held = [np.append(0, c)[np.searchsorted(t, times, "right")] for t, c in alone]
    assert (held[0] + held[1]).tolist() == both.tolist()
    # What is there before the step is in no lane.
    before = steady.problem.graph.held_bytes[steady.problem.graph.tensor_producer < 0].sum()
    assert blocks.peak_bytes() + before == pytest.approx(steady.leanest.peak_bytes, rel=0.05)


@pytest.mark.parametrize("place", [slab_of, own_slabs])
def test_addresses_of_the_slab_hold_whatever_the_lanes_do(steady, place):
    """No op overwrites what the other lane may still use, by its lane's order and waits alone."""
    blocks = steady.blocks(steady.leanest)
    slab = place(blocks)
    most = blocks.peak_bytes() if place is slab_of else sum(map(blocks.peak_bytes, (0, 1)))
    assert sum(slab.sizes) <= 1.05 * most
    at = [{op: n for n, op in enumerate(ops)} for ops in blocks.sequence]
    passed = [np.full(len(ops), -1) for ops in blocks.sequence]
    for wait in slab.waits:
        lane = wait.wave % 2
        passed[lane][at[lane][wait.wave, wait.op]] = at[1 - lane][wait.on_wave, wait.on_op]
    passed = [np.maximum.accumulate(row) for row in passed]
    top = slab.address + blocks.num_bytes
    for block in np.flatnonzero(blocks.made_at >= 0):
        lane, made_at = blocks.lane[block], blocks.made_at[block]
        meets = (slab.address < top[block]) & (top > slab.address[block])
        other = np.flatnonzero(meets & (blocks.lane != lane) & (blocks.made_at >= 0))
        for beside in other:
            is_after = passed[lane][made_at] >= blocks.used_at[1 - lane][beside]
            is_before = passed[1 - lane][blocks.made_at[beside]] >= blocks.used_at[lane][block]
            assert is_after or is_before
        # What the other lane reads of this one's is read before something else lies there.
        here = np.flatnonzero(meets & (blocks.lane == lane) & (blocks.used_at[1 - lane] >= 0))
        for earlier in here[blocks.end_s[here] < blocks.start_s[block]]:
            assert passed[lane][made_at] >= blocks.used_at[1 - lane][earlier]


def test_plans_are_legal_and_take_what_was_promised(problem, steady):
    plan = steady.plan()
    assert sum(plan[Lanes].slabs) > 0
    assert not violations(plan, problem)
    assert simulate(problem, plan).makespan_s == steady.chosen.simulated_s
    assert plan.claims.step_s == steady.chosen.step_s > steady.chosen.simulated_s


def test_lanes_have_memory_of_their_own_where_there_is_room(problem, steady):
    own = steady.chosen.lanes.own_bytes
    blocks = steady.blocks(steady.chosen)
    assert all(blocks.peak_bytes(lane) <= own[lane] for lane in (0, 1))
    # What is there before the step is in no lane.
    before = steady.problem.graph.held_bytes[steady.problem.graph.tensor_producer < 0].sum()
    assert steady.chosen.peak_bytes == before + sum(own)
    # It waits less often than any start in one memory, by more than a later start costs.
    for way in steady.tried[:-1]:
        assert steady.chosen.step_s <= 1.01 * placed(problem, way).step_s
    little = fit_waves(problem, num_waves=4, lean=True).chosen
    assert not little.lanes.own_bytes or little.lanes.part_bytes
    assert little.peak_bytes <= 1.25 * steady.one_wave_bytes
    # All that is reserved is planned, in one memory or in parts too.
    assert little.peak_bytes == before + sum(little.lanes.slabs)
    plan = steady.plan()
    assert Lanes.from_data(plan[Lanes].to_data(), problem) == plan[Lanes]
    # Calls that are asked for one by one follow each other in one memory.
    assert not fit_waves(make_problem(problem.graph, "1xv100-16g")).chosen.lanes.own_bytes


def test_a_tighter_budget_starts_later_and_none_too_tight_is_kept(problem, steady):
    budget = (steady.leanest.peak_bytes + steady.chosen.peak_bytes) // 2
    tight = fit_waves(problem, num_waves=4, budget_bytes=budget)
    assert tight.chosen.peak_bytes <= budget < steady.chosen.peak_bytes
    assert tight.chosen.step_s >= steady.chosen.step_s
    with pytest.raises(NoFeasiblePlanError, match="the leanest need"):
        fit_waves(problem, num_waves=4, budget_bytes=steady.one_wave_bytes // 2).plan()
    # What is named is enough for memory that is reserved, which takes more than what lives.
    least = fit_waves(problem, num_waves=4, budget_bytes=steady.least_bytes)
    assert least.chosen.peak_bytes <= steady.least_bytes


def test_waits_that_take_much_of_a_step_are_told_and_what_for(problem, steady):
    """On an H200 a wait took 8 us, and 315 of them a third of a step of short ops."""
    little = fit_waves(problem, num_waves=4, lean=True)
    for fit, what in ((steady, "results"), (little, "memory that one takes over")):
        assert fit.chosen.waits_s > 0.1 * fit.chosen.simulated_s
        (told,) = (why for why in reasons(fit) if "wait for each other" in why)
        assert f"{fit.chosen.num_waits} times for {what}" in told
    seldom = replace(steady)
    seldom.__dict__["chosen"] = replace(steady.chosen, num_waits=1)
    assert not any("wait for each other" in why for why in reasons(seldom))


def test_gains_within_what_predictions_were_off_are_close(steady):
    for gain, is_close in ((0.97, False), (1.0, False), (1.05, True), (CLOSE, False)):
        fit = replace(steady)
        fit.__dict__["chosen"] = Rated(gain * steady.best_alone.samples_per_s)
        assert fit.gain == pytest.approx(gain)
        assert fit.is_close == is_close


def test_lanes_are_a_candidate_where_they_shorten_the_step(problem, steady):
    way = judged(problem, steady.accumulated.shares)
    (found,) = in_lanes(problem, [way])
    assert found.step_s < 0.8 * way.step_s
    assert found.step_s == found.plan.claims.step_s > found.timeline.makespan_s
    assert not violations(found.plan, problem)
    assert in_lanes(problem, [judged(problem, steady.plain.shares)]) == []
    full = replayed(problem.graph, "1xk80")
    assert in_lanes(full, [judged(full, steady.accumulated.shares)]) == []


def test_batches_that_are_too_small_are_refused(problem):
    with pytest.raises(UsageError, match="fewer than"):
        fit_waves(problem, num_waves=5461)


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_that_travel_while_the_other_lane_still_runs_have_a_place(apart):
    """An exchange is no op of a wave: nobody can wait for the memory that it takes meanwhile."""
    layers = [nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(8)]
    graph = capture_sizes(nn.Sequential(*layers), torch.zeros(1024, 768))
    problem = replayed(graph, "2xv100-16g")
    fit = fit_waves(problem)
    for way in fit.tried:
        form = placed(problem, way, apart=apart)
        assert not violations(plan_of(problem, form), problem)
        blocks = fit.blocks(way)
        lasts = blocks.used_at.max(axis=0) >= len(blocks.sequence[0])
        assert (blocks.end_s[lasts] == way.timeline.makespan_s).all()
