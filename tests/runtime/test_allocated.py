"""What is counted and rehearsed under a dispatch mode is what the allocator gives without one."""

import copy

import pytest
import torch
from runtime.budget_loops import CPU, loop_of, task_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw
from torch import nn
from torch.nn import functional

from hocket.plan.sections import Memory
from hocket.runtime.offload.dry_run import dry_run_peak_bytes
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.trace_options import TraceOptions

NUM_BYTES = 40_000
WAYS = {
    "plain": {},
    "recomputed": {"activations": "recomputed"},
    "on the host": {"activations": "recomputed", "checkpoint": "offloaded",
                    "parameters": "streamed", "update": "host"},
    "visiting": {"activations": "offloaded", "parameters": "streamed", "update": "device"},
}  # fmt: skip


class Told(torch.autograd.Function):
    """A sum whose gradient is a tensor of its own, which somebody is told."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.told, ctx.shape = told, x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, given):
        made = torch.ones(ctx.shape)
        ctx.told(made)
        return made, None


class AddedUp(torch.autograd.Function):
    """Adds up gradients itself, a given one among them where there are two."""

    @staticmethod
    def forward(ctx, x, is_given):
        ctx.is_given = is_given
        return x * 1

    @staticmethod
    def backward(ctx, given):
        return (given if ctx.is_given else torch.ones_like(given)) + torch.ones_like(given), None


def told(keep):
    """Two such sums of one tensor; what is kept of the gradients is seen by the engine."""
    kept = []

    def loss_of(x):
        kept.clear()
        note = lambda made: kept.append(keep(made))  # noqa: E731
        return Told.apply(x, note) + Told.apply(x, note)

    return loss_of


def hooked(x):
    y = x * 1
    y.register_hook(lambda gradient: None)
    return (y + y.sin()).square().sum()


LOSSES = {
    "two products": lambda x: (x * 2).sum() + (x * 3).sum(),
    "three products": lambda x: (x * 2).sum() + (x * 3).sum() + (x * 4).sum(),
    "a square": lambda x: (x * x).sum(),
    "twice the same": lambda x: (x + x).square().sum(),
    "views": lambda x: (x.view(10, -1) * 2).sum() + (x.view(10, -1) * 3).sum(),
    "one number everywhere": lambda x: x.sum() + x.sum(),
    "a shortcut": lambda x: ((y := x * 1) + y.sin()).square().sum(),
    "a shortcut of one number": lambda x: ((y := x * 1) + y.sin()).sum(),
    "a shortcut with a hook": hooked,
    "nobody looks": told(lambda made: None),
    "a kept gradient": told(lambda made: made),
    "a kept view": told(lambda made: made[1:]),
    "a kept storage": told(lambda made: made.untyped_storage()),
    "a function's own sum": lambda x: AddedUp.apply(x, False).square().sum(),
    "a function's sum with what it got": lambda x: AddedUp.apply(x, True).square().sum(),
    "a formula's own sum": lambda x: torch.cosine_similarity(x, x.flip(0), dim=0),
    "a cell": lambda x: _cell(x.view(4, -1)),
}


def _cell(x):
    weights = torch.full((4 * x.shape[1], x.shape[1]), 0.1)
    state = torch.lstm_cell(x, (x, x), weights, weights)
    return (state[0] * state[1]).sum()


def counted(loss_of):
    x = torch.zeros(NUM_BYTES // 4, requires_grad=True)
    tracker = MemoryTracker()
    with tracker:
        tracker.track([x])
        loss_of(x).backward()
    return tracker.peak_bytes


def really(allocations, loss_of):
    x = torch.zeros(NUM_BYTES // 4, requires_grad=True)
    noted = allocations(lambda: loss_of(x).backward(), CPU, [x])
    return noted.peak(with_temporaries=False).held_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_a_backward_pass_holds_what_is_counted(allocations, name):
    assert counted(LOSSES[name]) == really(allocations, LOSSES[name])


def test_gradients_are_added_up_in_place_unless_somebody_else_looks_at_them(allocations):
    alone, looked_at = (counted(LOSSES[name]) for name in ("nobody looks", "a kept gradient"))
    assert looked_at - alone == NUM_BYTES


class WideWords(nn.Module):
    """Few narrow layers beside a large embedding, which is the last layer as well."""

    def __init__(self, num_words=300):
        super().__init__()
        self.embed = nn.Embedding(num_words, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, num_words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, labels):
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x)
        return functional.cross_entropy(scores.view(-1, scores.shape[-1]), labels.view(-1))


def wide_words():
    return WideWords(), [tuple(torch.randint(300, (2, 2, 6)))], None


def rehearsed_and_allocated(allocations, build, section_of):
    torch.manual_seed(0)
    model, batches, forward = build()
    section, batch = section_of(model), batches[0]
    optimizer = adamw(model)
    recipe = TraceOptions(update=planned_update(optimizer, model), device="cpu", forward=forward)
    rehearsed = dry_run_peak_bytes(task_of(model, optimizer, batch, recipe), section)
    model = copy.deepcopy(model)
    train = loop_of(model, adamw(model), section, batch, forward)

    def steps():
        for _ in range(3):
            train.step(batch).item()
        train.state_dict()

    noted = allocations(steps, CPU, [*train._strategy.lasting, *batch])
    return rehearsed, noted.peak(with_temporaries=False), len(list(model.parameters()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*MODELS, "wide"])
def test_steps_hold_what_was_rehearsed(allocations, name, way):
    build = MODELS.get(name, wide_words)
    rehearsed, peak, num_parameters = rehearsed_and_allocated(
        allocations, build, lambda model: uniform(model, 0, **WAYS[way])
    )
    # Counters of steps, four bytes each, are foreseen where a kernel wants them on the device.
    assert 0 <= peak.held_bytes - rehearsed <= 4 * num_parameters


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_the_sum_of_a_shared_embedding_is_foreseen_as_it_is_made(allocations, num_chunks):
    """In place where the loss is in chunks; the plain layer's gradient is a view, which is not."""

    def section_of(model):
        blocks = uniform(model, 0, **WAYS["on the host"]).blocks
        return Memory(budget_bytes=(0,), blocks=blocks, loss_chunks=num_chunks)

    rehearsed, peak, _ = rehearsed_and_allocated(allocations, wide_words, section_of)
    assert peak.held_bytes == rehearsed
    assert (peak.op == "aten::add") == (num_chunks == 1)
