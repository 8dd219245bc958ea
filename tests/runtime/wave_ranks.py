"""One of two ranks that train in waves with an update after each, beside plain PyTorch."""

import copy
import warnings

import torch
from torch import nn

import hocket
from hocket.capture.sizes import capture_sizes
from hocket.plan.files import SavedPlan
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.sections import Parallel, Replica, Waves

STEPS, WAVES, REPLICAS = 3, 4, 2


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def mean_square(model, rows):
    return model(rows).square().mean()


def published(model, batch):
    """Losses and weights in plain PyTorch: a twin per stream, each wave made of both replicas."""
    twins, optimizer = [copy.deepcopy(model) for _ in range(2)], adam(model)
    replicas = [rows.chunk(WAVES) for rows in batch.chunk(REPLICAS)]
    before, losses = None, []
    for _ in range(STEPS):
        parts = []
        for number, waves in enumerate(zip(*replicas, strict=True)):
            twin = twins[number % 2]
            loss = sum(mean_square(twin, rows) for rows in waves) / REPLICAS
            made = torch.autograd.grad(loss, list(twin.parameters()))
            for parameter, new, old in zip(model.parameters(), made, before or made, strict=True):
                parameter.grad = new if before is None else (old + new) / 2
            optimizer.step()
            twin.load_state_dict(model.state_dict())
            before = made
            parts.append(loss.item() / WAVES)
        losses.append(sum(parts))
    return losses, model.state_dict()


def differences(tell):
    """The largest differences of losses and weights from plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    batch = torch.randn(16, 6, dtype=torch.float64)
    losses, weights = published(copy.deepcopy(model), batch)
    problem = make_problem(capture_sizes(model, batch, forward=mean_square), "2xcpu-core")
    replicas = tuple(
        Replica(devices=(name,), microbatches=(2,) * WAVES) for name in problem.cluster.device_names
    )
    plan = Plan(planner="waves").having(Parallel(replicas=replicas))
    plan = plan.having(Waves(lead=3, changes="wave"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train = hocket.prepare(
            model, adam(model), batch, plan=SavedPlan(problem, plan), forward=mean_square
        )
    found = [train.step(batch).item() for _ in losses]
    state = train.state_dict()["model"]
    return {
        "loss": max(abs(a - b) for a, b in zip(found, losses, strict=True)),
        "weights": max(float((state[name] - weights[name]).abs().max()) for name in weights),
    }
