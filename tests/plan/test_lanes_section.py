"""Lanes that no plan can have, at the very bounds of what one can."""

from dataclasses import replace

import numpy as np
import pytest

from hocket.api import make_problem
from hocket.graph import Phase
from hocket.graph.generators import generate
from hocket.plan.plan import Plan
from hocket.plan.sections import Lanes, Parallel, Replica
from hocket.plan.sections.lanes import LaneWait

PROBLEM = make_problem(generate("transformer", 60, 3), "2xv100-16g")
NUM_PASSED = int((PROBLEM.graph.op_phase != Phase.OPTIMIZER).sum())
UPDATE = int(np.flatnonzero(PROBLEM.graph.op_phase == Phase.OPTIMIZER)[0])
ONE = Replica(devices=("gpu0",), microbatches=(1, 1, 1))
TWO = (ONE, replace(ONE, devices=("gpu1",)))


def wrong(lanes, *replicas):
    plan = Plan().having(Parallel(replicas=replicas or (ONE,)))
    return [violation.message for violation in lanes.verify(PROBLEM, plan)]


@pytest.mark.parametrize(
    "lanes", [Lanes(lead=NUM_PASSED), Lanes(lead=0, waits=(LaneWait(2, 0, 1, 1),))]
)
def test_lanes_up_to_their_bounds_break_no_rule(lanes):
    assert wrong(lanes) == []
    assert wrong(lanes, *TWO) == []


@pytest.mark.parametrize(
    ("lanes", "replicas", "words"),
    [
        (Lanes(lead=NUM_PASSED + 1), (), "the second lane begins after"),
        (Lanes(lead=0, waits=(LaneWait(3, 0, 0, 0),)), (), "an op that is not there"),
        (Lanes(lead=0, waits=(LaneWait(1, PROBLEM.graph.num_ops, 0, 0),)), (), "is not there"),
        (Lanes(lead=0, waits=(LaneWait(2, 0, 0, 0),)), (), "inside one lane"),
        (Lanes(lead=0, waits=(LaneWait(1, UPDATE, 0, 0),)), (), "about an update"),
        (Lanes(lead=0, waits=(LaneWait(1, 0, 0, UPDATE),)), (), "about an update"),
        (Lanes(lead=0), (replace(ONE, recomputed=((0, 5),)),), "keep what they make"),
        (Lanes(lead=0), (replace(ONE, update="host"),), "update on the device"),
        (Lanes(lead=0, changes="wave"), TWO, "on one device only"),
        (Lanes(lead=0), (ONE, replace(TWO[1], microbatches=(1, 2))), "equally many microbatches"),
        (Lanes(lead=0), (replace(ONE, microbatches=(3,)),), "two microbatches or more"),
    ],
)
def test_lanes_say_what_is_wrong_with_them(lanes, replicas, words):
    assert any(words in message for message in wrong(lanes, *replicas))
