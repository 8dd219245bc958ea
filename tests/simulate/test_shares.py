"""A shared batch as one graph: what must hold of its times, bytes and order."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from hocket.base.errors import CheckError, InputFileError
from hocket.capture.sizes import capture_sizes
from hocket.cost.calibrate import Calibration
from hocket.cost.collectives import ring_all_reduce_s, ring_path
from hocket.cost.efficiency import Efficiency, KindFit
from hocket.graph.graph import Phase, Role, Stream
from hocket.graph.verify import verify_graph
from hocket.plan.files import plan_from_data, plan_to_data
from hocket.plan.make import make_problem
from hocket.plan.sections import Parallel, Placement, Replica
from hocket.plan.verify import structure_violations
from hocket.planners.candidates import empty_plan
from hocket.planners.parallel.closed_form import block_edges, tables_of
from hocket.simulate import simulate
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel import expand, priced_at
from hocket.simulate.parallel.batch_costs import accumulate_s, gradients_of
from hocket.simulate.parallel.stage_order import slots
from hocket.simulate.verify import violations

NAMES = ("a", "b", "c")


class Tied(nn.Module):
    """The first and the last layer share a weight, as language models do."""

    def __init__(self, width=256):
        super().__init__()
        self.table = nn.Embedding(512, width)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4))
        )
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words):
        return self.head(self.body(self.table(words))).logsumexp(-1).mean()


@pytest.fixture(scope="module")
def problem():
    graph = capture_sizes(Tied(), torch.zeros(8, 64, dtype=torch.long))
    return make_problem(graph, "1xrtx3090+1xv100-16g+1xt4")


def shares(problem, *replicas, **options):
    names = problem.cluster.device_names
    return Parallel(
        replicas=tuple(
            Replica(devices=tuple(names[d] for d in devices), microbatches=sizes, cuts=cuts)
            for devices, sizes, cuts in replicas
        ),
        **options,
    )


def plan_of(problem, section):
    return empty_plan(problem, "test").having(section)


def test_one_device_with_all_samples_is_the_plain_placement(problem):
    placed = empty_plan(problem, "x").having(Placement(np.zeros(problem.graph.num_ops, np.int32)))
    plain = simulate(problem, placed)
    shared = simulate(problem, plan_of(problem, shares(problem, ((0,), (8,), ()))))
    assert shared.makespan_s == pytest.approx(plain.makespan_s, rel=1e-12)
    assert shared.peak_bytes.tolist() == plain.peak_bytes.tolist()


def test_accumulation_takes_its_passes_and_sums_and_holds_less(problem):
    whole = simulate(problem, plan_of(problem, shares(problem, ((0,), (8,), ()))))
    _, split = simulate_parallel(problem, shares(problem, ((0,), (3, 3, 2), ())))
    row = problem.costs.device_row[0]
    is_pass = problem.graph.op_phase != Phase.OPTIMIZER
    passes = sum(priced_at(problem, n).costs.op_s[row, is_pass].sum() for n in (3, 3, 2))
    sums = 2 * accumulate_s(problem, tuple(gradients_of(problem.graph).tolist()))[row].sum()
    updates = problem.costs.op_s[row, ~is_pass].sum()
    assert split.makespan_s == pytest.approx(passes + sums + updates, rel=1e-9)
    assert split.peak_bytes[0] < whole.peak_bytes[0]


def test_sums_of_gradients_are_priced_as_updates_whatever_slow_ops_a_fit_has_seen(problem):
    kind, parts = problem.cluster.kinds[0], tuple(gradients_of(problem.graph).tolist())

    def sums_s(family):
        slow = KindFit(efficiency={family: Efficiency(0.01, 0.01)})
        found = Calibration({kind.name: slow})
        fitted = make_problem(problem.graph, problem.cluster, calibration=found)
        return float(accumulate_s(fitted, parts)[0].sum())

    plain_s = float(accumulate_s(problem, parts)[0].sum())
    assert sums_s("elementwise") == pytest.approx(plain_s)
    assert sums_s("optimizer") > 5 * plain_s


def test_unfolded_graphs_are_legal_and_hold_every_op_once_per_microbatch(problem):
    cut = int(np.flatnonzero(problem.graph.op_phase == Phase.FORWARD)[6])
    section = shares(problem, ((0, 1), (2, 2, 1), (cut,)), ((2,), (3,), ()))
    found = expand(problem, section)
    verify_graph(found.problem.graph)
    is_pass = problem.graph.op_phase != Phase.OPTIMIZER
    on_communication = found.problem.graph.op_stream == Stream.COMMUNICATION
    num_passes = np.count_nonzero(found.problem.graph.op_phase == Phase.FORWARD)
    assert num_passes == 4 * np.count_nonzero(problem.graph.op_phase == Phase.FORWARD)
    assert on_communication.sum() % 4 == 0  # ready and reduced, on both sides
    assert np.count_nonzero(found.problem.graph.op_phase == Phase.OPTIMIZER) == 2 * (~is_pass).sum()


def test_replicas_wait_for_each_other_and_for_the_exchange(problem):
    _, timeline = simulate_parallel(problem, shares(problem, ((0,), (5,), ()), ((1,), (3,), ())))
    alone = [
        simulate_parallel(problem, shares(problem, ((device,), (size,), ())))[1].makespan_s
        for device, size in ((0, 5), (1, 3))
    ]
    graph = problem.graph
    ring = ring_path(problem.cluster, (0, 1))
    sizes = graph.tensor_bytes[gradients_of(graph)]
    whole_s = float(ring_all_reduce_s(sizes.sum(), 2, ring.latency_s, ring.bandwidth_bps))
    assert timeline.makespan_s > max(alone)
    assert timeline.makespan_s < max(alone) + whole_s + 40 * ring.latency_s


def test_a_pipeline_runs_1f1b_and_a_tied_weight_travels_once(problem):
    graph, places = problem.graph, tables_of(problem).cuts
    cut = int(places[len(places) // 2])
    for number in (2, 4):
        section = shares(problem, ((0, 1), (8 // number,) * number, (cut,)))
        found, timeline = simulate_parallel(problem, section)
        sent = found.problem.graph.tensor_bytes[timeline.transfer_tensor]
        table = int(graph.tensor_bytes[graph.tensor_role == 1].max())
        assert np.count_nonzero(sent == table) == 2  # the weight there, its gradient back


def test_slots_are_1f1b_gpipe_and_accumulation():
    order = slots(2, 3, "1f1b")
    assert sorted([(int(order[0, k, m]), "FB"[k], m) for k in (0, 1) for m in range(3)]) == [
        (0, "F", 0), (1, "F", 1), (2, "B", 0), (3, "F", 2), (4, "B", 1), (5, "B", 2),
    ]  # fmt: skip
    gpipe = slots(2, 3, "gpipe")
    assert gpipe[0, 0].max() < gpipe[0, 1].min()
    alone = slots(1, 2, "1f1b")
    assert alone[0].tolist() == [[0, 2], [1, 3]]


def test_stages_that_wait_in_a_circle_are_refused(problem):
    forward = np.flatnonzero(problem.graph.op_phase == Phase.FORWARD)
    seen = set()
    for cut in forward[1:].tolist():
        try:
            simulate_parallel(problem, shares(problem, ((0, 1), (4, 4), (cut,))))
            seen.add("runs")
        except CheckError:
            seen.add("refused")
    assert "runs" in seen


def test_a_plan_file_of_shares_reads_back_the_same(problem):
    section = shares(problem, ((0,), (3, 2), ()), ((1,), (3,), ()))
    data = plan_to_data(problem, plan_of(problem, section))
    again = plan_from_data(data, "plan.json")
    assert again.plan[Parallel] == section
    assert simulate(again.problem, again.plan).makespan_s == pytest.approx(
        simulate(problem, plan_of(problem, section)).makespan_s
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.update(devices=["nobody"]), "no device 'nobody'"),
        (lambda r: r.update(microbatches=[1]), "4 of the batch's 8 samples"),
        (lambda r: r.update(cuts=[3]), "one cut between two stages"),
        (lambda r: r.update(microbatches=[]), "no sample"),
        (lambda r: r.update(devices=["gpu1"]), "two stages"),
    ],
)
def test_shares_that_make_no_sense_are_refused(problem, change, told):
    section = shares(problem, ((0,), (3, 2), ()), ((1,), (3,), ()))
    data = plan_to_data(problem, plan_of(problem, section))
    change(data["sections"]["parallel"]["replicas"][0])
    with pytest.raises(InputFileError, match=told):
        plan_from_data(data, "plan.json")


def test_a_plan_that_places_and_shares_says_two_things(problem):
    plan = plan_of(problem, shares(problem, ((0,), (8,), ())))
    both = plan.having(Placement(np.zeros(problem.graph.num_ops, np.int32)))
    assert any(v.rule == "parallel" for v in violations(both, problem))


def test_a_microbatch_without_a_sample_is_a_violation(problem):
    for sizes in ((8, 0), ()):
        plan = plan_of(problem, shares(problem, ((0,), sizes, ())))
        assert any("no sample" in v.message for v in structure_violations(plan, problem))


def test_memory_of_every_device_is_checked(problem):
    kept = np.full(len(problem.costs.kind_names), 2**44)
    small = replace(problem, op_costs=replace(problem.costs, reserved_bytes=kept))
    plan = plan_of(problem, shares(problem, ((0,), (5,), ()), ((1,), (3,), ())))
    rules = [v.rule for v in violations(plan, small)]
    assert set(rules) == {"memory"}


def test_sharded_replicas_keep_a_part_each_and_gather_every_block(problem):
    replicas = (((0,), (4, 2), ()), ((1,), (1, 1), ()))
    plain, whole = simulate_parallel(problem, shares(problem, *replicas))
    section = shares(problem, *replicas, zero=3)
    found, (_, timeline) = expand(problem, section), simulate_parallel(problem, section)
    verify_graph(found.problem.graph)

    def held(expanded):
        graph = expanded.problem.graph
        is_state = np.isin(graph.tensor_role, (Role.PARAMETER, Role.OPTIMIZER_STATE))
        return int(graph.held_bytes[is_state & (graph.tensor_producer < 0)].sum())

    assert held(found) == pytest.approx(held(plain) / 2, rel=0.01)
    graph = found.problem.graph
    kinds = np.array(graph.kinds)[graph.op_kind]
    gathered = graph.tensor_bytes[[t for t, name in enumerate(graph.tensor_names)
                                   if name.startswith("gather.")]].sum()  # fmt: skip
    parameters = held(plain) / 2 / 3  # two replicas; weights and two states of Adam
    assert gathered >= 2 * 2 * 2 * parameters * 0.99  # two passes, forward and backward, replicas
    assert (kinds == "exchange").any()
    assert timeline.makespan_s > 0.9 * whole.makespan_s


def test_sharded_cpus_wait_for_every_collective_and_scatter_by_all_reduces(problem):
    """As FSDP2 does over gloo: nothing overlaps, and a reduce-scatter sends twice its bytes."""
    cpus = make_problem(problem.graph, "2xcpu-core")
    section = shares(cpus, ((0,), (4,), ()), ((1,), (4,), ()), zero=3)
    graph = expand(cpus, section).problem.graph
    step, timeline = simulate_parallel(cpus, section)
    op_s = step.problem.costs.op_s[0]
    own = np.flatnonzero(step.device_of == 0)
    assert timeline.makespan_s == pytest.approx(op_s[own].sum(), rel=0.02)
    names, is_own = np.array(list(graph.op_names)), step.device_of == 0
    seconds = {
        what: op_s[is_own & np.char.startswith(names, what)].sum() for what in ("gather", "scatter")
    }
    # Two gathers of half an all-reduce each: in the forward and in the backward pass.
    assert seconds["scatter"] == pytest.approx(seconds["gather"], rel=0.1)


def easing(problem, section, **changes):
    return replace(
        section, replicas=tuple(replace(replica, **changes) for replica in section.replicas)
    )


def blocks_of(problem):
    return tuple(pairwise(block_edges(problem.graph)))


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        ((((0,), (4, 4), ()),), {}),
        ((((0,), (5,), ()), ((1,), (3,), ())), {}),
        ((((0,), (3, 2), ()), ((1,), (2, 1), ())), {"zero": 3}),
        ((((0, 1), (2, 2, 2, 2), None),), {}),
    ],
    ids=["accumulated", "data parallel", "sharded", "pipeline"],
)
def test_recomputed_blocks_hold_less_and_take_their_forward_pass_again(problem, replicas, options):
    cut = int(tables_of(problem).cuts[len(tables_of(problem).cuts) // 2])
    replicas = [(d, sizes, (cut,) if cuts is None else cuts) for d, sizes, cuts in replicas]
    section = shares(problem, *replicas, **options)
    eased = easing(problem, section, recomputed=blocks_of(problem))
    verify_graph(expand(problem, eased).problem.graph)
    plain, again = (
        simulate(problem, plan_of(problem, section)),
        simulate(problem, plan_of(problem, eased)),
    )
    # Where logits and exchanged buckets are the most that is held, blocks give nothing back.
    assert (again.peak_bytes <= plain.peak_bytes).all()
    assert again.makespan_s > plain.makespan_s
    found = expand(problem, eased).problem
    runs = [i for i, name in enumerate(found.graph.op_names) if "@recompute" in name]
    once = [name.split("@")[0] for name in np.array(found.graph.op_names)[runs]]
    passes = sum(len(sizes) for _, sizes, _ in replicas)
    assert len(runs) == passes * len(set(once))
    assert not violations(plan_of(problem, eased), problem, again)


def test_an_update_on_the_host_keeps_no_state_and_copies_gradients_and_parameters(problem):
    section = easing(problem, shares(problem, ((0,), (5,), ()), ((1,), (3,), ())), update="host")
    found = expand(problem, section)
    verify_graph(found.problem.graph)
    graph, given = found.problem.graph, problem.graph
    assert graph.tensor_bytes[graph.tensor_role == Role.OPTIMIZER_STATE].sum() == 0
    gradients = int(given.tensor_bytes[gradients_of(given)].sum())
    copies = [s for n, s in zip(graph.op_names, graph.op_stream, strict=True) if "out." in n]
    assert copies
    assert set(copies) == {Stream.COPY_OUT}
    timeline = simulate(problem, plan_of(problem, section))
    is_host = found.problem.graph.op_stream == Stream.HOST
    seconds = (timeline.op_end_s - timeline.op_start_s)[is_host]
    touched = given.bytes_touched[given.op_phase == Phase.OPTIMIZER].sum()
    # Two devices of one host share what its memory gives.
    assert seconds.sum() == pytest.approx(
        2 * 2 * touched / found.problem.cluster.host_update_bps, rel=1e-3
    )
    assert gradients > 0


def test_an_update_on_the_host_that_reads_no_gradient_copies_nothing(problem):
    role = problem.graph.tensor_role
    role = np.where(role == Role.GRADIENT, Role.ACTIVATION, role).astype(role.dtype)
    without = replace(problem, work=replace(problem.graph, tensor_role=role))
    section = easing(without, shares(without, ((0,), (8,), ())), update="host")
    graph = expand(without, section).problem.graph
    assert not np.isin(graph.op_stream, (Stream.COPY_OUT, Stream.COPY_IN)).any()


def test_a_plan_file_keeps_what_is_recomputed(problem):
    section = easing(problem, shares(problem, ((0,), (8,), ())), recomputed=blocks_of(problem)[:1],
                     update="host")  # fmt: skip
    assert Parallel.from_data(section.to_data(), problem) == section


@pytest.mark.parametrize("blocks", [((5, 3),), ((0, 4), (2, 6)), ((0, 10**6),)])
def test_recomputed_blocks_that_make_no_sense_are_refused(problem, blocks):
    wrong = easing(problem, shares(problem, ((0,), (8,), ())), recomputed=blocks)
    assert list(wrong.verify(problem, plan_of(problem, wrong)))
