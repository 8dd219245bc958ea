"""Autocast that is on when a step is called holds in that step, wherever `prepare` was called."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.base.errors import UsageError


def autocast(is_on: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if is_on else nullcontext()


def built() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1)]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, [torch.randn(8, 16) for _ in range(5)]


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output.float() - 1).square().mean()


def plain_losses(states: list[bool]) -> list[float]:
    model, optimizer, batches = built()
    losses = []
    for batch, is_on in zip(batches, states, strict=True):
        with autocast(is_on):
            loss = squares(model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


ALWAYS, SWITCHED = [True] * 5, [True, False, True, True, False]


@pytest.mark.parametrize("states", [ALWAYS, SWITCHED], ids=["always", "switched"])
@pytest.mark.parametrize("memory", [None, "16KiB"])
@pytest.mark.parametrize("calls_step", [True, False])
def test_a_step_is_computed_under_the_autocast_around_it(
    states: list[bool], memory: str | None, calls_step: bool
) -> None:
    expected = plain_losses(states)
    assert expected != plain_losses([False] * 5)
    model, optimizer, batches = built()
    train = hocket.prepare(model, optimizer, batches[0], loss=squares, memory=memory)
    losses = []
    for batch, is_on in zip(batches, states, strict=True):
        with autocast(is_on):
            loss = train.step(batch) if calls_step else train(batch)
        if not calls_step:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses == expected


def test_steps_outside_of_the_autocast_of_prepare_are_not_under_it() -> None:
    expected = plain_losses([False] * 5)
    model, optimizer, batches = built()
    with autocast(True):
        train = hocket.prepare(model, optimizer, batches[0], loss=squares)
    assert [train.step(batch).item() for batch in batches] == expected


def test_evaluation_and_prediction_are_under_the_autocast_around_them() -> None:
    model, optimizer, batches = built()
    train = hocket.prepare(model, optimizer, batches[0], loss=squares)
    with torch.no_grad(), autocast(True):
        expected = model.eval()(batches[0])
    assert torch.equal(train.predict(batches[0]), model(batches[0]))
    with autocast(True):
        assert train.evaluate(batches[0]).item() == squares(expected).item()
        assert train.predict(batches[0]).dtype == torch.bfloat16


def test_a_budget_with_low_precision_copies_refuses_steps_without_their_autocast() -> None:
    model, optimizer, batches = built()
    with autocast(True):
        train = hocket.prepare(model, optimizer, batches[0], loss=squares, memory="16KiB")
        train.step(batches[0])
    with pytest.raises(UsageError, match="low-precision copies"):
        train.step(batches[0])
