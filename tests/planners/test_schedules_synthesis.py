from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.pipelines import even_costs, stage_costs

from hocket.base.errors import CheckError, NoFeasiblePlanError, UsageError
from hocket.plan.sections.schedule import Schedule, StageWork
from hocket.planners.parallel.schedules import (
    known_schedules,
    make_schedule,
    synthesise,
    verify_schedule,
)
from hocket.planners.parallel.schedules.greedy_tables import pipeline_table
from hocket.planners.parallel.schedules.rows import folded, looped
from hocket.planners.parallel.schedules.synthesis import joined, lower_bound_s
from hocket.simulate.pipeline import simulate_pipeline

LONG = st.sampled_from([0.5, 1.0, 1.1, 1.5, 2.0])


def _least(costs, chunks_of) -> np.ndarray:
    """What each device needs for its state and one microbatch."""
    need = np.array(costs.state_bytes, dtype=np.int64)
    np.add.at(need, chunks_of, np.array(costs.activation_bytes))
    return need


@st.composite
def tasks(draw, max_devices=4, max_microbatches=8):
    num_devices = draw(st.integers(1, max_devices))
    is_folded = draw(st.booleans())
    chunks = 2 if is_folded else draw(st.sampled_from([1, 1, 2, 3]))
    costs = draw(stage_costs(num_devices, chunks, draw(st.sampled_from([LONG, st.just(1.0)]))))
    layout = folded(num_devices) if is_folded else looped(num_devices, chunks)
    least = _least(costs, layout)
    spare = draw(st.sampled_from([0, 5, 40, 150, 2000]))
    count = draw(st.integers(1, max_microbatches))
    return costs, count, (least + spare).tolist(), is_folded, chunks


@settings(derandomize=True, deadline=None, max_examples=100)
@given(tasks(), st.booleans())
def test_synthesised_schedules_are_legal_fit_and_are_never_longer_than_known_ones(task, splits):
    costs, count, memory_bytes, is_folded, chunks = task
    schedule = synthesise(costs, count, memory_bytes, is_folded=is_folded, split_backward=splits)
    verify_schedule(schedule)
    assert splits or not schedule.splits_backward
    timeline = simulate_pipeline(schedule, costs)
    assert np.all(timeline.peak_bytes <= memory_bytes)
    pipeline = pipeline_table(costs, count, memory_bytes, schedule.device_of_stage)
    bound_s = lower_bound_s(pipeline, split_backward=schedule.splits_backward)
    assert timeline.makespan_s >= bound_s * (1 - 1e-9)
    for known in known_schedules(len(memory_bytes), count, chunks, is_folded=is_folded):
        if known.splits_backward and not splits:
            continue
        other = simulate_pipeline(known, costs)
        if np.all(other.peak_bytes <= memory_bytes):
            assert timeline.makespan_s <= other.makespan_s * (1 + 1e-9), known.name


@settings(derandomize=True, deadline=None, max_examples=100)
@given(tasks())
def test_no_schedule_that_fits_is_shorter_than_the_lower_bound(task):
    costs, count, memory_bytes, is_folded, chunks = task
    num_devices = len(memory_bytes)
    layout = folded(num_devices) if is_folded else looped(num_devices, chunks)
    pipeline = pipeline_table(costs, count, memory_bytes, layout)
    for known in known_schedules(num_devices, count, chunks, is_folded=is_folded):
        timeline = simulate_pipeline(known, costs)
        if np.all(timeline.peak_bytes <= memory_bytes):
            bound_s = lower_bound_s(pipeline, split_backward=known.splits_backward)
            assert bound_s <= timeline.makespan_s * (1 + 1e-9), known.name


def _orders(count: int) -> list[list[tuple[int, int]]]:
    """All orders of (work, microbatch) of one stage that keep F, I, W of a microbatch in turn."""
    sequence = sorted(set(permutations(sorted(list(range(count)) * 3))))
    works = (StageWork.FORWARD, StageWork.INPUT_GRADIENT, StageWork.WEIGHT_GRADIENT)
    return [
        [(works[order[:at].count(microbatch)], microbatch) for at, microbatch in enumerate(order)]
        for order in sequence
    ]


