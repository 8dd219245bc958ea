"""Memory that lanes hand over in parts: nothing is overwritten, and there are few waits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hocket.api import make_problem
from hocket.capture.sizes import capture_sizes
from hocket.cost.roofline import estimate_costs
from hocket.graph import GraphBuilder
from hocket.graph.generators import generate
from hocket.graph.graph import Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.sections import Lanes
from hocket.planners.waves.search import fit_waves
from hocket.planners.waves.waits_for_room import held_bytes, wave_lives
from hocket.planners.waves.way import (
    WAIT_S,
    best_within,
    hand_overs,
    handed_over,
    own_slabs,
    parted,
    places_of,
    places_within,
    plan_of,
    simulated,
)
from hocket.planners.waves.why import reasons
from hocket.runtime.train.waves import wave_order
from hocket.simulate import simulate
from hocket.simulate.parallel.lane_blocks import LaneBlocks, lane_blocks
from hocket.simulate.parallel.lanes import pass_order
from hocket.simulate.verify import violations

# ── graphs of any shape ──────────────────────────────────────────────────────────────────────────


@st.composite
def waves(draw):
    family = draw(st.sampled_from(["transformer", "gnmt", "layered", "series-parallel", "chain"]))
    graph = generate(family, draw(st.integers(60, 160)), draw(st.integers(0, 99)))
    passes = np.flatnonzero(graph.op_phase != Phase.OPTIMIZER)
    if not (graph.op_phase == Phase.BACKWARD).any():
        # Whatever comes in the second half may stand for a backward pass.
        phase = graph.op_phase.copy()
        phase[passes[len(passes) // 2 :]] = Phase.BACKWARD
        graph = replace(graph, op_phase=phase)
    return graph


@given(
    waves(), st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.4, 1.0]), st.integers(2, 5),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_nobody_overwrites_what_the_wave_before_may_still_use(
    graph, num_parts, share, num_waves, late
):
    """By the order inside of lanes and by the waits alone, however fast either lane is."""
    order, lives = pass_order(graph), wave_lives(graph)
    places = places_of(parted(graph), num_waves, num_parts, share, late=late)
    assert places.shape == (2, len(order))
    for lane in (0, 1):
        assert {*places[lane].tolist()} <= {lane, *range(2, num_parts + 2)}
    waits = hand_overs(graph, places, num_waves)
    assert len(waits) <= num_parts * (num_waves - 1)
    at = {int(op): number for number, op in enumerate(order)}
    for wave in range(1, num_waves):
        passed = np.full(len(order), -1)
        for wait in waits:
            if wait.wave == wave:
                assert wait.on_wave == wave - 1
                passed[at[wait.op]] = at[wait.on_op]
        passed = np.maximum.accumulate(passed)
        slab, before = (places[each % 2][lives.made_at] for each in (wave, wave - 1))
        for block in range(len(slab)):
            later = lives.used_at[before == slab[block]].max(initial=-1)
            assert passed[lives.made_at[block]] >= later


def needed(graph, places):
    """Each slab for the lane that holds most in it."""
    order, lives = pass_order(graph), wave_lives(graph)
    peaks = np.zeros((2, places.max() + 1), dtype=np.int64)
    for lane, row in enumerate(places):
        for slab in range(places.max() + 1):
            held = graph.workspace_bytes[order] * (row == slab)
            for number in np.flatnonzero(row[lives.made_at] == slab):
                held[lives.made_at[number] : lives.used_at[number] + 1] += lives.num_bytes[number]
            peaks[lane, slab] = held.max()
    return peaks.max(axis=0).sum()


@given(waves(), st.integers(1, 8), st.floats(0.9, 2.5), st.booleans())
@settings(max_examples=25, deadline=None)
def test_parts_fit_the_room_and_none_are_found_where_all_in_parts_does_not(
    graph, num_parts, times, late
):
    room = int(times * held_bytes(graph).max())
    found = places_within(graph, 2, num_parts, room, late=late)
    if found is None:
        assert needed(graph, places_of(parted(graph), 2, num_parts, 0.0, late=late)) > room
    else:
        assert needed(graph, found) <= room


def test_backward_passes_that_need_much_scratch_memory_take_parts_they_have_done_with():
    """Twelve ops that keep one block each; all but the last three go back with scratch memory."""
    builder = GraphBuilder("scratch")
    made = builder.tensor("in", 100, role=Role.INPUT)
    kept = []
    for number in range(12):
        op = builder.op(f"f{number}", "work", reads=[made], flops=1)
        made = builder.tensor(f"kept{number}", 100, producer=op)
        kept.append(made)
    for number in reversed(range(12)):
        op = builder.op(f"b{number}", "work", reads=[made, kept[number]], flops=1,
                        phase=Phase.BACKWARD, workspace_bytes=200 * (number < 9))  # fmt: skip
        made = builder.tensor(f"g{number}", 10, producer=op)
    graph = builder.build()
    early, late = (needed(graph, places_of(parted(graph), 3, 4, 0.0, late=late))
                   for late in (False, True))  # fmt: skip
    assert late == early - 400
    assert places_within(graph, 3, 4, int(late)) is None
    assert places_within(graph, 3, 4, int(late), late=True) is not None


# ── nets ─────────────────────────────────────────────────────────────────────────────────────────


class Blocks(nn.Module):
    """Ways around, statistics, and a mask that all blocks read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(10))
        self.norms = nn.ModuleList(nn.BatchNorm1d(48) for _ in range(10))

    def forward(self, rows):
        mask = rows > 0
        for layer, norm in zip(self.layers, self.norms, strict=True):
            rows = rows + torch.relu(norm(layer(rows))) * mask
        return rows.pow(2).mean()


