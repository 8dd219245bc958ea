"""Two streams on one device: how fast ops run beside each other, and what both hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulate.problems import device, device_kind
from torch import nn

from hocket.base.errors import CheckError
from hocket.capture.sizes import capture_sizes
from hocket.cost.costs import Costs, device_rows
from hocket.cost.demand import FILL, ON_DEVICE, ON_HOST, TIMES_BESIDE, demand_of
from hocket.cost.roofline import estimate_costs
from hocket.graph import GraphBuilder, Stream
from hocket.graph.verify import verify_graph
from hocket.hardware import Cluster
from hocket.plan.files import plan_from_data, plan_to_data
from hocket.plan.make import make_problem
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica, Waves
from hocket.planners.candidates import empty_plan
from hocket.simulate import simulate
from hocket.simulate.engine import simulate_parallel, simulate_placement
from hocket.simulate.parallel import expand
from hocket.simulate.parallel.wave_streams import pass_order
from hocket.simulate.verify import violations

# ── two rows of ops, against a walk from op to op ────────────────────────────────────────────────

OPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([0.25, 0.5, 0.75, 1.0]),
        st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    ),
    min_size=1, max_size=5,
)  # fmt: skip


def two_rows(rows, beside=TIMES_BESIDE):
    """Two rows of ops, a row per stream: (seconds, device share, host share, fill)."""
    builder = GraphBuilder("rows")
    for at_row, row in enumerate(rows):
        for index, _ in enumerate(row):
            stream = (Stream.COMPUTE, Stream.SECOND)[at_row]
            op = builder.op(f"{at_row}.{index}", "work", stream=stream)
            builder.tensor(f"t{at_row}.{index}", 1, producer=op)
    graph = builder.build()
    kind = device_kind("x")
    cluster = Cluster(name="one", devices=(device("d", kind, host="h"),), hosts=("h",))
    flat = np.array([(*op, beside) for row in rows for op in row])
    costs = Costs(
        kind_names=("x",), op_s=flat[None, :, 0], op_source=np.zeros((1, len(flat)), np.uint8),
        device_row=device_rows(cluster), routes=cluster.routes, tensor_bytes=graph.tensor_bytes,
        reserved_bytes=np.zeros(1, np.int64), settings={}, demand=flat.T[1:, None, :].copy(),
    )  # fmt: skip
    return Problem(work=graph, cluster=cluster, op_costs=costs)


def walked(rows):
    """When each row ends: op by op in the order in which they begin, with one host and one device.

    Of two that begin at once the first stream's is first, and what takes no time takes a round.
    """
    ends, at, rounds, host, beside = [0.0, 0.0], [0, 0], [0, 0], [0.0, 0.0], [(0.0, 0.0)] * 2
    while left := [at_row for at_row in (0, 1) if at[at_row] < len(rows[at_row])]:
        at_row = min(left, key=lambda at_row: (ends[at_row], rounds[at_row]))
        now, (takes, on_device, on_host, fill) = (
            ends[at_row],
            rows[at_row][at[at_row]],
        )
        begin = max(now, host[1 - at_row]) if on_host * takes else now
        end = begin + takes
        if on_host * takes:
            host[at_row] = begin + on_host * takes
        filled, kernel = beside[1 - at_row]
        starts = ends[1 - at_row] - kernel
        if takes and ends[1 - at_row] > now and filled + fill > 1:
            if end - on_device * takes >= starts:
                end = max(end, ends[1 - at_row] + on_device * takes)
            elif end > starts:
                ends[1 - at_row] = end + kernel
        elif takes and ends[1 - at_row] > now and not on_host:
            lost = (TIMES_BESIDE - 1) * (min(end, ends[1 - at_row]) - now)
            end, ends[1 - at_row] = end + lost, ends[1 - at_row] + lost
        rounds[at_row] = rounds[at_row] + 1 if end == now else 0
        ends[at_row], beside[at_row], at[at_row] = (
            end,
            (fill, on_device * takes),
            at[at_row] + 1,
        )
    return ends


@given(st.tuples(OPS, OPS))
def test_rows_end_when_a_walk_from_op_to_op_says(rows):
    problem = two_rows(rows)
    _, timeline = simulate_placement(problem, np.zeros(problem.graph.num_ops, np.int32))
    first = len(rows[0])
    found = timeline.op_end_s[first - 1], timeline.op_end_s[-1]
    assert found == pytest.approx(walked(rows), abs=1e-9)


@given(OPS)
def test_one_stream_is_what_it_was_to_the_bit(row):
    problem = two_rows([row, []])
    alone = replace(problem, op_costs=replace(problem.op_costs, demand=None))
    everywhere = np.zeros(problem.graph.num_ops, np.int32)
    ends = [simulate_placement(each, everywhere)[1].op_end_s for each in (problem, alone)]
    assert ends[0].tolist() == ends[1].tolist() == np.cumsum([op[0] for op in row]).tolist()


def test_a_device_is_busy_once_where_both_streams_work():
    problem = two_rows([[(2.0, 0.5, 0.0, 0.5)], [(3.0, 0.5, 0.0, 0.5)]])
    _, timeline = simulate_placement(problem, np.zeros(2, np.int32))
    # Beside each other until the shorter ends, then alone.
    assert timeline.busy_s.tolist() == pytest.approx([TIMES_BESIDE * 2.0 + 1.0])
    assert timeline.op_end_s.tolist() == pytest.approx(
        [TIMES_BESIDE * 2.0, TIMES_BESIDE * 2.0 + 1.0]
    )


@given(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=8), st.integers(1, 8))
def test_ops_that_fit_run_at_one_pace_however_they_are_cut(lengths, cuts):
    """A row beside a long op takes as long as one op of the same work."""
    row = [(length / cuts, 1.0, 0.0, 0.5) for length in lengths for _ in range(cuts)]
    problem = two_rows([[(100.0, 1.0, 0.0, 0.5)], row])
    _, timeline = simulate_placement(problem, np.zeros(problem.graph.num_ops, np.int32))
    assert timeline.op_end_s[-1] == pytest.approx(TIMES_BESIDE * sum(lengths))
    assert timeline.op_end_s[0] == pytest.approx(100.0 + (TIMES_BESIDE - 1) * sum(lengths))


@given(OPS, st.sampled_from([1.0, 1.3, 1.9, 2.2]))
def test_rows_of_one_step_take_together_what_was_measured_of_them(row, beside):
    """What was measured of two rows of the same ops comes out again."""
    row = [(takes, on_device, 0.0, 0.0) for takes, on_device, *_ in row]
    problem = two_rows([row, row], beside)
    _, timeline = simulate_placement(problem, np.zeros(problem.graph.num_ops, np.int32))
    assert timeline.makespan_s == pytest.approx(beside * sum(takes for takes, *_ in row))


# ── waves of a model ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def problem():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)]
    graph = capture_sizes(nn.Sequential(*layers), torch.zeros(64, 64))
    return replayed(make_problem(graph, "1xv100-16g"))


def replayed(problem):
    """No host in the way: launches follow each other on the device."""
    costs = estimate_costs(problem.graph, problem.cluster, launches="replayed")
    return replace(problem, op_costs=costs)


def waves(problem, lead, sizes=(32, 32), **options):
    replica = Replica(devices=(problem.cluster.device_names[0],), microbatches=sizes)
    section = Waves(lead=lead, **options)
    return empty_plan(problem, "test").having(Parallel(replicas=(replica,)), section)


def test_waves_one_after_the_other_are_accumulation(problem):
    order = pass_order(problem.graph)
    plan = waves(problem, len(order))
    verify_graph(expand(problem, plan[Parallel], None, plan[Waves]).problem.graph)
    late, plain = simulate(problem, plan), simulate(problem, plan.without(Waves))
    # Updates run in the first stream, beside the last sums of the second.
    assert 0.95 * plain.makespan_s < late.makespan_s <= plain.makespan_s * (1 + 1e-9)
    assert late.peak_bytes.tolist() == plain.peak_bytes.tolist()


def test_small_kernels_overlap_and_large_ones_do_not(problem):
    plain = simulate(problem, waves(problem, 0).without(Waves)).makespan_s
    together = simulate(problem, waves(problem, 0)).makespan_s
    assert together < 0.75 * plain
    full = in_full(problem)
    assert simulate(full, waves(full, 0)).makespan_s == pytest.approx(plain, rel=1e-6)


def in_full(problem):
    """The same times, of kernels that fill the device."""
    demand = demand_of(problem.graph, problem.cluster, problem.costs)
    demand[ON_DEVICE], demand[ON_HOST], demand[FILL] = 1.0, 0.0, 1.0
    return replace(problem, op_costs=replace(problem.op_costs, demand=demand))


def test_the_second_stream_waits_for_the_lead(problem):
    order, lead = pass_order(problem.graph), 10
    plan = waves(problem, lead)
    assert not violations(plan, problem)
    found, timeline = simulate_parallel(problem, plan[Parallel], None, plan[Waves])
    tick, tock = found.passes[0]
    assert timeline.op_start_s[tock[order[0]]] >= timeline.op_end_s[tick[order[lead - 1]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lead": 10**6}, "begins after 1000000 ops"),
        ({"lead": 1, "sizes": (64,)}, "two microbatches or more"),
    ],
)
def test_waves_that_cannot_run_are_refused(problem, options, message):
    plan = waves(problem, **options)
    assert any(message in violation.message for violation in violations(plan, problem))
    with pytest.raises(CheckError, match=message):
        simulate(problem, plan)


def test_plans_with_waves_are_read_as_they_were_written(problem):
    plan = waves(problem, 7, separate_bytes=512)
    read = plan_from_data(plan_to_data(problem, plan), "plan.json")
    assert read.plan[Waves] == plan[Waves]
