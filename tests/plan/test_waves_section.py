"""Waves that no plan can have, at the very bounds of what one can."""

from dataclasses import replace

import pytest

from hocket.graph import Phase
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Replica, Waves

PROBLEM = make_problem(generate("transformer", 60, 3), "2xv100-16g")
NUM_PASSED = int((PROBLEM.graph.op_phase != Phase.OPTIMIZER).sum())
ONE = Replica(devices=("gpu0",), microbatches=(1, 1, 1))
TWO = (ONE, replace(ONE, devices=("gpu1",)))


def wrong(waves, *replicas):
    plan = Plan().having(Parallel(replicas=replicas or (ONE,)))
    return [violation.message for violation in waves.verify(PROBLEM, plan)]


def test_waves_up_to_their_bounds_break_no_rule():
    assert wrong(Waves(lead=NUM_PASSED)) == []
    assert wrong(Waves(lead=0), *TWO) == []
    assert wrong(Waves(lead=0, changes="wave"), *TWO) == []


@pytest.mark.parametrize(
    ("waves", "replicas", "message"),
    [
        (Waves(lead=NUM_PASSED + 1), (), "the second stream begins after"),
        (Waves(lead=0), (replace(ONE, recomputed=((0, 5),)),), "save activations"),
        (Waves(lead=0), (replace(ONE, update="host"),), "update on the device"),
        (Waves(lead=0), (ONE, replace(TWO[1], microbatches=(1, 2))), "equally many microbatches"),
        (Waves(lead=0), (replace(ONE, microbatches=(3,)),), "two microbatches or more"),
    ],
)
def test_waves_report_violations(waves, replicas, message):
    assert any(message in violation for violation in wrong(waves, *replicas))
