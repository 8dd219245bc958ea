import graphlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.pipelines import CASES, even_costs, needs_of, schedules, stage_costs, with_row

from hocket.base.errors import CheckError, UsageError
from hocket.plan.sections.schedule import StageWork
from hocket.planners.parallel.schedules import make_schedule
from hocket.planners.parallel.schedules.make import microbatch_groups
from hocket.simulate.pipeline import simulate_pipeline, verify_schedule
from hocket.transformer import SCHEDULES

IDS = [f"{name}-{chunks}" for name, chunks in CASES]

# Bubble over work and held microbatches for p=4, m=8 and for p=8, m=64 with equal F, I and W, as
# found by simulating the schedules that torch 2.13 makes.
PUBLISHED = {
    ("gpipe", 1): ((0.375, 8), (0.109375, 64)),
    ("1f1b", 1): ((0.375, 4), (0.109375, 8)),
    ("looped-bfs", 2): ((0.1875, 8), (0.0546875, 64)),
    ("interleaved", 2): ((0.1875, 5.5), (0.0546875, 11.5)),
    ("interleaved", 4): ((0.09375, 4.75), (0.02734375, 9.75)),
    ("zb-h1", 2): ((0.0625, 4), (0.0182291667, 8)),
    ("zb-v", 2): ((0.0625, 4), (0.0182291667, 8)),
    ("dualpipe-v", 2): ((0.0625, 4.5), (0.0182291667, 8.5)),
}


def bubble(timeline):
    """Idle time of the busiest device over its work, as papers state it."""
    work_s = timeline.busy_s.max()
    return (timeline.makespan_s - work_s) / work_s


@pytest.mark.parametrize("case", PUBLISHED, ids=[f"{n}-{c}" for n, c in PUBLISHED])
def test_bubble_and_held_microbatches_are_as_published(case):
    name, chunks = case
    for (num_devices, num_microbatches), expected in zip(
        [(4, 8), (8, 64)], PUBLISHED[case], strict=True
    ):
        schedule = make_schedule(name, num_devices, num_microbatches, chunks)
        timeline = simulate_pipeline(schedule, even_costs(num_devices, chunks))
        assert bubble(timeline) == pytest.approx(expected[0])
        assert timeline.peak_bytes.max() / chunks == expected[1]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 4),
    st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0])] * 3),
)  # fmt: skip
def test_closed_forms_of_the_bubble(num_devices, rounds, chunks, times):
    num_microbatches = num_devices * rounds
    all_s, behind = sum(times), num_devices - 1
    forms = [("gpipe", 1, all_s), ("1f1b", 1, all_s)]
    forms += [("interleaved", chunks, all_s / chunks), ("looped-bfs", chunks, all_s / chunks)]
    for name, own_chunks, bubble_s in forms:
        schedule = make_schedule(name, num_devices, num_microbatches, own_chunks)
        timeline = simulate_pipeline(schedule, even_costs(num_devices, own_chunks, times))
        expected = num_microbatches * all_s + behind * bubble_s
        assert timeline.makespan_s == pytest.approx(expected), name


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 3.0, 1.0)])
def test_zero_bubble_h1_waits_as_its_formula_says(times):
    forward_s, input_s, weight_s = times
    for num_devices, num_microbatches in ((2, 4), (4, 16), (7, 14)):
        schedule = make_schedule("zb-h1", num_devices, num_microbatches)
        timeline = simulate_pipeline(schedule, even_costs(num_devices, 1, times))
        bubble_s = (num_devices - 1) * (forward_s + input_s - weight_s)
        assert timeline.makespan_s == pytest.approx(num_microbatches * sum(times) + bubble_s)


@pytest.mark.parametrize("num_devices", [2, 3, 4, 7, 8])
def test_zero_bubble_devices_do_not_wait_between_first_and_last_action(num_devices):
    num_microbatches = 3 * num_devices
    for name, chunks in (("zb-h2", 1), ("zb-v", 2)):
        schedule = make_schedule(name, num_devices, num_microbatches, chunks)
        timeline = simulate_pipeline(schedule, even_costs(num_devices, chunks))
        first, last = schedule.start[:-1], schedule.start[1:] - 1
        spans_s = timeline.op_end_s[last] - timeline.op_start_s[first]
        np.testing.assert_allclose(spans_s, 3 * num_microbatches)


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 8, 16])
def test_held_microbatches_follow_their_formulas(num_devices):
    num_microbatches = 4 * num_devices
    held = {
        "gpipe": num_microbatches,
        "1f1b": num_devices,
        "zb-h1": num_devices,
        "zb-h2": 2 * num_devices - 1,
        "zb-v": num_devices,
        "dualpipe-v": num_devices + 0.5,
        "interleaved": num_devices + (num_devices - 1) / 2,
    }
    for name, expected in held.items():
        schedule = make_schedule(name, num_devices, num_microbatches)
        chunks = schedule.num_stages // num_devices
        timeline = simulate_pipeline(schedule, even_costs(num_devices, chunks))
        assert timeline.peak_bytes.max() / chunks == expected, name


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_uneven_stages_of_1f1b_take_at_most_the_formula(data):
    num_devices, num_microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    costs = data.draw(stage_costs(num_devices, 1))
    ratio = data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
    # The formula speaks of one slowest stage: it is so forward and backward if these keep a ratio.
    costs = replace(
        costs,
        input_gradient_s=costs.forward_s,
        weight_gradient_s=tuple(ratio * time_s for time_s in costs.forward_s),
        send_s=(0.0,) * (num_devices - 1),
        after_s=(0.0,) * num_devices,
    )
    total_s = np.add(costs.forward_s, np.add(costs.input_gradient_s, costs.weight_gradient_s))
    formula_s = total_s.sum() + (num_microbatches - 1) * total_s.max()
    schedule = make_schedule("1f1b", num_devices, num_microbatches)
    makespan_s = simulate_pipeline(schedule, costs).makespan_s
    assert makespan_s <= formula_s + 1e-9
    # A slowest stage before the last one lets the others' work overlap with its own.
    if np.argmax(total_s) == num_devices - 1:
        assert makespan_s == pytest.approx(formula_s)


