"""Speeds on device types that a job was never on, where its file states none."""

from __future__ import annotations

import numpy as np
import pytest
from service.fake_executor import fleet_devices

from hocket.service.executors.executor import AttemptName

FIRST = AttemptName(1, 1)
FAST, SLOW = 0, 1


@pytest.fixture
def engine(engine):
    """One device of each device type, so that the job has a choice."""
    engine.devices = fleet_devices(v100=1, k80=1)
    return engine


def believed(rig) -> np.ndarray:
    return rig.service_state.state.jobs.steps_per_s[0].copy()


def measured_for(rig, seconds: float, steps_per_s: float, done: float) -> float:
    rig.time.now_s += seconds
    done += seconds * steps_per_s
    rig.report(FIRST, done)
    return done


def test_a_type_that_was_not_tried_is_as_fast_as_the_one_that_was(rig):
    rig.submit(total_steps=1e9)
    rig.look(2)
    held = int(rig.service_state.state.jobs.rows["device_type"][0])
    done = 0.0
    for _ in range(12):
        done = measured_for(rig, 5.0, 8.0, done)
        assert believed(rig)[1 - held] == believed(rig)[held]
    assert believed(rig) == pytest.approx([8.0, 8.0], rel=1e-2)


def test_only_the_first_measurement_replaces_the_guess(rig):
    rig.submit(total_steps=1e9)
    rig.look(2)
    held = int(rig.service_state.state.jobs.rows["device_type"][0])
    # A lease reports once before its first step, which measures nothing.
    done = measured_for(rig, 5.0, 0.0, 0.0)
    done = measured_for(rig, 5.0, 8.0, done)
    assert believed(rig)[held] == 8.0
    measured_for(rig, 5.0, 4.0, done)
    assert believed(rig)[held] == 6.0


def test_a_type_that_was_tried_keeps_what_was_measured(rig):
    rig.submit(total_steps=1e9)
    rig.look(2)
    state = rig.service_state.state
    held = int(state.jobs.rows["device_type"][0])
    # Long ago it did three steps per second on the other device type.
    state.jobs.received_s[0, 1 - held] = 600.0
    state.jobs.steps_per_s[0, 1 - held] = 3.0
    measured_for(rig, 5.0, 8.0, 0.0)
    assert believed(rig)[1 - held] == 3.0
    assert believed(rig)[held] > 3.0


def test_what_a_job_states_stays(rig):
    rig.submit(total_steps=1e9, throughputs={"v100": 2.0, "k80": 1.0})
    rig.look(2)
    measured_for(rig, 5.0, 8.0, 0.0)
    assert believed(rig)[SLOW] == 1.0
    assert believed(rig)[FAST] == 5.0, "half way to what was measured"