@pytest.fixture(scope="module", params=[2, 3])
def fit(request):
    graph = capture_sizes(Blocks(), torch.randn(6144, 48))
    problem = make_problem(graph, "1xv100-16g")
    costs = estimate_costs(graph, problem.cluster, launches="replayed")
    return fit_waves(replace(problem, op_costs=costs), num_waves=request.param)


@pytest.fixture(scope="module")
def forms(fit):
    most = round(1.3 * fit.one_wave_bytes)
    return [*handed_over(fit.problem, fit.accumulated.shares, most)]


def test_addresses_in_parts_are_safe_and_parts_bound_the_waits(fit, forms):
    assert len(forms) >= 3
    num_waves = len(fit.accumulated.shares.replicas[0].microbatches)
    for way in forms:
        bare = replace(way.lanes, own_bytes=(), part_bytes=(), lived_bytes=0)
        start = simulated(fit.problem, way.shares, bare)
        blocks = lane_blocks(fit.problem.graph, start.unfolded, start.timeline)
        slab = own_slabs(blocks, way.lanes.places)
        at = [{op: n for n, op in enumerate(ops)} for ops in blocks.sequence]
        passed = [np.full(len(ops), -1) for ops in blocks.sequence]
        for wait in (*slab.waits, *way.lanes.waits):
            lane = wait.wave % 2
            here = at[lane][wait.wave, wait.op]
            passed[lane][here] = max(passed[lane][here], at[1 - lane][wait.on_wave, wait.on_op])
        passed = [np.maximum.accumulate(row) for row in passed]
        top = slab.address + blocks.num_bytes
        made = blocks.made_at >= 0
        in_parts = slab.address >= sum(slab.sizes[:2])
        for block in np.flatnonzero(made):
            lane = blocks.lane[block]
            meets = (slab.address < top[block]) & (top > slab.address[block]) & made
            for other in np.flatnonzero(meets & (blocks.lane != lane)):
                assert in_parts[block]
                assert in_parts[other]
                after = passed[lane][blocks.made_at[block]] >= blocks.used_at[1 - lane][other]
                before = passed[1 - lane][blocks.made_at[other]] >= blocks.used_at[lane][block]
                assert after or before
        # One for each part and wave, beside those for gradients that the other lane adds.
        num_results = len(own_slabs(blocks).waits)
        assert len(slab.waits) <= len(way.lanes.part_bytes) * (num_waves - 1) + num_results


