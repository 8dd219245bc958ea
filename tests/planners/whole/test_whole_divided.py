"""Divided matrices, put-off gradients and gradients by priority, priced as they run."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from planners.whole.whole_nets import problem_on

from hocket.graph.graph import Phase
from hocket.plan.sections import Parallel, Priority, Replica
from hocket.plan.words import in_words
from hocket.planners.candidates import empty_plan
from hocket.planners.communication.priority import choose_for_replicas, with_priority
from hocket.planners.parallel.closed_form import block_edges, tables_of
from hocket.planners.parallel.compare import compare_parallel
from hocket.planners.parallel.constraints import parse_constraints
from hocket.planners.parallel.gradient_priority import BY_PRIORITY
from hocket.planners.parallel.simulated import simulated
from hocket.simulate.parallel.tensor_parallel import degrees_of, one_part, regions_of
from hocket.simulate.verify import violations


def test_what_priorities_would_bring_is_told_where_gradients_take_long(graph, tmp_path):
    file = tmp_path / "slow.toml"
    file.write_text('[[devices]]\nkind = "v100-16g"\n[network]\nbandwidth = "40Gbit/s"\n')

    def travel(on, places, *parts):
        problem = problem_on(graph, on)
        names = [problem.cluster.device_names[place] for place in places]
        made = [Replica(devices=(n,), microbatches=p) for n, p in zip(names, parts, strict=True)]
        plan = empty_plan(problem, "test").having(Parallel(replicas=tuple(made)))
        travel = choose_for_replicas(problem, plan)
        section = with_priority(problem, plan).get(Priority)
        assert (section is not None) == (travel is not None and travel.chosen.how.crosses)
        if section is not None:
            assert violations(with_priority(problem, plan), problem) == []
            assert Priority.from_data(section.to_data(), problem) == section
        return travel

    slow, fast = travel(f"2x{file}", (0, 1), (6,), (6,)), travel("dgx1-v100", (0, 3), (6,), (6,))
    assert slow.chosen.how.crosses
    assert slow.gain() > 1.1
    assert slow.computes_s == pytest.approx(fast.computes_s, rel=0.1)
    assert not fast.chosen.how.crosses
    assert "nothing to gain" in fast.why
    assert travel(f"2x{file}", (0,), (12,)) is None, "one replica sends nothing"
    assert travel(f"2x{file}", (0, 1), (3, 3), (6,)) is None, "accumulated ones are sent once"


def test_matrices_of_layers_are_divided_and_their_sums_take_time(text, unplaced):
    problem = problem_on(text, "dgx1-v100")
    regions = regions_of(text)
    assert degrees_of(text) == (2, 4, 8)
    # Two sums forward and two backward in each of two layers.
    assert len(regions.sums) == 8
    part = one_part(problem, 4)
    assert part.graph.flops[regions.is_divided].sum() == pytest.approx(
        text.flops[regions.is_divided].sum() / 4
    )
    products = text.flops > 1e8
    assert regions.is_divided[products].all(), "every large product is in a layer"
    names = problem.cluster.device_names
    found = {}
    for degree in (1, 2, 4):
        replica = Replica(devices=names[:degree], microbatches=(4,))
        found[degree] = simulated(problem, Parallel(replicas=(replica,), tensor=degree))
        assert violations(found[degree].plan, problem) == []
    assert found[4].step_s < found[2].step_s < found[1].step_s
    peaks = [found[degree].timeline.peak_bytes.max() for degree in (1, 2, 4)]
    assert peaks[2] < 0.6 * peaks[1] < 0.4 * peaks[0]
    groups = [Replica(devices=names[at : at + 2], microbatches=(1, 1)) for at in (0, 2)]
    for sizes in ((1, 1), (2,)):
        replicas = replace(groups[0], microbatches=sizes), groups[1]
        both = simulated(problem, Parallel(replicas=replicas, tensor=2))
        assert both.step_s is not None, "sums of layers and of gradients wait for each other"
    slow = simulated(problem_on(text, "4xt4"), found[4].plan[Parallel]).step_s
    alone = simulated(problem_on(text, "4xt4"), found[1].plan[Parallel]).step_s
    assert slow > alone / 4, "sums over PCIe are not hidden"


def test_divided_matrices_stand_in_the_table_and_keep_to_limits(text, unplaced):
    problem = problem_on(text, "dgx1-v100")
    rows = {c.planner: c for c in compare_parallel(problem).candidates}
    assert rows["tensor parallel"].feasible
    asked = compare_parallel(
        problem, must=parse_constraints(("tensor 2", "data 2", "pipeline 1"))
    ).winner
    assert asked.plan[Parallel].tensor == len(asked.plan[Parallel].replicas) == 2
    assert len(asked.plan[Parallel].devices) == 4
    assert "tensor parallel over" in in_words(asked.plan[Parallel])
    again = Parallel.from_data(asked.plan[Parallel].to_data(), problem)
    assert again == asked.plan[Parallel]


def test_divided_matrices_are_stages_of_pipelines_with_less_in_memory(text):
    problem = problem_on(text, "dgx1-v100")
    cut = int(np.flatnonzero(text.op_phase == Phase.FORWARD)[20])
    names = problem.cluster.device_names
    replica = Replica(devices=names[:4], microbatches=(1, 1, 2), cuts=(cut,))
    plain = simulated(problem, Parallel(replicas=(replica,), tensor=2))
    assert violations(plain.plan, problem) == []
    assert plain.timeline.peak_bytes[4:].max() == 0
    edges = block_edges(text)
    less = replace(replica, recomputed=tuple(pairwise(edges)), update="host")
    eased = simulated(problem, Parallel(replicas=(less,), tensor=2))
    assert eased.step_s > plain.step_s, "blocks and their sums are made again"
    assert eased.timeline.peak_bytes.sum() < plain.timeline.peak_bytes.sum()
    assert eased.planner == (
        "tensor parallel pipeline over gpu0 + gpu1 > gpu2 + gpu3, 3 microbatches of 1 and 2 each, "
        f"recompute {len(edges) - 1} blocks, optimizer on the host"
    )
    odd = Parallel(replicas=(replace(replica, devices=names[:3]),), tensor=2)
    wrong = violations(empty_plan(problem, "test").having(odd), problem)
    assert "each stage has 2 devices" in str(wrong)


def test_gradients_of_weights_are_put_off_where_stages_would_wait(graph):
    problem = problem_on(graph, "dgx1-v100")
    places = tables_of(problem).cuts
    cuts = tuple(int(places[len(places) * part // 4]) for part in (1, 2, 3))
    names = problem.cluster.device_names
    replica = Replica(devices=names[:4], microbatches=(2,) * 6, cuts=cuts)
    steps = {
        name: simulated(problem, Parallel(replicas=(replica,), schedule=name))
        for name in ("1f1b", "zb-h1", "zb-h2")
    }
    assert steps["zb-h1"].step_s < 0.97 * steps["1f1b"].step_s
    assert all(violations(way.plan, problem) == [] for way in steps.values())
    assert steps["zb-h1"].planner.startswith("pipeline (ZB-H1) over")
    again = replace(replica, recomputed=(tuple(block_edges(graph)[:2]),))
    wrong = empty_plan(problem, "test").having(Parallel(replicas=(again,), schedule="zb-h1"))
    assert "they are recomputed once" in str(violations(wrong, problem))


def test_gradients_by_priority_are_priced_as_a_step_among_many(graph, tmp_path, unplaced):
    file = tmp_path / "cores.toml"
    file.write_text('[[devices]]\nkind = "cpu-core"\n[network]\nbandwidth = "400Mbit/s"\n')
    problem = problem_on(graph, f"2x{file}")
    found = compare_parallel(problem)
    rows = {c.planner: c for c in found.candidates}
    fast = rows[BY_PRIORITY]
    assert fast.step_s < rows["DDP (baseline)"].step_s
    assert fast.plan.claims.step_s == fast.step_s
    assert fast.plan.get(Priority) is not None
    assert fast.step_s >= found.bound.seconds
    file.write_text('[[devices]]\nkind = "t4"\n[network]\nbandwidth = "10Gbit/s"\n')
    told = {c.planner: c for c in compare_parallel(problem_on(graph, f"2x{file}")).candidates}
    assert told[BY_PRIORITY].step_s is None
    assert "on CPUs only" in told[BY_PRIORITY].reason


def test_layers_without_known_names_are_not_divided(graph, unequal):
    assert degrees_of(graph) == ()
    replica = Replica(devices=unequal.cluster.device_names[:2], microbatches=(12,))
    refused = simulated(unequal, Parallel(replicas=(replica,), tensor=2))
    assert refused.step_s is None
    assert "cannot be split" in refused.reason
