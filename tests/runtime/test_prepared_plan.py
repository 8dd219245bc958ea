"""`hocket.prepare` reports its plan, the predicted step, and what several processes would gain."""

import logging

import pytest
import torch
from torch import nn

import hocket
from hocket.plan.sections import Memory


def _prepared(batch_size=64, width=64, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(batch_size, width)
    return hocket.prepare(
        model, optimizer, batch, forward=lambda model, x: model(x).square().mean(), **options
    )


@pytest.mark.parametrize(
    "options", [{}, {"on": "1xv100-16g"}, {"on": "2xv100-16g"}, {"memory": "1GiB"}]
)
def test_the_plan_and_its_predicted_step_are_there(options):
    train = _prepared(**options)
    assert train.predicted_step_s > 0
    assert train.plan.claims.step_s == pytest.approx(train.predicted_step_s)
    assert (train.plan.get(Memory) is not None) == ("memory" in options)
    assert train.plan.device_of is not None
    train.step(torch.randn(64, 64))


def test_given_degrees_are_the_plan_that_is_reported():
    train = _prepared(plan=hocket.ParallelConfig(global_batch=64))
    assert train.predicted_step_s is None
    assert "global_batch=64" in train.plan.notes["how"]


def test_a_shorter_plan_of_several_processes_is_named_in_one_line(caplog):
    with caplog.at_level(logging.WARNING, logger="hocket"):
        train = _prepared(batch_size=2048, width=512, on="2xcpu-core")
    assert train.advice == caplog.messages[0]
    assert "\n" not in train.advice
    before, after = train.advice.split(" with hocket launch; in this process ")
    assert before.startswith(("DDP, 1024 + 1024 samples on", "FSDP, 1024 + 1024 samples on"))
    assert after.split(" (hint")[0].endswith(("by op placement", "on one device"))


def test_nothing_is_advised_where_one_device_is_all_there_is(caplog):
    assert not _prepared(on="1xv100-16g").advice
    assert not caplog.messages
