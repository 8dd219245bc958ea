"""Two waves: when the second begins, and what both hold."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from planners.plain_kernels import plain_kernels  # noqa: F401
from torch import nn

from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.capture.sizes import capture_sizes
from hocket.cost import demand
from hocket.cost.host import HostOverhead
from hocket.cost.profile import Profile, ProfileEntry
from hocket.cost.roofline import estimate_costs
from hocket.graph.graph import Phase
from hocket.plan.make import make_problem
from hocket.plan.sections import Waves
from hocket.planners.parallel.simulated import simulated as judged
from hocket.planners.waves.wave_candidate import two_stream_candidate
from hocket.planners.waves.wave_search import CLOSE, fit_waves, reasons
from hocket.simulate import simulate
from hocket.simulate.parallel import priced_at
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
def test_the_best_start_has_the_joint_peak_of_the_closed_form(problem, on, half_filled):
    """Of what rises over f and falls over b half a period apart, and as much as one of the twelve
    layers on top: memory comes in steps. On quicker devices starts of kernels decide, not these,
    and kernels that take turns would keep each other back op by op."""
    problem = replayed(problem.graph, on)
    steady = fit_waves(problem, num_waves=4)
    times = ratio(problem, steady.accumulated.parallel.replicas[0].microbatches[0])
    assert times == pytest.approx(2.0, abs=0.05)
    one = steady.one_wave_bytes
    graph = problem.graph
    before = int(graph.held_bytes[graph.tensor_producer < 0].sum())
    closed = 1 + (times - 1) / (2 * times)
    joint = [each.peak_bytes - each.waves.separate_bytes for each in steady.tried]
    assert min(joint) - before <= (one - before) * (closed + 0.11)
    assert joint[0] - before > 1.9 * (one - before)
    # Streams that were captured share no memory, whenever the second begins.
    assert min(each.peak_bytes for each in steady.tried) - before > 1.9 * (one - before)


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


def test_waves_of_small_kernels_overlap(steady):
    assert steady.smallest.step_s < 0.8 * steady.accumulated.step_s


def test_memory_of_both_streams_adds_up(steady):
    blocks = steady.smallest.memory
    times, both = blocks.curve()
    alone = [blocks.curve(stream) for stream in (0, 1)]
    held = [np.append(0, c)[np.searchsorted(t, times, "right")] for t, c in alone]
    assert (held[0] + held[1]).tolist() == both.tolist()
    # Tensors from before the step are in no stream.
    before = steady.problem.graph.held_bytes[steady.problem.graph.tensor_producer < 0].sum()
    own = blocks.peak_bytes(0) + blocks.peak_bytes(1)
    assert own + before == pytest.approx(steady.smallest.peak_bytes, rel=0.05)
    assert steady.smallest.waves.separate_bytes == own - blocks.peak_bytes() > 0


def test_plans_are_legal_and_take_what_was_promised(problem, steady):
    plan = steady.plan()
    assert plan[Waves].separate_bytes > 0
    assert not violations(plan, problem)
    assert simulate(problem, plan).makespan_s == steady.chosen.timeline.makespan_s
    assert plan.claims.step_s == steady.chosen.step_s > steady.chosen.timeline.makespan_s


def test_a_tighter_budget_starts_later_and_none_too_tight_is_kept(problem, steady):
    eager = make_problem(problem.graph, "1xv100-16g")
    wide = fit_waves(eager, num_waves=4)
    budget = (wide.smallest.peak_bytes + wide.aligned.peak_bytes) // 2
    tight = fit_waves(eager, num_waves=4, budget_bytes=budget)
    assert tight.chosen.peak_bytes <= budget < wide.aligned.peak_bytes
    assert tight.chosen.waves.lead > 0
    with pytest.raises(NoFeasiblePlanError, match="they need"):
        fit_waves(problem, num_waves=4, budget_bytes=steady.one_wave_bytes // 2).plan()
    least = fit_waves(problem, num_waves=4, budget_bytes=steady.smallest.peak_bytes)
    assert least.chosen.peak_bytes <= steady.smallest.peak_bytes


def test_waits_that_take_much_of_a_step_are_reported(problem, steady):
    """On an H200 a wait took 8 us, and 315 of them a third of a step of short ops."""
    assert steady.chosen.waits_s > 0.1 * steady.chosen.timeline.makespan_s
    (told,) = (why for why in reasons(steady) if "wait for each other" in why)
    assert f"{steady.chosen.num_waits} times for results" in told
    seldom = replace(steady)
    seldom.__dict__["chosen"] = replace(steady.chosen, num_waits=1)
    assert not any("wait for each other" in why for why in reasons(seldom))


def test_gains_within_what_predictions_were_off_are_close(steady):
    for gain, is_close in ((0.97, False), (1.0, False), (1.05, True), (CLOSE, False)):
        fit = replace(steady)
        fit.__dict__["chosen"] = Rated(gain * steady.best_alone.samples_per_s)
        assert fit.gain == pytest.approx(gain)
        assert fit.is_close == is_close


def test_two_streams_are_a_candidate_where_they_shorten_the_step(problem, steady):
    way = judged(problem, steady.accumulated.parallel)
    (found,) = two_stream_candidate(problem, [way])
    assert found.step_s < 0.8 * way.step_s
    assert found.step_s == found.plan.claims.step_s > found.timeline.makespan_s
    assert not violations(found.plan, problem)
    assert two_stream_candidate(problem, [judged(problem, steady.plain.parallel)]) == []
    full = replayed(problem.graph, "1xk80")
    assert two_stream_candidate(full, [judged(full, steady.accumulated.parallel)]) == []


def test_batches_that_are_too_small_are_refused(problem):
    with pytest.raises(UsageError, match="fewer than"):
        fit_waves(problem, num_waves=5461)
