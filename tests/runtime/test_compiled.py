"""Compiled steps train as the model does that is called."""

import copy

import pytest
import torch
from torch import nn

import hocket
from hocket.base.errors import UsageError


class Net(nn.Module):
    """Keeps statistics, draws numbers and has a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head, self.unused = nn.Linear(8, 2), nn.Linear(2, 2)

    def forward(self, rows, labels):
        return nn.functional.cross_entropy(self.head(self.body(rows)), labels)


def batches(count, size=6):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        rows = torch.randn(size, 4, generator=draw)
        yield {"rows": rows, "labels": torch.randint(2, (size,), generator=draw)}


def made():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def called(accumulate=1):
    """Losses and weights of plain PyTorch."""
    model, optimizer = made()
    torch.manual_seed(5)
    losses = []
    for number, batch in enumerate(batches(6), 1):
        loss = model(**batch)
        (loss / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_compiled_steps_are_those_of_the_model(accumulate):
    model, optimizer = made()
    first = next(batches(1))
    train = hocket.prepare(model, optimizer, first, compiled="eager", accumulate=accumulate)
    losses, state = called(accumulate)
    torch.manual_seed(5)
    assert [train.step(batch).item() for batch in batches(6)] == losses
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_compiled_trainings_go_on_from_a_checkpoint_and_take_other_shapes(tmp_path):
    model, optimizer = made()
    first = next(batches(1))
    train = hocket.prepare(model, optimizer, first, compiled="eager", clip_norm=1.0)
    for batch in batches(2):
        train.step(batch)
    train.save(tmp_path)
    wanted = [train.step(batch).item() for batch in batches(2, size=3)]
    other = copy.deepcopy(made()[0])
    again = hocket.prepare(
        other, torch.optim.AdamW(other.parameters(), lr=0.1, fused=True), first, compiled="eager",
        clip_norm=1.0,
    )  # fmt: skip
    again.load(tmp_path)
    assert [again.step(batch).item() for batch in batches(2, size=3)] == wanted
    assert again.evaluate(first).item() > 0


def test_parameters_that_are_frozen_between_steps_stay_as_they_are():
    first, states = next(batches(1)), []
    for compiled in (True, False):
        model, optimizer = made()
        train = None
        if compiled:
            train = hocket.prepare(model, optimizer, first, compiled="eager", clip_norm=0.5)
        torch.manual_seed(5)
        for number, batch in enumerate(batches(6)):
            model.body.requires_grad_(number < 2 or number == 5)
            if train is not None:
                train.step(batch)
                continue
            model(**batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_compiled_steps_have_no_plan():
    model, optimizer = made()
    with pytest.raises(UsageError, match="without a plan"):
        hocket.prepare(model, optimizer, next(batches(1)), compiled=True, memory="1GiB")
