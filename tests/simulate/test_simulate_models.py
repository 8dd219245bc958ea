"""Times against SimPy, and shared flows against the fluid equation that defines them."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate.problems import costs_of, joined, placements, plans, problems
from simulate.simpy_model import simpy_times

from hocket.graph import GraphBuilder, Role, Stream
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate import simulate

GENERATED = settings(
    derandomize=True,
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def random_problem(seed: int, mode: str, num_ops: int = 60, num_devices: int = 4) -> Problem:
    """Durations and sizes without ties, so that every correct simulator agrees."""
    rng = np.random.default_rng(seed)
    builder = GraphBuilder("random")
    tensors = [builder.tensor("weights", int(rng.integers(1, 10**6)), role=Role.PARAMETER)]
    for index in range(num_ops):
        reads = np.unique(rng.choice(tensors[-20:], size=3)).tolist()
        op = builder.op(f"op{index}", reads=reads)
        size = int(rng.integers(1, 10**6))
        tensors.append(builder.tensor(f"t{index}", size, producer=op))
    graph, cluster = builder.build(), joined(num_devices, 1e6, 1e-3)
    costs = costs_of(graph, cluster, rng.uniform(0.1, 1.0, num_ops))
    return Problem(work=graph, cluster=cluster, op_costs=costs, transfers=mode)


@pytest.mark.parametrize("mode", ["parallel", "queued"])
@pytest.mark.parametrize("seed", range(20))
def test_simulate_agrees_with_simpy(mode, seed):
    problem = random_problem(seed, mode)
    rng = np.random.default_rng(1000 + seed)
    plan = Plan().placing(
        rng.integers(0, 4, problem.graph.num_ops),
        priority=rng.uniform(size=problem.graph.num_ops) if seed % 2 else None,
    )
    timeline = simulate(problem, plan)
    op_end, transfer_end = simpy_times(problem, plan)
    np.testing.assert_allclose(timeline.op_end_s, op_end, rtol=1e-9)
    assert len(timeline.transfer_tensor) == len(transfer_end) > 20
    pairs = zip(timeline.transfer_tensor.tolist(), timeline.transfer_dst.tolist(), strict=True)
    np.testing.assert_allclose(
        timeline.transfer_end_s, [transfer_end[pair] for pair in pairs], rtol=1e-9
    )


def test_simulate_is_ten_times_as_fast_as_simpy():
    problem = random_problem(0, "queued", num_ops=3000)
    plan = Plan().placing(np.random.default_rng(0).integers(0, 4, 3000))
    simulate(problem, plan)

    def best_s(function) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time()
            function(problem, plan)
            times.append(time.process_time() - begin)
        return min(times)

    assert best_s(simpy_times) > 10 * best_s(simulate)


@GENERATED
@given(st.data())
def test_shared_transfers_get_exactly_their_work(data):
    """Integrate each transfer's rate over the finished timeline: it must add up to its work."""
    problem = data.draw(problems(mode="shared", has_streams=True))
    timeline = simulate(problem, data.draw(plans(problem)))
    costs, routes = problem.costs, problem.costs.routes
    src, dst = timeline.transfer_src, timeline.transfer_dst
    tensor = timeline.transfer_tensor
    work = costs.tensor_bytes[tensor].astype(np.float64)
    if costs.tensor_s is not None:
        work = costs.tensor_s[tensor] * routes.hops[src, dst]
    flow_s = timeline.transfer_start_s + routes.latency_s[src, dst]
    end_s = timeline.transfer_end_s
    flows = np.flatnonzero(work > 0)
    assert np.array_equal(end_s[work == 0], flow_s[work == 0])
    paths = {k: set(routes.path(int(src[k]), int(dst[k])).tolist()) for k in flows}
    capacity = costs.channel_capacity()
    times = np.unique(np.concatenate((flow_s[flows], end_s[flows])))
    done = dict.fromkeys(flows.tolist(), 0.0)
    for begin, stop in itertools.pairwise(times):
        active = [k for k in flows.tolist() if flow_s[k] <= begin and stop <= end_s[k]]
        for k in active:
            shares = [capacity[c] / sum(c in paths[o] for o in active) for c in paths[k]]
            done[k] += min(shares) * (stop - begin)
    np.testing.assert_allclose([done[k] for k in flows.tolist()], work[flows], rtol=1e-9)


@GENERATED
@given(st.data())
def test_timeline_keeps_the_rules(data):
    """One op at a time, nothing before its data, one transfer per tensor and destination."""
    problem = data.draw(problems(has_streams=True))
    plan = data.draw(plans(problem))
    timeline, graph = simulate(problem, plan), problem.graph
    row = problem.costs.device_row[plan.device_of]
    duration_s = problem.costs.op_s[row, np.arange(graph.num_ops)]
    np.testing.assert_array_equal(timeline.op_end_s, timeline.op_start_s + duration_s)
    for device in range(problem.cluster.num_devices):
        for stream in Stream:
            ops = np.flatnonzero((plan.device_of == device) & (graph.op_stream == stream))
            ops = ops[np.lexsort((timeline.op_end_s[ops], timeline.op_start_s[ops]))]
            assert np.all(timeline.op_end_s[ops][:-1] <= timeline.op_start_s[ops][1:])
        times, held = timeline.memory_curve(device)
        assert times[0] == 0
        assert np.all(np.diff(times) > 0)
        assert np.all(held >= 0)
        assert held.max() <= timeline.peak_bytes[device]
    arrival = {
        pair: end_s
        for *pair_list, end_s in zip(
            timeline.transfer_tensor.tolist(),
            timeline.transfer_dst.tolist(),
            timeline.transfer_end_s.tolist(),
            strict=True,
        )
        for pair in [tuple(pair_list)]
    }
    assert len(arrival) == len(timeline.transfer_tensor)
    for op in range(graph.num_ops):
        for tensor in graph.reads_of(op).tolist():
            producer = int(graph.tensor_producer[tensor])
            made_s = timeline.op_end_s[producer] if producer >= 0 else 0.0
            there_s = arrival.get((tensor, int(plan.device_of[op])), made_s)
            assert timeline.op_start_s[op] >= max(there_s, made_s)


@GENERATED
@given(st.data())
def test_memory_ends_with_what_is_held(data):
    """On one device, what is left at the end are the storages that the roles say stay."""
    problem = data.draw(problems(max_devices=1, has_streams=True))
    timeline = simulate(problem, Plan().placing(data.draw(placements(problem))))
    graph = problem.graph
    kept = set()
    for tensor in np.flatnonzero(graph.is_held).tolist():
        while graph.alias_of[tensor] >= 0:
            tensor = int(graph.alias_of[tensor])
        kept.add(tensor)
    assert timeline.memory_curve(0)[1][-1] == sum(int(graph.tensor_bytes[t]) for t in kept)
