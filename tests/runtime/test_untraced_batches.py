"""Batches that a traced step cannot compute are computed by the model itself: same numbers, one
warning, no error in mid-training."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.capture.model import CaptureWarning


class Transposed(nn.Module):
    """The kernel of the batch norm gives other strides than its shape rule says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.drop(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x.reshape(len(x), -1)).square().mean()


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
        x = torch.spmm(links, self.first(x)).relu()
        return torch.spmm(links, self.second(x)).square().mean()


def sparse_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 5), (torch.rand(6, 6) > 0.5).float().to_sparse()


def lengths() -> list[torch.Tensor]:
    return [torch.randn(2, length, 4) for length in (8, 3, 4, 5, 6, 7, 9, 1, 2, 10, 11, 8)]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(x)).mean(1).square().mean()


CASES: dict[str, tuple[Any, Any, str]] = {
    "strides": (Transposed, lambda: [torch.randn(3, 8, 4) for _ in range(4)], "failed in step 1"),
    "sparse": (Graph, lambda: [sparse_batch() for _ in range(4)], "sparse or nested"),
    "shapes": (Mean, lengths, "more than 8 shapes"),
}


def trained(model: nn.Module, batches: list[Any], step: Any) -> tuple[list[float], Any]:
    torch.manual_seed(1)
    losses = [step(batch) for batch in batches]
    return [*losses, torch.rand(()).item()], copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("calls_step", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_untraced_batches_are_computed_by_the_model(case: str, calls_step: bool) -> None:
    make, make_batches, reason = CASES[case]
    torch.manual_seed(0)
    model, batches = make(), make_batches()
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin))

    def by_torch(batch: Any) -> float:
        loss = twin(*batch) if isinstance(batch, tuple) else twin(batch)
        loss.backward()
        plain.step()
        plain.zero_grad()
        return loss.item()

    def by_hocket(batch: Any) -> float:
        if calls_step:
            return train.step(batch).item()
        loss = train(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    expected, weights = trained(twin, batches, by_torch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train = hocket.prepare(model, optimizer, batches[0])
        found, own = trained(model, batches, by_hocket)
    assert found == expected
    assert all(torch.equal(own[name], weights[name]) for name in weights)
    told = [str(each.message) for each in told if each.category is CaptureWarning]
    assert len(told) == 1
    assert reason in told[0]
    assert reason in train.lost


@pytest.mark.parametrize("num_steps", [4, 12])
def test_a_number_of_the_model_that_the_loop_changes_holds_in_the_next_step(num_steps: int) -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.temperature = nn.Linear(4, 4), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) / self.temperature).softmax(-1).square().mean()

    torch.manual_seed(0)
    model, batch = Tempered(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin))
    train = hocket.prepare(model, optimizer, batch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(num_steps):
            model.temperature = twin.temperature = 1.0 + 0.1 * step
            plain.zero_grad()
            expected = twin(batch)
            expected.backward()
            plain.step()
            assert train.step(batch).item() == expected.item()
    warned = [each for each in told if each.category is CaptureWarning]
    assert len(warned) == (num_steps > 8)


class Stateful(nn.Module):
    """Goes on from the state that the last step has left."""

    def __init__(self, *, in_dict: bool) -> None:
        super().__init__()
        self.cell, self.in_dict = nn.GRUCell(4, 4), in_dict
        self.state: torch.Tensor | None = None
        self.states: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.states.get("h") if self.in_dict else self.state
        made = self.cell(x, torch.zeros(3, 4) if state is None else state)
        if self.in_dict:
            self.states["h"] = made.detach()
        else:
            self.state = made.detach()
        return made.square().mean()


@pytest.mark.parametrize("in_dict", [False, True])
def test_state_that_a_step_leaves_to_the_next_is_followed(in_dict: bool) -> None:
    torch.manual_seed(0)
    model, batches = Stateful(in_dict=in_dict), [torch.randn(3, 4) for _ in range(4)]
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin))
    with pytest.warns(CaptureWarning, match="that the step before has left"):
        train = hocket.prepare(model, optimizer, batches[0])
    for batch in batches:
        plain.zero_grad()
        expected = twin(batch)
        expected.backward()
        plain.step()
        assert train.step(batch).item() == expected.item()


def test_a_tensor_that_is_only_left_to_be_looked_at_is_traced() -> None:
    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.inner(x)
            return self.last.square().mean()

    model = Shown()
    train = hocket.prepare(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(3, 4))
    assert not train.lost
