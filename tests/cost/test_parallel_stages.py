"""Costs of single stages, against the closed form and the event simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost.parallel_samples import cluster_of, gpt, mixture
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.cost.parallel.costs import StageCosts
from hocket.cost.parallel.costs import StageCosts as PlannedCosts
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.stages import stage_costs
from hocket.cost.parallel.step import predict
from hocket.planners.parallel.schedules import make_schedule
from hocket.simulate.pipeline import simulate_pipeline
from hocket.transformer import ParallelConfig, ParallelConfigs

MODEL = gpt(12288, 96, 96)
ON = "16xdgx-a100-80g"


def flush_s(costs: StageCosts, num_microbatches: int) -> float:
    """One-forward-one-backward in closed form: one microbatch through all, then the slowest."""
    stages = [
        sum(times)
        for times in zip(
            costs.forward_s, costs.input_gradient_s, costs.weight_gradient_s, strict=True
        )
    ]
    send_s = max(costs.send_s, default=0.0)
    pace_s = max(stages) + 2 * send_s * (len(stages) - 1) / len(stages)
    passing_s = sum(stages) - max(stages) + 2 * sum(costs.send_s)
    return num_microbatches * pace_s + passing_s + max(costs.after_s)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2]),
    microbatch=st.sampled_from([1, 2, 4]),
    count=st.integers(1, 64),
    recompute=st.sampled_from(["none", "selective", "full"]),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    software=st.sampled_from(["megatron-2021", "megatron-core", "torch"]),
    is_mixture=st.booleans(),
)
def test_closed_form_of_stage_costs_equals_the_prediction(
    count: int, software: str, is_mixture: bool, microbatch: int, data: int, **degrees: object
) -> None:
    model = mixture() if is_mixture else MODEL
    config = ParallelConfig(
        microbatch=microbatch, data=data, global_batch=count * microbatch * data, **degrees
    )
    program, cluster = find_software(software), cluster_of(ON)
    predicted_s = predict(model, ParallelConfigs.of([config]), cluster, program).step_s[0]
    costs = stage_costs(model, config, cluster, program)
    assert flush_s(costs, count) == pytest.approx(predicted_s, rel=0.02)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "chunks", "tolerance"),
    [
        ("gpipe", 1, 0.02), ("1f1b", 1, 0.02), ("interleaved", 2, 0.02), ("interleaved", 4, 0.04),
        ("looped-bfs", 2, 0.02), ("zb-h1", 1, 0.02), ("zb-h2", 1, 0.02), ("zb-v", 2, 0.05),
        ("dualpipe-v", 2, 0.05),
    ],
)  # fmt: skip
def test_prediction_of_every_schedule_is_near_its_simulation(
    schedule: str, chunks: int, tolerance: float, recompute: str
) -> None:
    config = ParallelConfig(
        tensor=8,
        pipeline=8,
        microbatch=1,
        global_batch=32,
        chunks=chunks,
        schedule=schedule,
        recompute=recompute,
    )
    program, cluster = find_software("megatron-core"), cluster_of(ON)
    predicted_s = predict(MODEL, ParallelConfigs.of([config]), cluster, program).step_s[0]
    costs = stage_costs(MODEL, config, cluster, program)
    timeline = simulate_pipeline(make_schedule(schedule, 8, 32, chunks), costs)
    assert predicted_s == pytest.approx(timeline.makespan_s, rel=tolerance)


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_few_microbatches_are_not_taken_for_many(schedule: str, chunks: int, count: int) -> None:
    config = ParallelConfig(
        tensor=8, pipeline=8, global_batch=count, chunks=chunks, schedule=schedule
    )
    program, cluster = find_software("megatron-core"), cluster_of(ON)
    predicted_s = predict(MODEL, ParallelConfigs.of([config]), cluster, program).step_s[0]
    costs = stage_costs(MODEL, config, cluster, program)
    timeline = simulate_pipeline(make_schedule(schedule, 8, count, chunks), costs)
    assert predicted_s == pytest.approx(timeline.makespan_s, rel=0.08)


def test_uneven_stages_cost_what_their_layers_do() -> None:
    even = ParallelConfig(tensor=8, pipeline=4, global_batch=32, recompute="full")
    uneven = replace(even, layers=(20, 26, 27, 23))
    program, cluster = find_software("megatron-2021"), cluster_of(ON)
    one = stage_costs(MODEL, even, cluster, program)
    other = stage_costs(MODEL, uneven, cluster, program)
    layer_s = one.forward_s[1] / 24
    assert other.forward_s[1] == pytest.approx(26 * layer_s)
    assert other.forward_s[2] - other.forward_s[1] == pytest.approx(layer_s)
    assert other.forward_s[0] < one.forward_s[0]
    assert sum(other.forward_s) == pytest.approx(sum(one.forward_s))
    # The last stage has the output layer besides its layers.
    assert one.forward_s[3] > one.forward_s[1]


def test_slower_kinds_have_slower_stages() -> None:
    cluster = cluster_of("2xdgx-h100+2xdgx-a100-80g")
    config = ParallelConfig(tensor=8, pipeline=4, global_batch=32)
    kinds = ("h100-80g", "h100-80g", "a100-80g", "a100-80g")
    costs = stage_costs(MODEL, config, cluster, find_software("torch"), kinds=kinds)
    assert costs.forward_s[2] > 2 * costs.forward_s[1]
    assert costs.after_s[2] > costs.after_s[1]


def test_transfers_are_quick_inside_a_host_and_nothing_on_one_device() -> None:
    config = ParallelConfig(tensor=2, pipeline=8, chunks=2, schedule="zb-v", global_batch=32)
    costs = stage_costs(MODEL, config, cluster_of(ON), find_software("torch"))
    assert len(costs.send_s) == 15
    # Ranks 0 to 3 share a host; the model turns around on the last rank.
    assert costs.send_s[0] < costs.send_s[3]
    assert costs.send_s[7] == 0
    assert costs.send_s[3] == costs.send_s[11]


def test_stage_costs_are_what_plans_hold() -> None:
    assert PlannedCosts is StageCosts
