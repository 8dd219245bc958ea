"""Gangs that get plans of their own: more devices are never slower, and what fits is planned."""

import pytest
import torch
from torch import nn

from hocket.api.jobs import planned_job
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.capture.sizes import capture_sizes
from hocket.fleet.throughputs.planned import plan_gangs, planned_throughputs
from hocket.fleet.throughputs.servers import find_servers
from hocket.plan.files import read_plan
from hocket.plan.sections import Parallel
from hocket.planners.parallel import compare
from hocket.service.spec import JobSpec
from hocket.simulate import simulate


def stack(width=1024, num_layers=4):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def graph():
    return capture_sizes(stack(), torch.zeros(4, 64, 1024), name="stack")


def test_a_gang_is_never_slower_than_a_part_of_it_and_has_a_plan(graph, monkeypatch):
    monkeypatch.setattr(compare, "_MOST_PLACED_OPS", 0)  # a search that nothing here looks at
    plans = plan_gangs(graph, [find_servers("t4"), find_servers("v100")], (2, 1))
    table = planned_throughputs(plans, "mine")
    assert table.device_types == ("t4", "v100")
    assert [tuple(profile) for profile in table.profiles] == [("mine", 1), ("mine", 2)]
    assert (table.alone > 0).all()
    assert (table.alone[1] >= table.alone[0] * 0.995).all()
    assert (table.alone[:, 1] > table.alone[:, 0]).all()
    assert all(plan.comparison.winner.plan is not None for plan in plans)


def test_a_batch_of_one_sample_is_refused(graph):
    alone = capture_sizes(stack(64, 1), torch.zeros(1, 64))
    with pytest.raises(UsageError, match="cannot be shared"):
        plan_gangs(alone, [find_servers("t4")], (1,))


def test_a_job_that_names_a_model_gets_a_plan_for_every_type_that_it_fits(
    graph, tmp_path, monkeypatch
):
    monkeypatch.setattr(compare, "_MOST_PLACED_OPS", 0)
    spec = JobSpec(name="mine", command=("python", "train.py"), gang=2, model="stack")
    found = planned_job(spec, graph, ("v100", "t4"), tmp_path / "plans")
    assert found.processes == "per-device"
    assert found.throughputs["v100"] > found.throughputs["t4"] > 0
    for device_type, file in found.plans.items():
        saved = read_plan(file)
        assert len(saved.plan[Parallel].devices) == 2, "every device of the gang has a part"
        assert {device.kind.name.partition("-")[0] for device in saved.problem.cluster.devices} == {
            device_type
        }
        assert 1 / simulate(saved.problem, saved.plan).makespan_s == found.throughputs[device_type]


def test_an_elastic_job_gets_a_plan_for_every_size_and_for_an_unequal_machine(
    graph, tmp_path, monkeypatch
):
    monkeypatch.setattr(compare, "_MOST_PLACED_OPS", 0)
    spec = JobSpec(name="mine", command=("python", "train.py"), gangs=(1, 2), model="stack")
    found = planned_job(spec, graph, ("t4", "mixed-desktop"), tmp_path / "plans")
    assert set(found.plans) == set(found.throughputs) == {"1xt4", "2xt4", "1xmixed-desktop"}
    assert len(read_plan(found.plans["2xt4"]).plan[Parallel].devices) == 2
    assert read_plan(found.plans["1xmixed-desktop"]).problem.cluster.num_devices == 3


def test_a_job_whose_model_fits_nowhere_is_refused(graph, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_MOST_PLACED_OPS", 0)
    monkeypatch.setattr("hocket.api.jobs._on_all", lambda comparison, gang: None)
    spec = JobSpec(name="mine", command=("true",), model="stack")
    with pytest.raises(NoFeasiblePlanError, match="fits no gang of 1 devices of one type"):
        planned_job(spec, graph, ("t4",), tmp_path / "plans")
    assert not (tmp_path / "plans").exists()
