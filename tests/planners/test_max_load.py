"""Max-load planners against brute force, plain twins and known cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planners.max_load_cases import (
    all_placements,
    contiguously,
    freely,
    is_ordered,
    plain_load_s,
    returns_to_a_device,
    stated_problems,
)
from simulate.problems import joined, placements, problem_of, problems

from hocket.base.errors import NoFeasiblePlanError
from hocket.graph import GraphBuilder, Phase, Role
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.verify import require_structure
from hocket.planners.max_load import dpl, max_load_planner, pipedream, throughput
from hocket.planners.max_load.contiguous_split import (
    acyclic,
    contracted,
    depth_first_order,
    neck_blocks,
)
from hocket.planners.max_load.device_classes import device_classes
from hocket.planners.max_load.load_annealing import Heat, annealed
from hocket.planners.max_load.load_bound import max_load_bound
from hocket.planners.max_load.load_pieces import Pieces, pieces_of
from hocket.planners.max_load.stage_split import best_split, chain_lattice, ideal_lattice
from hocket.simulate.load import device_load_s, max_load_s
from hocket.simulate.verify import verify

PLANNERS = {"throughput": throughput, "dpl": dpl, "pipedream": pipedream}


def _poset(num: int, pairs: list[tuple[int, int]]) -> Pieces:
    before, after = (np.array([p[k] for p in pairs], dtype=np.int32) for k in (0, 1))
    return Pieces(
        piece_of=np.arange(num, dtype=np.int32),
        seconds=np.ones((1, num)),
        memory_bytes=np.zeros(num, dtype=np.int64),
        net_ptr=np.zeros(1, dtype=np.int64),
        net_pieces=np.zeros(0, dtype=np.int32),
        net_count=np.zeros(0),
        net_work=np.zeros(0),
        before=before,
        after=after,
    )


# ── loads ────────────────────────────────────────────────────────────────────────────────────────


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=problems(), data=st.data())
def test_device_load_is_that_of_the_plain_definition(problem, data):
    device_of = data.draw(placements(problem))
    np.testing.assert_allclose(
        device_load_s(problem, device_of), plain_load_s(problem, device_of), rtol=1e-12
    )


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=problems(), data=st.data())
def test_pieces_and_nets_have_the_loads_of_their_ops(problem, data):
    pieces = pieces_of(problem)
    last = problem.cluster.num_devices - 1
    choice = st.lists(st.integers(0, last), min_size=pieces.num_pieces, max_size=pieces.num_pieces)
    device_of = np.array(data.draw(choice), dtype=np.int32)
    found = annealed(
        problem, pieces, device_of, Heat(num_tries=0), limit_bytes=problem.memory_bytes
    )
    expected = max_load_s(problem, device_of[pieces.piece_of])
    assert found.max_load_s == pytest.approx(expected, rel=1e-12)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=problems(), seed=st.integers(0, 5))
def test_annealing_reports_the_load_of_what_it_returns(problem, seed):
    pieces = pieces_of(problem)
    assume(pieces.num_pieces > 0)
    start = np.zeros(pieces.num_pieces, dtype=np.int32)
    heat = Heat(num_tries=500, start=0.2)
    found = annealed(problem, pieces, start, heat, limit_bytes=problem.memory_bytes, seed=seed)
    assert found.max_load_s == pytest.approx(
        max_load_s(problem, found.device_of[pieces.piece_of]), rel=1e-9
    )
    assert found.max_load_s <= max_load_s(problem, start[pieces.piece_of]) * (1 + 1e-12)


# ── contiguous splits ────────────────────────────────────────────────────────────────────────────


@settings(derandomize=True, deadline=None, max_examples=40)
@given(problem=stated_problems())
def test_contiguous_throughput_is_the_optimum_of_brute_force(problem):
    feasible = [d for d in all_placements(problem) if is_ordered(problem, d)]
    if not feasible:
        with pytest.raises(NoFeasiblePlanError):
            throughput(contiguously(problem), Plan())
        return
    plan = throughput(contiguously(problem), Plan())
    best = min(max_load_s(problem, device_of) for device_of in feasible)
    assert plan.claims.max_load_s == pytest.approx(best, rel=1e-9, abs=1e-15)
    assert plan.claims.proven
    assert is_ordered(problem, plan.device_of)
    assert not returns_to_a_device(problem, plan.device_of)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=stated_problems(max_nodes=9))
def test_one_order_is_never_better_than_all_and_pipedream_never_better_than_it(problem):
    loads = []
    for planner in (throughput, dpl, pipedream):
        try:
            plan = planner(contiguously(problem), Plan())
        except NoFeasiblePlanError:
            loads.append(np.inf)
            continue
        assert is_ordered(problem, plan.device_of)
        loads.append(plan.claims.max_load_s)
    assert loads[0] <= loads[1] * (1 + 1e-9)
    assert loads[0] <= loads[2] * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=stated_problems(max_nodes=8))
def test_contraction_keeps_the_optimum(problem):
    pieces, _ = acyclic(pieces_of(problem))
    classes = device_classes(problem, problem.memory_bytes)
    bytes_matter = int(pieces.memory_bytes.sum()) > int(classes.limit_bytes.min())
    net_s = classes.net_s(pieces).max(axis=0)
    smaller, _ = contracted(pieces, net_s, bytes_matter=bytes_matter)
    found = [
        best_split(each, classes, ideal_lattice(each, 1000), np.inf, 10**6).split
        for each in (pieces, smaller)
    ]
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        assert found[1].max_load_s == pytest.approx(found[0].max_load_s, rel=1e-9, abs=1e-15)


def test_lattice_counts_the_ideals_of_known_orders():
    chain = _poset(70, [(k, k + 1) for k in range(69)])
    assert ideal_lattice(chain, 1000).num_ideals == 71
    assert ideal_lattice(_poset(10, []), 2000).num_ideals == 2**10
    ladder = _poset(8, [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)])
    assert ideal_lattice(ladder, 1000).num_ideals == 5 * 5


def test_lattice_gives_up_above_its_limit():
    assert ideal_lattice(_poset(20, []), 1000) is None


def test_lattice_of_an_order_has_its_prefixes():
    order = np.array([2, 0, 1], dtype=np.int32)
    lattice = chain_lattice(order)
    assert lattice.num_ideals == 4
    assert lattice.step_piece.tolist() == [2, 0, 1]


def test_depth_first_order_is_topological():
    pieces = _poset(6, [(0, 2), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5)])
    for latest_first in (True, False):
        position = np.argsort(depth_first_order(pieces, latest_first=latest_first))
        assert np.all(position[pieces.before] < position[pieces.after])


def test_necks_keep_branches_together():
    diamonds = _poset(7, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)])
    blocks = neck_blocks(diamonds, np.zeros(diamonds.num_nets))
    assert [sorted(np.flatnonzero(blocks == k).tolist()) for k in range(3)] == [
        [0, 1, 2], [3, 4, 5], [6],
    ]  # fmt: skip


# ── any placement ────────────────────────────────────────────────────────────────────────────────


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=stated_problems(max_nodes=5))
def test_free_throughput_is_the_optimum_of_brute_force_on_tiny_graphs(problem):
    loads = [max_load_s(problem, device_of) for device_of in all_placements(problem)]
    if not loads:
        with pytest.raises(NoFeasiblePlanError):
            throughput(freely(problem), Plan())
        return
    plan = throughput(freely(problem), Plan())
    assert plan.claims.max_load_s == pytest.approx(min(loads), rel=1e-9, abs=1e-15)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=stated_problems(max_nodes=5))
def test_no_placement_is_below_the_bound(problem):
    loads = [max_load_s(problem, device_of) for device_of in all_placements(problem)]
    assert max_load_bound(problem) <= min(loads, default=np.inf) * (1 + 1e-9)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(problem=problems(max_ops=6), data=st.data())
def test_no_placement_is_below_the_bound_where_links_differ(problem, data):
    pieces = pieces_of(problem)
    last = problem.cluster.num_devices - 1
    choice = st.lists(st.integers(0, last), min_size=pieces.num_pieces, max_size=pieces.num_pieces)
    device_of = np.array(data.draw(choice), dtype=np.int32)[pieces.piece_of]
    assert max_load_bound(problem) <= max_load_s(problem, device_of) * (1 + 1e-9)


def test_smallest_home_proves_a_split_that_no_sum_of_work_does():
    # Two ops of 1 s joined by a tensor of 10 s: apart, each device pays the tensor.
    builder = GraphBuilder("pair")
    first = builder.op("first", flops=1e9)
    tensor = builder.tensor("between", 10 * 10**9, producer=first)
    builder.op("second", flops=1e9, reads=[tensor])
    problem = make_problem(builder.build(), "2xv100-16g")
    both = np.zeros(2, dtype=np.int32)
    together_s = max_load_s(problem, both)
    assert max_load_s(problem, np.array([0, 1])) > together_s
    assert max_load_bound(problem) == pytest.approx(together_s, rel=1e-5)


# ── every planner ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PLANNERS)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(problem=problems(max_ops=10))
def test_planner_gives_a_legal_plan_that_tells_its_load(name, problem):
    problem = contiguously(problem)
    plan = PLANNERS[name](problem, Plan(notes={"kept": 1}))
    require_structure(plan, problem)
    verify(plan, problem)
    assert plan.notes["kept"] == 1
    assert plan.claims.max_load_s == max_load_s(problem, plan.device_of)
    assert plan.claims.load_bound_s <= plan.claims.max_load_s
    assert not returns_to_a_device(problem, plan.device_of)


def test_no_bound_counts_on_partners_that_a_free_placement_may_separate():
    builder = GraphBuilder("pair")
    forward = builder.op("f")
    made = builder.tensor("y", 1, producer=forward)
    builder.op("b", reads=[made], phase=Phase.BACKWARD, partner=forward)
    problem = problem_of(builder.build(), joined(2, 1e9, 0.0), np.ones(2))
    free = replace(problem, objective="throughput")
    apart_s = max_load_s(free, np.array([0, 1], dtype=np.int32))
    assert apart_s < 2
    assert max_load_bound(free) <= apart_s
    for planner in (throughput, dpl, pipedream):
        assert planner(free, Plan()).claims.load_bound_s <= apart_s
    together = throughput(replace(free, contiguous=True), Plan()).claims
    assert together.proven
    assert together.load_bound_s == 2


@settings(derandomize=True, deadline=None, max_examples=15)
@given(problem=problems(max_ops=10))
def test_free_throughput_is_legal_and_no_worse_than_contiguous(problem):
    free = throughput(freely(problem), Plan())
    verify(free, problem)
    ordered = throughput(contiguously(problem), Plan())
    assert free.claims.max_load_s <= ordered.claims.max_load_s * (1 + 1e-9)


@pytest.mark.parametrize("on", ["4xv100-16g", "dgx1-v100"])
@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "free"])
def test_throughput_of_a_training_step_beats_equal_blocks_and_repeats_itself(
    on, is_contiguous, monkeypatch
):
    monkeypatch.setattr(max_load_planner, "_MAX_TRIES", 30_000)
    problem = make_problem(generate("gnmt", 800), on)
    problem = replace(problem, objective="throughput", contiguous=is_contiguous)
    plan = throughput(problem, Plan())
    verify(plan, problem)
    again = throughput(problem, Plan())
    assert plan.device_of.tobytes() == again.device_of.tobytes()
    num = problem.cluster.num_devices
    blocks = pieces_of(problem).piece_of
    equal = (blocks.astype(np.int64) * num // (int(blocks.max()) + 1)).astype(np.int32)
    assert plan.claims.max_load_s < 0.8 * max_load_s(problem, equal)


def test_throughput_of_an_empty_graph_places_nothing():
    problem = make_problem(GraphBuilder("empty").build(), "2xv100-16g")
    for planner in PLANNERS.values():
        assert len(planner(problem, Plan()).device_of) == 0


def test_throughput_says_that_a_graph_does_not_fit():
    builder = GraphBuilder("large")
    weight = builder.tensor("weight", 2**49, role=Role.PARAMETER)
    builder.op("op", flops=1.0, reads=[weight])
    problem = make_problem(builder.build(), "2xv100-16g")
    with pytest.raises(NoFeasiblePlanError, match="hold its part"):
        throughput(replace(problem, objective="throughput"), Plan())
