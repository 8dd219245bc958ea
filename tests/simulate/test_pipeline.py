from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.pipelines import CASES, even_costs, schedules, stage_costs, twin, with_row

from hocket.base.errors import CheckError, UsageError
from hocket.planners.parallel.schedules import make_schedule
from hocket.simulate.pipeline import after_s, simulate_pipeline


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_any_order_equals_plain_twin_and_deadlocks_with_it(data):
    schedule = data.draw(schedules(max_devices=3, max_microbatches=4))
    swaps = data.draw(st.integers(0, 3))
    work, stage, microbatch = (
        array.copy() for array in (schedule.work, schedule.stage, schedule.microbatch)
    )
    for _ in range(swaps):
        device = data.draw(st.integers(0, schedule.num_devices - 1))
        row = st.integers(int(schedule.start[device]), int(schedule.start[device + 1]) - 1)
        a, b = data.draw(row), data.draw(row)
        for array in (work, stage, microbatch):
            array[[a, b]] = array[[b, a]]
    changed = with_row(schedule, work=work, stage=stage, microbatch=microbatch)
    chunks = schedule.num_stages // schedule.num_devices
    costs = data.draw(stage_costs(schedule.num_devices, chunks))
    expected = twin(changed, costs)
    if expected is None:
        with pytest.raises(CheckError, match="can never start"):
            simulate_pipeline(changed, costs)
        return
    timeline = simulate_pipeline(changed, costs)
    np.testing.assert_allclose(timeline.op_end_s[: len(work)], expected[0], rtol=1e-12)
    assert timeline.peak_bytes.tolist() == expected[1]


@pytest.mark.parametrize(("name", "chunks"), CASES, ids=[f"{n}-{c}" for n, c in CASES])
def test_busy_time_and_bubble_add_up(name, chunks):
    schedule = make_schedule(name, 4, 8, chunks)
    timeline = simulate_pipeline(schedule, even_costs(4, chunks, (1.0, 1.5, 0.5)))
    np.testing.assert_allclose(timeline.busy_s, 24.0)
    assert timeline.idle_share == pytest.approx(1 - 24 / timeline.makespan_s)


def test_what_follows_the_last_action_counts_on_its_own_device():
    schedule = make_schedule("1f1b", 2, 2)
    costs = even_costs(2)
    plain = simulate_pipeline(schedule, costs)
    late = replace(costs, after_s=(0.0, 5.0))
    last_device_end_s = plain.op_end_s[-1]
    delayed = simulate_pipeline(schedule, late)
    assert delayed.makespan_s == last_device_end_s + 5.0
    assert after_s(delayed).tolist() == [0.0, 5.0]


def test_costs_of_other_stages_are_refused():
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(UsageError, match="2 stages"):
        simulate_pipeline(schedule, even_costs(3))
    with pytest.raises(UsageError, match="2 devices"):
        simulate_pipeline(schedule, replace(even_costs(2), after_s=(0.0,)))
