"""Parameters that are read between steps within a budget have their updates."""

import copy

import pytest
import torch
from planners.memory.steps import chain_step, placed
from runtime.budget_loops import loop_of, mixed
from runtime.budget_models import MODELS
from runtime.train_loops import adamw
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hocket
from hocket.base.errors import UsageError
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Memory
from hocket.planners.memory.budget import keep_budget
from hocket.planners.memory.frontier import minimum_memory_bytes

BUDGETS = (1.0, 0.75, 0.6, 0.5)
"""Of what the plain step holds."""


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def plain(model, batches, forward, num_steps=10):
    """An EMA and all parameters after each step of plain PyTorch."""
    optimizer, ema, seen = adamw(model), averaged(copy.deepcopy(model)), []
    for number in range(num_steps):
        optimizer.zero_grad()
        forward(model, batches[number % len(batches)]).backward()
        optimizer.step()
        ema.update_parameters(model)
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return ema, seen


def assert_reads_updates(train, model, batches, ema, expected):
    for number, parameters in enumerate(expected[1]):
        train.step(batches[number % len(batches)])
        ema.update_parameters(model)
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(model.parameters(), parameters, strict=True)
        )
    for ours, theirs in zip(ema.parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("part", BUDGETS)
def test_an_ema_within_a_budget_is_that_of_plain_pytorch(part):
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    model.eval()  # without dropout
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    most = hocket.prepare(twin, adamw(twin), batches[0], forward=forward, memory="1GiB").memory
    train = hocket.prepare(
        model, adamw(model), batches[0], forward=forward, memory=int(part * most.peak_bytes),
    )  # fmt: skip
    expected = plain(start, batches, forward)
    assert_reads_updates(train, model, batches, averaged(copy.deepcopy(start)), expected)


@pytest.mark.parametrize("seed", range(6))
def test_every_policy_of_parameters_finishes_its_update(seed):
    torch.manual_seed(0)
    model, batches, forward = MODELS["blocks"]()
    model.eval()
    start = copy.deepcopy(model)
    train = loop_of(model, adamw(model), mixed(model, seed), batches[0], forward)
    expected = plain(copy.deepcopy(start), batches, forward)
    assert_reads_updates(train, model, batches, averaged(start), expected)


@pytest.mark.parametrize("async_update", [False, True])
def test_both_kinds_of_update_are_predicted_and_end_alike(async_update):
    torch.manual_seed(0)
    model, batches, _ = MODELS["tied"]()
    model.eval()
    twin = copy.deepcopy(model)
    train = hocket.prepare(
        model, adamw(model), batches[0], memory=150_000, on="1xh200", async_update=async_update
    )
    assert train.memory.section.async_update is async_update
    for batch in batches:
        train.step(batch)
    state = train.state_dict()["model"]
    optimizer = adamw(twin)
    for words, labels in batches:
        optimizer.zero_grad()
        twin(words, labels).backward()
        optimizer.step()
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())


def test_asynchronous_updates_are_predicted_to_be_faster():
    problem, plan = placed(chain_step(6, flops=1e9))
    least = minimum_memory_bytes(problem, plan)
    finished, crossing = (
        keep_budget(problem, plan, least, async_update=flag) for flag in (False, True)
    )
    assert crossing.chosen.step_s < finished.chosen.step_s
    assert finished.plan()[Memory].async_update is False
    assert crossing.plan()[Memory].async_update is True


def test_a_plan_that_finishes_updates_is_not_run_asynchronously():
    torch.manual_seed(0)
    model, batches, _ = MODELS["tied"]()
    optimizer = torch.optim.AdamW(model.parameters())
    finished = hocket.fit(hocket.capture(model, batches[0], device="cpu"), "1xh200", 200_000)
    with pytest.raises(UsageError, match="finishes updates with each step"):
        hocket.prepare(
            model, optimizer, batches[0], async_update=True,
            plan=SavedPlan(finished.frontier.problem, finished.plan()),
        )  # fmt: skip
