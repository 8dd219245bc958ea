"""What a loop says of its steps: the cause of a drift, and a better plan from measured times."""

from dataclasses import replace
from math import log
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture import capture
from hocket.cost.profile import read_profile
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.runtime.training_loop import NUM_DRIFTING, DriftWarning, Watch, likely_cause
from hocket.simulate import simulate
from hocket.training import prepare


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
    return model, (torch.randn(32, 64), torch.randint(0, 8, (32,)))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def predicted():
    """A step on two devices, with transfers between them."""
    model, batch = net()
    graph = capture(model, batch, forward=loss_of, optimizer="sgd", device="cpu")
    problem = make_problem(graph, "2xv100-16g")
    place = np.arange(graph.num_ops, dtype=np.int32) % 2
    for group in set(graph.group.tolist()) - {-1}:
        place[graph.group == group] = group % 2
    return simulate(problem, Plan().placing(place)), problem.cluster.device_names


def stretched(timeline, *, device=None, transfers=1.0, wait=1.0):
    """The same step with longer ops of a device, longer transfers, or longer waits."""
    factor = np.where(timeline.op_device == device, 3.0, 1.0)
    op_s = (timeline.op_end_s - timeline.op_start_s) * factor
    sent_s = (timeline.transfer_end_s - timeline.transfer_start_s) * transfers
    return replace(
        timeline,
        op_start_s=timeline.op_start_s * wait,
        op_end_s=timeline.op_start_s * wait + op_s,
        transfer_start_s=timeline.transfer_start_s * wait,
        transfer_end_s=timeline.transfer_start_s * wait + sent_s,
    )


def test_the_cause_of_a_drift_is_the_device_the_links_or_the_host(predicted):
    timeline, names = predicted
    slow = likely_cause(timeline, stretched(timeline, device=1), names)
    assert slow.startswith(f"{names[1]} computes 3 times as long as predicted: train.refine()")
    far = likely_cause(timeline, stretched(timeline, transfers=4.0), names)
    assert far.startswith("transfers take 4 times as long as predicted: hocket probe")
    waiting = likely_cause(timeline, stretched(timeline, wait=10.0), names)
    assert waiting.startswith("devices compute as predicted and wait")
    assert waiting.endswith("give them more to do at once")


def test_time_between_steps_is_told_as_the_loops_own(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("hocket.runtime.training_loop.time.perf_counter", lambda: clock.now_s)
    watch = Watch(predicted_s=1.0)
    loss, batch = torch.tensor(1.0), torch.zeros(4, 2)

    def step(between_s, takes_s):
        watch.leave()
        clock.now_s += between_s
        watch.enter()
        clock.now_s += takes_s
        return watch.note(loss, batch)

    for _ in range(NUM_DRIFTING):
        assert not step(0.5, 1.0)
    assert step(0.5, 1.0), "ten steps of 1.5 s where 1 s was predicted"
    assert watch.loop_cause().startswith("500 ms of it pass between steps, in the loop itself")
    for _ in range(30):
        step(0.1, 1.5)
    assert watch.loop_cause() == "", "the loop is not what takes longer"
    for _ in range(30):
        step(0.3, 0.3)
    assert watch.loop_cause() == "", "steps are shorter than predicted"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({}, "compute"),
        (
            {"memory": 2**30},
            r"plan again with measured times.*hocket profile.*--profile",
        ),
    ],
)
def test_every_warning_of_drift_names_a_cause(options, cause):
    model, batch = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = prepare(model, optimizer, batch, forward=loss_of, **options)
    train.watch.predicted_s = 1e9  # the loop is then never what takes longer
    for _ in range(NUM_DRIFTING + 1):  # from the second on the time of a step is known
        train.step(batch)
    with pytest.warns(DriftWarning, match=cause):
        train.step(batch)


def test_refining_brings_the_prediction_nearer_and_writes_the_times(tmp_path):
    model, batch = net()
    train = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, forward=loss_of)
    with pytest.raises(UsageError, match="no step was timed"):
        train.refine()
    for _ in range(3):
        train.step(batch, timed=True)
    measured_s = float(train.timings.measured.busy_s.sum())
    planned = train.refine(tmp_path / "times.json")
    entries = read_profile(tmp_path / "times.json").entries
    assert len(entries) > 5
    first_s = float(train.timings.predicted.busy_s.sum())
    refined_s = float(planned.timeline.busy_s.sum())
    assert abs(log(refined_s / measured_s)) < abs(log(first_s / measured_s)) + 0.05
    again = prepare(model, train.optimizer, batch, plan=planned, forward=loss_of)
    assert torch.isfinite(again.step(batch))