def test_parts_hold_what_the_plan_says_and_no_more(fit, forms):
    graph = fit.problem.graph
    before = int(graph.held_bytes[graph.tensor_producer < 0].sum())
    for way in forms:
        assert way.peak_bytes == before + sum(way.lanes.slabs) <= 1.3 * fit.one_wave_bytes
        plan = plan_of(fit.problem, way)
        assert not violations(plan, fit.problem)
        assert simulate(fit.problem, plan).makespan_s == way.simulated_s
        assert plan.claims.step_s == way.simulated_s + WAIT_S * way.num_waits
        assert Lanes.from_data(plan[Lanes].to_data(), fit.problem) == plan[Lanes]


def test_pieces_are_planned_as_the_allocator_takes_them():
    """Two lanes of one block each, of a byte less than 10 MiB and of one more than that."""
    for num_bytes, taken in ((10 * 2**20 - 512, 10 * 2**20 - 512), (10 * 2**20 + 1, 12 * 2**20)):
        one = np.zeros(2, dtype=np.int32)
        blocks = LaneBlocks(
            num_bytes=np.full(2, num_bytes), start_s=np.zeros(2), end_s=np.ones(2),
            lane=np.arange(2, dtype=np.int32), made_at=one, used_at=np.array([[0, -1], [-1, 0]]),
            sequence=(((0, 0),), ((1, 0),)),
        )  # fmt: skip
        assert own_slabs(blocks).sizes == (taken, taken)


def test_lanes_keep_their_order_and_every_op_has_a_slab(fit, forms):
    looks = fit.problem.graph.only_looks
    expected = [op for op in pass_order(fit.problem.graph).tolist() if not looks[op]]
    for way in forms:
        order = wave_order(fit.problem, way.shares, way.lanes)
        num_waves = len(way.shares.replicas[0].microbatches)
        for wave in range(num_waves):
            assert [op for at, op in order.sequence if at == wave] == expected
        slabs = {order.slab_of(wave % 2, op) for wave, op in order.sequence}
        assert slabs == {*range(len(way.lanes.slabs))}


def test_the_quickest_form_within_a_small_budget_is_taken(fit, forms):
    """What waits cost decides: never slower, by more than a form that holds less may be, than what
    was made in parts."""
    most = round(1.3 * fit.one_wave_bytes)
    chosen = best_within(fit.problem, fit.tried, most)
    assert chosen.peak_bytes <= most
    assert chosen.step_s <= 1.01 * min(way.step_s for way in forms)
    if chosen.lanes.part_bytes:
        told = reasons(replace(fit, budget_bytes=most))
        assert any("wait once for each" in why for why in told)


def test_parts_that_cannot_be_are_refused(fit, forms):
    plan = plan_of(fit.problem, forms[0])
    lanes = plan[Lanes]
    assert not [*lanes.verify(fit.problem, plan)]
    for wrong, words in (
        (replace(lanes, places=lanes.places[1:]), "places are told of two lanes"),
        (replace(lanes, places=tuple(row[1:] for row in lanes.places)), "each of the"),
        (replace(lanes, part_bytes=lanes.part_bytes[1:]), "not there or is the other's"),
        (replace(lanes, places=lanes.places[::-1]), "not there or is the other's"),
        (replace(lanes, own_bytes=(), part_bytes=()), "beside memory of each lane's own"),
    ):
        found = wrong.verify(fit.problem, Plan().having(plan[type(forms[0].shares)]))
        assert any(words in violation.message for violation in found)


def test_parts_that_hold_nothing_are_verified_as_the_others(fit, forms):
    plan = plan_of(fit.problem, forms[0])
    lanes = plan[Lanes]
    crowded = replace(lanes, places=tuple((2,) * len(row) for row in lanes.places))
    assert not violations(plan, fit.problem)
    found = violations(plan.having(crowded), fit.problem)
    assert [each.message for each in found if each.message.startswith("memory 2 of the lanes")]
