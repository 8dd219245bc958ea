"""A loop on a random placement beside the same loop in plain PyTorch."""

import copy
import warnings

import torch
from runtime.placements import random_placement
from torch.optim import lr_scheduler

from hocket.capture import CaptureWarning, capture
from hocket.capture.loss import ChosenLoss
from hocket.capture.step import apply_model
from hocket.plan.files import SavedPlan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.runtime.batches import settled
from hocket.runtime.planned_optimizer import planned_update
from hocket.training import prepare

NUM_DEVICES = 3


def random_plan(model, optimizer, batch, seed, forward=None):
    """A plan that puts every op, or every module, anywhere on three devices."""
    update = planned_update(optimizer, model)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        graph = capture(model, settled(batch), optimizer=update, device="cpu", forward=forward)
    problem = make_problem(graph, f"{NUM_DEVICES}xv100-16g")
    return SavedPlan(problem, Plan().placing(random_placement(graph, NUM_DEVICES, seed)))


def adamw(model):
    """Two groups with settings of their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def plain_loss(model, batch, forward=None):
    return ChosenLoss(None)((forward or apply_model)(model, batch))


def plain_steps(model, optimizer, batches, *, forward=None, clip_norm=None, accumulate=1):
    """Plain PyTorch: one loss per batch."""
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = plain_loss(model, batch, forward)
        (loss / accumulate if accumulate > 1 else loss).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_same_state(model, twin):
    ours, plain = model.state_dict(), twin.state_dict()
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        assert torch.equal(ours[name], expected), name


def assert_loops_agree(build, seed, *, steps=20, make_optimizer=adamw, accumulate=2, clip_norm=0.5,
                       halfway=lambda train: train):  # fmt: skip
    """Losses and weights of both loops, to the bit, with accumulation, clipping and a schedule;
    ``halfway`` may replace the loop."""
    torch.manual_seed(seed)
    model, batches, forward = build()
    model.train()
    twin = copy.deepcopy(model)
    batches = [batches[number % len(batches)] for number in range(steps)]
    optimizer, plain = make_optimizer(model), make_optimizer(twin)
    plan = random_plan(model, optimizer, batches[0], seed, forward)
    train = prepare(model, optimizer, batches[0], plan=plan, forward=forward,
                    accumulate=accumulate, clip_norm=clip_norm)  # fmt: skip
    ours, theirs = [], []
    schedules = [lr_scheduler.StepLR(each, 2, 0.7) for each in (train.optimizer, plain)]
    torch.manual_seed(seed)
    for number, batch in enumerate(batches, 1):
        if number == steps // 2 + 1:
            train = halfway(train)
        ours.append(train.step(batch).item())
        if number % accumulate == 0:
            schedules[0].step()
    torch.manual_seed(seed)
    for number in range(0, steps, accumulate):
        theirs += plain_steps(twin, plain, batches[number : number + accumulate], forward=forward,
                              clip_norm=clip_norm, accumulate=accumulate)  # fmt: skip
        schedules[1].step()
    assert ours == theirs
    assert_same_state(train.model, twin)