def test_every_named_schedule_is_made_and_others_are_refused():
    for name in SCHEDULES:
        verify_schedule(make_schedule(name, 3, 7))
    with pytest.raises(UsageError, match="unknown schedule 'zbv'") as failure:
        make_schedule("zbv", 3, 7)
    assert "zb-v" in failure.value.hint
    for name, chunks in (("1f1b", 2), ("zb-v", 1), ("zb-v", 3), ("interleaved", 0)):
        with pytest.raises(UsageError, match="chunk"):
            make_schedule(name, 3, 7, chunks)
    with pytest.raises(UsageError, match="devices and microbatches"):
        make_schedule("1f1b", 0, 7)


@pytest.mark.parametrize(("name", "chunks"), CASES, ids=IDS)
def test_schedules_of_all_sizes_are_legal(name, chunks):
    for num_devices in range(1, 8):
        for num_microbatches in range(1, 20):
            verify_schedule(make_schedule(name, num_devices, num_microbatches, chunks))


def _is_legal(schedule) -> bool:
    """The same question answered by counting in Python and by graphlib."""
    cells = list(
        zip(
            schedule.work.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist(),
            strict=True,
        )
    )  # fmt: skip
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            counts = [cells.count((work, stage, microbatch)) for work in range(4)]
            if counts not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                return False
    sorter = graphlib.TopologicalSorter(dict(enumerate(needs_of(schedule))))
    for device in range(schedule.num_devices):
        own = range(int(schedule.start[device]), int(schedule.start[device + 1]))
        for action in own:
            if schedule.device_of_stage[schedule.stage[action]] != device:
                return False
            if action != own[0]:
                sorter.add(action, action - 1)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return False
    return True


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_verify_agrees_with_graphlib_on_changed_schedules(data):
    schedule = data.draw(schedules(max_devices=3, max_microbatches=4))
    arrays = {field: getattr(schedule, field).copy() for field in ("work", "stage", "microbatch")}
    last = len(schedule.work) - 1
    kind = data.draw(st.sampled_from(["none", "swap", "swap", "swap near", "edit"]))
    if kind == "edit":
        field = data.draw(st.sampled_from(sorted(arrays)))
        stop = {"work": 4, "stage": schedule.num_stages}.get(field, schedule.num_microbatches)
        arrays[field][data.draw(st.integers(0, last))] = data.draw(st.integers(0, stop - 1))
    elif kind != "none":
        a = data.draw(st.integers(0, last))
        b = min(a + 1, last) if kind == "swap near" else data.draw(st.integers(0, last))
        for array in arrays.values():
            array[[a, b]] = array[[b, a]]
    changed = with_row(schedule, **arrays)
    if _is_legal(changed):
        verify_schedule(changed)
    else:
        with pytest.raises(CheckError):
            verify_schedule(changed)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_interleaved_groups_hold_a_microbatch_per_device_and_differ_by_one_at_most(num_devices):
    for num_microbatches in range(1, 14):
        groups = microbatch_groups(num_devices, num_microbatches)
        assert sum(groups) == num_microbatches
        assert len(groups) == max(1, num_microbatches // num_devices)
        assert groups == sorted(groups, reverse=True)
        assert groups[0] - groups[-1] <= 1
        # The first group goes through all chunks but one before the last device turns back.
        schedule = make_schedule("interleaved", num_devices, num_microbatches, 2)
        last = schedule.work[schedule.start[-2] :]
        first_backward = int(np.flatnonzero(last != StageWork.FORWARD)[0])
        assert first_backward == min(groups[0] + 1, 2 * num_microbatches)


def test_verify_says_what_is_wrong():
    schedule = make_schedule("zb-h1", 2, 2)
    work = schedule.work.copy()
    work[np.flatnonzero(work == StageWork.WEIGHT_GRADIENT)[0]] = StageWork.INPUT_GRADIENT
    with pytest.raises(CheckError, match=r"stage 0 has the backward of microbatch 0 2 times"):
        verify_schedule(with_row(schedule, work=work))
    with pytest.raises(CheckError, match=r"microbatch 1 does not exist, there are 1"):
        verify_schedule(with_row(schedule, num_microbatches=1))
    with pytest.raises(CheckError, match=r"an action of stage 0 is on device 0, not on 1"):
        verify_schedule(with_row(schedule, device_of_stage=schedule.device_of_stage[::-1]))
    with pytest.raises(CheckError, match="12 actions are too few for 2 stages and 10000000"):
        verify_schedule(with_row(schedule, num_microbatches=10**12))
    reverse = with_row(
        schedule, work=schedule.work[::-1], stage=schedule.stage[::-1],
        microbatch=schedule.microbatch[::-1], device_of_stage=schedule.device_of_stage[::-1],
    )  # fmt: skip
    with pytest.raises(CheckError, match="can never start"):
        verify_schedule(reverse)


def test_schedules_are_shared_and_cannot_be_changed():
    schedule = make_schedule("1f1b", 2, 2)
    assert make_schedule("interleaved", 2, 2, 1) is schedule
    with pytest.raises(ValueError, match="read-only"):
        schedule.work[0] = 1
