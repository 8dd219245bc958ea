"""Exact limits: what just fits, the first index that is too large, bytes that were there before."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hocket.api.planned import plan_graph
from hocket.base.errors import InputFileError
from hocket.graph import GraphBuilder, Role
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.files import read_plan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.verify import structure_violations
from hocket.simulate import simulate
from hocket.simulate.verify import memory_violations, violations


def sized(cluster, device, memory_bytes):
    """The cluster with exactly this much usable memory on one device."""
    devices = list(cluster.devices)
    headroom_bytes = devices[device].kind.headroom_bytes
    devices[device] = replace(devices[device], memory_bytes=memory_bytes + headroom_bytes)
    return replace(cluster, devices=tuple(devices))


@pytest.fixture(scope="module")
def small():
    """Two ops on two devices, the second reads the first."""
    builder = GraphBuilder("two")
    first = builder.op("a", flops=1e6)
    made = builder.tensor("x", 1000, producer=first)
    second = builder.op("b", reads=[made], flops=1e6)
    builder.tensor("y", 3000, producer=second, role=Role.OUTPUT)
    return builder.build()


def test_a_peak_of_all_that_is_usable_fits_and_one_byte_more_does_not(small):
    cluster = cluster_from_text("2xv100-16g")
    plan = Plan().placing(np.array([0, 1], dtype=np.int32))
    peaks = simulate(make_problem(small, cluster), plan).peak_bytes.tolist()
    for device, peak in enumerate(peaks):
        for lacking in (0, 1):
            problem = make_problem(small, sized(cluster, device, peak - lacking))
            found = list(memory_violations(problem, simulate(problem, plan)))
            assert [violation.device for violation in found] == [f"gpu{device}"] * lacking
            assert len(violations(plan, problem)) == lacking


def test_the_first_device_that_is_not_there_is_refused_in_plan_and_file(small, tmp_path):
    problem = make_problem(small, "2xv100-16g")
    for device, is_there in ((1, True), (2, False), (-1, False)):
        plan = Plan().placing(np.array([0, device], dtype=np.int32))
        assert (violations(plan, problem) == []) is is_there
    plan_graph(small, "2xv100-16g", planners="m-topo").save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    content["sections"]["placement"]["device_of"] = [0, 2]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InputFileError, match=r"device_of\[1\] is 2"):
        read_plan(tmp_path / "plan.json")
    content["sections"]["placement"]["device_of"] = [0, 1]
    content["sections"]["order"] = {"by_device": [[0], [2]]}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InputFileError, match=r"by_device\[1\]\[0\] is 2"):
        read_plan(tmp_path / "plan.json")


def test_a_tensor_of_before_the_step_is_no_alias_of_one_made_in_it():
    """Its bytes would not be there yet when the step begins."""
    builder = GraphBuilder("early")
    first = builder.op("a", flops=1e6)
    made = builder.tensor("x", 1000, producer=first)
    builder.op("b", reads=[made])
    builder.tensor("early", 1000, role=Role.PARAMETER, alias_of=made)
    with pytest.raises(InputFileError, match="'early' aliases 'x', which its producer does not"):
        builder.build()


@pytest.mark.parametrize(
    ("priority", "is_legal"),
    [([0.0, 1.0], True), ([0.0, np.inf], True), ([0.0, np.nan], False), ([0.0], False)],
)
def test_priorities_are_one_number_per_op(small, priority, is_legal):
    plan = Plan().placing(np.array([0, 1], dtype=np.int32), priority=np.array(priority))
    found = list(structure_violations(plan, make_problem(small, "2xv100-16g")))
    assert [violation.rule for violation in found] == ([] if is_legal else ["order"])
