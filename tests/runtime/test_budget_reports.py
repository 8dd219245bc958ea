"""Reports about a model within a budget, and memory that is held between its steps."""

import copy
import warnings

import pytest
import torch
from runtime.budget_models import classified
from runtime.train_loops import plain_steps
from torch import nn
from torch.utils._pytree import tree_leaves

import hocket
from hocket.base.errors import UsageError
from hocket.capture.model import CaptureWarning
from hocket.runtime.offload.budgeted_model import BudgetExceededWarning
from hocket.runtime.offload.memory_tracker import MemoryTracker

BATCH = (torch.randn(16, 8), torch.randint(4, (16,)))


def net():
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


class LooksAtNumbers(nn.Module):
    """What it does depends on what it computes."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, x):
        found = self.inner(x)
        return (found * 2 if found.sum().item() > 1e9 else found).square().mean()


def prepared(model, batch, memory, **options):
    return hocket.prepare(
        model, torch.optim.AdamW(model.parameters()), batch, memory=memory, **options
    )


def test_a_model_without_a_loss_is_told_of_within_a_budget_too():
    with pytest.warns(CaptureWarning, match="returns no loss, so this would minimise the mean"):
        train = prepared(net(), BATCH[0], "1MiB")
    assert train.memory.peak_bytes <= 2**20


def test_a_batch_that_the_model_does_not_take_is_refused_at_once():
    with pytest.raises(UsageError, match="Sequential cannot be called with this batch"):
        prepared(net(), BATCH, "1MiB")
    with pytest.raises(UsageError, match="cannot be called with this batch: got an unexpected"):
        prepared(LooksAtNumbers(), {"x": BATCH[0], "y": BATCH[1]}, "1MiB")


@pytest.mark.parametrize(("memory", "is_told"), [("1KiB", True), ("1MiB", False)])
def test_steps_that_could_not_be_rehearsed_are_counted(memory, is_told):
    with pytest.warns(CaptureWarning, match="cannot be traced"):
        train = prepared(LooksAtNumbers(), BATCH[0], memory)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            train.step(BATCH[0])
    found = [each for each in told if each.category is BudgetExceededWarning]
    assert len(found) == is_told
    for each in found:
        assert each.filename == __file__
        assert "the budget is 1.0 KiB" in str(each.message)


def test_what_an_evaluation_returned_is_not_held_beside_the_next_step():
    wide = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    train = prepared(wide, BATCH, "1MiB", forward=lambda m, b: {"loss": classified(m, b),
                                                                "all": m(b[0])})  # fmt: skip
    train.step(BATCH)
    peaks = []
    for _ in range(2):
        tracker = MemoryTracker()
        with tracker:
            tracker.track([*train._strategy.lasting, *BATCH])
            tracker.track(leaf for leaf in tree_leaves(train.outputs) if torch.is_tensor(leaf))
            train.step(BATCH)
        peaks.append(tracker.peak_bytes)
        many = tuple(torch.cat([part] * 64) for part in BATCH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            train.evaluate(many)
        assert train.outputs is not None
    assert peaks[1] - peaks[0] < many[0].nbytes


def test_an_optimizer_that_looks_at_numbers_updates_on_the_host():
    plain = net()
    model = copy.deepcopy(plain)
    theirs, ours = (torch.optim.Adafactor(each.parameters(), lr=0.01) for each in (plain, model))
    train = hocket.prepare(model, ours, BATCH, memory="1MiB", forward=classified)
    assert all(block.update == "host" for block in train.memory.section.blocks)
    ours = [train.step(BATCH).item() for _ in range(3)]
    assert ours == plain_steps(plain, theirs, [BATCH] * 3, forward=classified)


class WithToken(nn.Module):
    """Its own code reads a parameter that no layer has."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 8))
        self.layers = net()

    def forward(self, x):
        return self.layers(torch.cat([x, self.token.expand(len(x), -1)]))[: len(x)]


def test_parameters_of_no_layer_are_updated_on_the_host_with_all_others():
    """One that stayed on the device had optimizers that look at numbers refused at any budget."""
    plain = WithToken()
    model = copy.deepcopy(plain)
    theirs, ours = (torch.optim.Adafactor(each.parameters(), lr=0.01) for each in (plain, model))
    train = hocket.prepare(model, ours, BATCH, memory="1MiB", forward=classified)
    ours = [train.step(BATCH).item() for _ in range(3)]
    assert ours == plain_steps(plain, theirs, [BATCH] * 3, forward=classified)
    train.state_dict()
    assert torch.equal(model.token, plain.token)
