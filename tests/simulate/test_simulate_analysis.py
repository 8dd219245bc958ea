"""Critical path, busy times and the sentence that says what limits the step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulate.problems import joined, plans, problem_of, problems
from simulate.test_simulate_closed_forms import bus, chain, fan_out

from hocket.graph import GraphBuilder
from hocket.graph.graph import Stream
from hocket.plan.plan import Plan
from hocket.plan.problem import TRANSFER_MODES
from hocket.simulate import (
    bottleneck,
    channel_busy_s,
    critical_path,
    path_seconds,
    simulate,
)
from hocket.simulate.analysis import price_per_hour

GENERATED = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@GENERATED
@given(st.data())
def test_critical_path_explains_the_step_without_a_gap(data):
    problem = data.draw(problems(has_streams=True))
    timeline = simulate(problem, data.draw(plans(problem)))
    path = critical_path(timeline, problem)
    assert path[0].start_s == 0
    assert path[0].reason == "start"
    assert path[-1].end_s == timeline.makespan_s
    for before, step in itertools.pairwise(path):
        assert before.end_s == step.start_s
        assert step.reason != "start"
        assert step.wait_s >= 0
    assert len({(step.kind, step.index) for step in path}) == len(path)


@GENERATED
@given(st.data())
def test_critical_path_reasons_are_true(data):
    """Each step follows what its reason says: its data, its device, or a transfer ahead."""
    problem = data.draw(problems(has_streams=True))
    timeline, graph = simulate(problem, data.draw(plans(problem))), problem.graph
    path = critical_path(timeline, problem)
    for before, step in itertools.pairwise(path):
        if step.reason == "device":
            assert (before.kind, step.kind) == ("op", "op")
            assert timeline.op_device[before.index] == timeline.op_device[step.index]
        elif step.reason == "link":
            assert (before.kind, step.kind) == ("transfer", "transfer")
            assert step.wait_s == step.start_s - timeline.transfer_ready_s[step.index] > 0
        elif step.kind == "transfer":
            tensor = timeline.transfer_tensor[step.index]
            assert before.kind == "op"
            assert graph.tensor_producer[tensor] == before.index
        elif before.kind == "transfer":
            assert timeline.transfer_tensor[before.index] in graph.reads_of(step.index)
            assert timeline.transfer_dst[before.index] == timeline.op_device[step.index]
        else:
            made = set(graph.made_by(before.index))
            assert made & set(graph.reads_of(step.index).tolist())


@pytest.mark.parametrize("mode", TRANSFER_MODES)
def test_kinds_of_spans_on_the_path_add_up_to_the_step(mode):
    problem = problem_of(chain(4), joined(2, 4.0, 0.5), [1.0] * 4, mode)
    timeline = simulate(problem, Plan().placing(np.array([0, 1, 0, 1])))
    path = critical_path(timeline, problem)
    seconds = path_seconds(timeline, path)
    assert seconds["compute"] == 4
    assert seconds["transfers"] == 3 * 2.5
    assert sum(seconds.values()) == timeline.makespan_s
    # gpu1 idles 3.5 s before its first op, then each device for two transfers and an op.
    assert sum(step.wait_s for step in path if step.reason == "data") == 3.5 + 6.0 + 6.0


def test_queued_transfer_waits_for_the_link():
    builder = GraphBuilder("queue")
    op = builder.op("make")
    tensors = [builder.tensor(name, 8, producer=op) for name in "ab"]
    builder.op("read", reads=tensors)
    problem = problem_of(builder.build(), joined(2, 8.0), [1.0, 1.0], "queued")
    timeline = simulate(problem, Plan().placing(np.array([0, 1])))
    steps = [(step.kind, step.reason, step.wait_s) for step in critical_path(timeline, problem)]
    assert steps == [
        ("op", "start", 0.0),
        ("transfer", "data", 0.0),
        ("transfer", "link", 1.0),
        ("op", "data", 3.0),
    ]


def union_s(spans):
    times = sorted({moment for span in spans for moment in span})
    return sum(
        stop - begin
        for begin, stop in itertools.pairwise(times)
        if any(s <= begin and stop <= e for s, e in spans)
    )


@GENERATED
@given(st.data())
def test_busy_times_equal_the_union_of_spans(data):
    problem = data.draw(problems(has_streams=True))
    timeline = simulate(problem, data.draw(plans(problem)))
    in_lanes = np.isin(problem.graph.op_stream, (Stream.COMPUTE, Stream.SECOND))
    for device in range(timeline.num_devices):
        here = in_lanes & (timeline.op_device == device)
        spans = list(zip(timeline.op_start_s[here], timeline.op_end_s[here], strict=True))
        assert timeline.busy_s[device] == pytest.approx(union_s(spans), rel=1e-9, abs=1e-12)
    assert np.all(timeline.busy_s <= timeline.makespan_s * (1 + 1e-12))
    busy_s = channel_busy_s(timeline, problem)
    for channel in range(len(busy_s)):
        spans = [
            (timeline.transfer_start_s[k], timeline.transfer_end_s[k])
            for k in range(len(timeline.transfer_tensor))
            if channel
            in problem.costs.routes.path(
                int(timeline.transfer_src[k]), int(timeline.transfer_dst[k])
            )
        ]
        assert busy_s[channel] == pytest.approx(union_s(spans), rel=1e-9, abs=1e-12)


def test_bottleneck_names_the_busy_device():
    problem = problem_of(fan_out(9), joined(2, 1e9), [1.0] * 10)
    timeline = simulate(problem, Plan().placing(np.array([0] * 9 + [1])))
    assert bottleneck(timeline, problem) == "limited by compute on gpu0 (100 % busy)"


def test_bottleneck_names_the_busy_link():
    problem = problem_of(chain(2, 70), joined(3, 10.0), [1.0, 2.0])
    timeline = simulate(problem, Plan().placing(np.array([0, 2])))
    sentence = bottleneck(timeline, problem)
    assert sentence == "limited by the link gpu0–gpu2 gpu0→gpu2 (70 % busy)"


def test_bottleneck_names_the_bus():
    problem = problem_of(chain(2, 80), bus(3, 10.0), [1.0, 1.0])
    timeline = simulate(problem, Plan().placing(np.array([0, 2])))
    assert bottleneck(timeline, problem) == "limited by the link bus (80 % busy)"


def test_bottleneck_says_when_devices_take_turns():
    problem = problem_of(chain(4), joined(4, 1e12), [1.0] * 4)
    timeline = simulate(problem, Plan().placing(np.arange(4)))
    assert "wait for each other" in bottleneck(timeline, problem)
    assert "25 % busy" in bottleneck(timeline, problem)


def test_bottleneck_of_nothing_is_said():
    problem = problem_of(GraphBuilder("empty").build(), joined(1), [])
    timeline = simulate(problem, Plan().placing(np.empty(0, dtype=np.int32)))
    assert critical_path(timeline, problem) == ()
    assert "no time" in bottleneck(timeline, problem)


def test_a_step_is_priced_by_the_devices_that_compute_and_not_where_one_has_no_price():
    cluster = joined(2)

    def price(device_of, *prices):
        devices = tuple(
            replace(device, kind=replace(device.kind, name=f"kind{price}", price_per_hour=price))
            for device, price in zip(cluster.devices, prices, strict=True)
        )
        problem = problem_of(chain(2), replace(cluster, devices=devices), [1.0, 1.0])
        return price_per_hour(problem, simulate(problem, Plan().placing(np.array(device_of))))

    assert price([0, 1], 3.0, 0.5) == 3.5
    assert price([1, 1], 3.0, 0.5) == 0.5
    assert price([0, 1], 3.0, 0.0) is None
    assert price([0, 0], 3.0, 0.0) == 3.0
