"""Python's search for cycles rests while a step runs, and then goes on as before."""

import gc

import pytest
import torch
from runtime.budget_loops import loop_of, task_of
from runtime.train_loops import adamw
from torch import nn

import hocket
from hocket.runtime.offload.dry_run import dry_run_peak_bytes
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.trace_options import TraceOptions


class Noting(nn.Linear):
    """Notes in each call whether cycles are searched for; fails on demand."""

    def __init__(self):
        super().__init__(4, 1)
        self.seen, self.fails = [], False

    def forward(self, x):
        self.seen.append(gc.isenabled())
        if self.fails:
            raise ValueError("no")
        return super().forward(x).square().mean()


@pytest.fixture
def training():
    model, batch = Noting(), torch.randn(2, 4)
    train = hocket.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batch, memory="1MiB")
    train.step(batch)
    del model.seen[:]
    yield model, train, batch
    gc.enable()


@pytest.mark.parametrize("wanted", [True, False])
def test_no_search_inside_a_step_and_what_was_wanted_after_it(training, wanted):
    model, train, batch = training
    (gc.enable if wanted else gc.disable)()
    train.step(batch)
    assert model.seen == [False]
    assert gc.isenabled() == wanted


def test_a_step_that_fails_leaves_the_search_on(training):
    model, train, batch = training
    model.fails = True
    with pytest.raises(ValueError, match="no"):
        train.step(batch)
    assert model.seen == [False]
    assert gc.isenabled()


class Folding(nn.Module):
    """Holds what is large in a cycle: a function that calls itself, and looks at it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        wide = self.up(x).relu()

        def folded(depth):
            return wide if depth == 0 else folded(depth - 1) * 0.5

        return x + self.down(folded(2))


@pytest.mark.parametrize("activations", ["kept", "offloaded", "recomputed"])
def test_what_a_model_leaves_in_cycles_is_rehearsed_and_gone_with_the_step(activations):
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Folding() for _ in range(6))), torch.randn(64, 8)

    def forward(net, x):
        return net(x).square().mean()

    optimizer, section = adamw(model), uniform(model, 0, activations=activations)
    recipe = TraceOptions(update=planned_update(optimizer, model), device="cpu", forward=forward)
    rehearsed = dry_run_peak_bytes(task_of(model, optimizer, batch, recipe), section)
    gc.collect()
    with MemoryTracker() as tracker:
        train = loop_of(model, optimizer, section, batch, forward)
        tracker.track([*train._strategy.lasting, batch])
        for _ in range(3):
            train.step(batch)
    assert tracker.peak_bytes == rehearsed