def _shortest_s(costs, count: int, memory_bytes) -> float:
    """The makespan of the best of all schedules of one stage per device."""
    num_devices = len(costs.state_bytes)
    best_s = np.inf
    for rows in product(_orders(count), repeat=num_devices):
        flat = np.array([action for row in rows for action in row], dtype=np.int32)
        schedule = Schedule(
            name="any",
            num_microbatches=count,
            device_of_stage=looped(num_devices, 1),
            start=(np.arange(num_devices + 1) * 3 * count).astype(np.int32),
            work=flat[:, 0].copy(),
            stage=np.repeat(np.arange(num_devices, dtype=np.int32), 3 * count),
            microbatch=flat[:, 1].copy(),
        )
        try:
            timeline = simulate_pipeline(schedule, costs)
        except CheckError:
            continue
        if np.all(timeline.peak_bytes <= memory_bytes):
            best_s = min(best_s, timeline.makespan_s)
    return best_s


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.data())
def test_synthesised_schedules_of_two_by_two_are_as_short_as_any(data):
    costs = data.draw(stage_costs(2, 1, LONG))
    memory_bytes = (_least(costs, [0, 1]) + data.draw(st.sampled_from([0, 10, 100]))).tolist()
    found = simulate_pipeline(synthesise(costs, 2, memory_bytes), costs)
    assert found.makespan_s == pytest.approx(_shortest_s(costs, 2, memory_bytes))


def test_even_stages_get_a_known_schedule_where_nothing_is_shorter():
    assert synthesise(even_costs(4), 8, [4] * 4).name == "zb-h1"
    assert synthesise(even_costs(4, 2), 8, [8] * 4, is_folded=True).name == "zb-v"
    assert synthesise(even_costs(4), 8, [4] * 4, split_backward=False).name == "1f1b"


def test_less_memory_than_any_known_schedule_needs_still_gives_one():
    schedule = synthesise(even_costs(4), 8, [2] * 4)
    assert schedule.name == "synthesised"
    timeline = simulate_pipeline(schedule, even_costs(4))
    assert timeline.peak_bytes.max() == 2
    assert (
        timeline.makespan_s
        < simulate_pipeline(synthesise(even_costs(4), 8, [1] * 4), even_costs(4)).makespan_s
    )


def test_same_input_gives_the_same_schedule():
    costs = replace(even_costs(3, 2), forward_s=(1.0, 1.3, 0.7, 1.1, 1.0, 2.0))
    first, second = (synthesise(costs, 9, [9] * 3) for _ in range(2))
    for field in ("start", "work", "stage", "microbatch"):
        assert getattr(first, field).tolist() == getattr(second, field).tolist()


def test_error_names_the_device_and_what_it_lacks():
    costs = replace(even_costs(3), activation_bytes=(1, 2048, 1), state_bytes=(0, 1024, 0))
    with pytest.raises(NoFeasiblePlanError, match=r"device 1 of the pipeline lacks 1.0 KiB"):
        synthesise(costs, 4, [2048] * 3)


@pytest.mark.parametrize(
    ("chunks", "is_folded", "limits", "message"),
    [(1, True, 3, "a V of two"), (1, False, 2, "2 memory limits")],
)
def test_wrong_shapes_are_refused(chunks, is_folded, limits, message):
    with pytest.raises(UsageError, match=message):
        synthesise(even_costs(3, chunks), 4, [100] * limits, is_folded=is_folded)


def test_halves_that_follow_each_other_are_joined_where_that_costs_nothing():
    schedule = make_schedule("zb-v", 4, 8)
    costs = even_costs(4, 2)
    whole = joined(schedule, costs)
    verify_schedule(whole)
    assert len(whole.work) < len(schedule.work)
    before, after = simulate_pipeline(schedule, costs), simulate_pipeline(whole, costs)
    assert after.makespan_s == pytest.approx(before.makespan_s)
    assert after.peak_bytes.tolist() == before.peak_bytes.tolist()
