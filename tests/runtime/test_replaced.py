"""What a user replaces in a model between steps is trained from then on, or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.budget_loops import loop_of
from torch import nn
from torch.nn.utils import parametrizations, prune

import hocket
from hocket.base.errors import UsageError
from hocket.runtime.offload.model_blocks import uniform

WIDTH = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.plain = torch.ones(WIDTH)
        self.shift: torch.Tensor | None = None
        self.config = SimpleNamespace(power=1.0, inner=SimpleNamespace(sign=1.0))
        self.table = {"factor": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x) * self.scale) * self.plain)
        x = x if self.shift is None else x + self.shift
        return (x**2).mean() * self.config.power * self.config.inner.sign * self.table["factor"]


def new_parameter(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))
    optimizer.param_groups[0]["params"] = list(model.parameters())


def new_module(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.second = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    with torch.no_grad():
        model.second.weight.fill_(0.05)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def tied(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.second.weight = model.first.weight
    optimizer.param_groups[0]["params"] = list(model.parameters())


def pruned(model: Net, optimizer: torch.optim.Optimizer) -> None:
    prune.l1_unstructured(model.first, "weight", amount=0.5)


def parametrized(model: Net, optimizer: torch.optim.Optimizer) -> None:
    parametrizations.weight_norm(model.first)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def doubled_gradient(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.first.weight.register_hook(lambda gradient: 2 * gradient)


def update_in_hook(model: Net, optimizer: torch.optim.Optimizer) -> None:
    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)

    model.first.weight.register_post_accumulate_grad_hook(update)


def forward_hook(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.first.register_forward_hook(lambda module, args, output: 2 * output)


REPLACED: dict[str, Callable[..., Any]] = {
    "parameter": new_parameter,
    "module": new_module,
    "tied": tied,
    "pruned": pruned,
    "parametrized": parametrized,
    "gradient hook": doubled_gradient,
    "update in a hook": update_in_hook,
    "forward hook": forward_hook,
    "buffer": lambda model, _: setattr(model, "scale", torch.full((WIDTH,), 0.5)),
    "attribute": lambda model, _: setattr(model, "plain", torch.full((WIDTH,), 0.5)),
    "attribute that was None": lambda model, _: setattr(model, "shift", torch.ones(WIDTH)),
    "forward": lambda model, _: setattr(model.second, "forward", torch.nn.functional.relu),
    "config": lambda model, _: setattr(model.config, "power", 3.0),
    "nested config": lambda model, _: setattr(model.config.inner, "sign", -1.0),
    "dict": lambda model, _: model.table.update(factor=2.0),
}

REFUSED_BY_BUDGETS = ("parameter", "module", "tied", "pruned", "parametrized")


def trained(change: Callable[..., Any], mode: str) -> tuple[list[float], nn.Module]:
    """Losses of two steps, the change, an evaluation and two more steps."""
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory = {"memory": "1GiB"} if mode == "memory" else {}
    train = None if mode == "plain" else hocket.prepare(model, optimizer, batch, **memory)
    losses = []
    for step in range(4):
        if step == 2:
            change(model, optimizer)
            losses.append(model(batch).item() if train is None else train.evaluate(batch).item())
        if train is not None and mode != "own loop":
            losses.append(train.step(batch).item())
            continue
        optimizer.zero_grad()
        loss = model(batch) if train is None else train(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("mode", ["step", "own loop", "memory"])
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.filterwarnings("ignore")
def test_replaced_between_steps(name: str, mode: str) -> None:
    change = REPLACED[name]
    wanted, twin = trained(change, "plain")
    if mode == "memory" and name in REFUSED_BY_BUDGETS:
        with pytest.raises(UsageError, match=r"replaced since hocket\.prepare"):
            trained(change, mode)
        return
    losses, model = trained(change, mode)
    assert losses == wanted
    both = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in both)


def test_a_buffer_that_an_untraced_batch_replaces_is_read_by_a_traced_one() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("seen", torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 3:
                self.seen = self.seen + 1
            return (self.layer(x) * self.seen).square().mean()

    torch.manual_seed(0)
    model, batches = Counting(), [torch.randn(n, WIDTH) for n in (4, 3, 4, 3, 3, 4)]
    twin = copy.deepcopy(model)
    train = hocket.prepare(model, torch.optim.SGD(model.parameters(), 0.1), batches[0])
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    for batch in batches:
        plain.zero_grad()
        loss = twin(batch)
        loss.backward()
        plain.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert train.step(batch).item() == loss.item()


class Keeping(nn.Module):
    """Counts calls in a list and in a closure, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, number = nn.Linear(WIDTH, WIDTH), [0], 0

        def count() -> int:
            nonlocal number
            number += 1
            return number

        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return torch.tanh(self.layer(x)) * (self.calls[0] + self.count())


@pytest.mark.parametrize("kind", [Keeping, nn.Linear])
def test_python_state_moves_once_where_blocks_are_recomputed(kind: Any) -> None:
    losses: list[list[float]] = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        make = Keeping if kind is Keeping else lambda: nn.Linear(WIDTH, WIDTH)
        model = nn.Sequential(*(make() for _ in range(3)))
        batch, optimizer = torch.randn(64, WIDTH), torch.optim.SGD(model.parameters(), 0.01)
        train = None
        if not is_plain:
            section = uniform(model, 0, activations="recomputed")
            train = loop_of(model, optimizer, section, batch, lambda m, x: m(x).square().mean())
        losses.append([])
        for _ in range(3):
            if train is not None:
                losses[-1].append(train.step(batch).item())
                continue
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def test_a_parameter_that_a_streamed_block_writes_is_refused() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(0.0, 0.5)
            return x * self.weight

    model, batch = nn.Sequential(Clamped(), Clamped()), torch.randn(4, WIDTH)
    section = uniform(model, 0, parameters="streamed", update="host")
    train = loop_of(
        model, torch.optim.SGD(model.parameters(), 0.1), section, batch, lambda m, x: m(x).mean()
    )
    with pytest.raises(UsageError, match="writes into its parameters"):
        train.step(batch)
