"""What ranks wrote down becomes one timeline: whole, from the start of the step, as long as it."""

import json

import numpy as np
import pytest

from hocket.runtime.device_instructions import Transfer
from hocket.runtime.step_record import StepRecord, joined, measured_timeline

TRANSFERS = (Transfer(tensor=4, src=0, dst=1), Transfer(tensor=3, src=1, dst=0))


def records():
    """Two devices with an op each; the first sends late, the second is ready late."""
    first = StepRecord(
        start_s=10.0, end_s=15.0, op_start_s={0: 10.5}, op_end_s={0: 11.0}, sent_s={0: 11.5},
        posted_s={1: 11.0}, arrived_s={1: 13.5}, memory={0: [(9.0, 7), (10.5, 50), (10.5, 40)]},
        peak_bytes={0: 50}, loss=0.25,
    )  # fmt: skip
    second = StepRecord(
        start_s=10.25, end_s=16.0, op_start_s={1: 13.0}, op_end_s={1: 12.0}, sent_s={1: 10.75},
        posted_s={0: 10.5}, arrived_s={0: 12.5}, memory={1: [(10.5, 30)]}, peak_bytes={1: 30},
    )  # fmt: skip
    return first, second


def timeline():
    return measured_timeline(joined(records()), np.array([0, 1], dtype=np.int32), TRANSFERS, 2)


def test_a_measured_step_lasts_from_the_first_start_to_the_last_end():
    whole = joined(records())
    assert (whole.start_s, whole.end_s, whole.step_s) == (10.0, 16.0, 6.0)
    assert whole.loss == 0.25
    assert joined(reversed(records())).loss == 0.25
    # The last op ends at 3 s: what comes behind it is part of the step.
    assert timeline().makespan_s == 6.0


def test_ops_start_when_they_did_and_never_end_before():
    made = timeline()
    assert made.op_start_s.tolist() == [0.5, 3.0]
    assert made.op_end_s.tolist() == [1.0, 3.0]
    assert made.peak_bytes.tolist() == [50, 30]


def test_a_transfer_flows_when_both_sides_are_ready():
    made = timeline()
    assert made.transfer_tensor.tolist() == [3, 4]
    assert made.transfer_src.tolist() == [1, 0]
    assert made.transfer_dst.tolist() == [0, 1]
    assert made.transfer_ready_s.tolist() == [0.75, 1.5]
    assert made.transfer_start_s.tolist() == [1.0, 1.5]
    assert made.transfer_end_s.tolist() == [3.5, 2.5]


def test_memory_before_the_step_counts_from_its_start_and_the_last_of_an_instant_stays():
    times_s, held = timeline().memory_curve(0)
    assert times_s.tolist() == [0.0, 0.5]
    assert held.tolist() == [7, 40]


@pytest.mark.parametrize("record", records())
def test_a_record_that_travels_is_the_same(record):
    data = record.to_data()
    found = StepRecord.from_data(json.loads(json.dumps(data)))
    assert json.dumps(found.to_data()) == json.dumps(data)
    assert found.op_start_s == record.op_start_s
