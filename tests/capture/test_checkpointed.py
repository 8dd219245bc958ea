"""Models with activation checkpointing of their own are traced op by op."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hocket
from hocket.capture import capture_program


class Block(nn.Module):
    """Draws twice, between layers that a checkpoint runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.first(x).tanh(), 0.3, self.training)
        return x + nn.functional.dropout(self.second(hidden), 0.2, self.training)


class Net(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)
        self.run = partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.1, self.training)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_draws_of_a_checkpointed_block_repeat_those_of_its_first_run(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model, batch = Net(use_reentrant=use_reentrant), torch.randn(4, 8, requires_grad=use_reentrant)
    _, program = capture_program(model, batch)
    assert not program.unseen
    assert len(program.repeats) == 6
    assert all(program.calls[op].draws for op in (*program.repeats, *program.repeats.values()))
    ours, plain = model, copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (ours, plain))
    train = hocket.prepare(ours, optimizer, batch)
    assert not train.lost
    torch.manual_seed(1)
    losses = [train.step(batch).item() for _ in range(3)]
    torch.manual_seed(1)
    for expected in losses:
        loss = plain(batch)
        loss.backward()
        other.step()
        other.zero_grad()
        assert loss.item() == expected


def test_a_step_that_seeds_the_generator_is_not_traced() -> None:
    class Seeded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return nn.functional.dropout(super().forward(x), 0.5, self.training).mean()

    _, program = capture_program(Seeded(4, 4), torch.randn(2, 4))
    assert "sets PyTorch's generator" in program.unseen
