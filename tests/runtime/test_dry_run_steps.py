"""Steps hold the bytes that their dry run counted, whatever else is on the device."""

import pytest
import torch
from runtime.budget_loops import loop_of, task_of
from runtime.budget_models import WIDTH, Chain, Layer, classified
from torch import nn
from torch.nn.utils import spectral_norm

import hocket
from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.dry_run import dry_run_peak_bytes
from hocket.runtime.offload.memory_tracker import MemoryTracker
from hocket.runtime.offload.model_blocks import block_names, uniform
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.trace_options import TraceOptions

BATCH = torch.randn(32, 8), torch.randint(3, (32,))
OFFLOADED = {"activations": "offloaded", "parameters": "streamed", "update": "host"}


def rehearsed(model, optimizer, section, *, clip_norm=None, accumulate=1):
    recipe = TraceOptions(update=planned_update(optimizer, model), device="cpu", forward=classified)
    return dry_run_peak_bytes(
        task_of(model, optimizer, BATCH, recipe, clip_norm=clip_norm, accumulate=accumulate),
        section,
    )  # fmt: skip


def counted(train, optimizer, held=(), num_steps=6):
    """The most that steps of a loop hold that keeps its last loss."""
    blocks = train._strategy.blocks
    here = [p for block in blocks if block.master is None for p in block.parameters]
    states = [value for p in here for value in optimizer.state.get(p, {}).values()]
    tracker = MemoryTracker()
    with tracker:
        tracker.track([*train._strategy.lasting, *BATCH, *held, *(s for s in states if s.dim())])
        loss = None
        for _ in range(num_steps):
            loss = train.step(BATCH)
        train.state_dict()
    assert loss is not None
    return tracker.peak_bytes


def both(model, policy, *, held=(), **options):
    """Rehearsed and counted bytes."""
    optimizer, section = torch.optim.AdamW(model.parameters()), uniform(model, 0, **policy)
    before = rehearsed(model, optimizer, section, **options)
    train = loop_of(model, optimizer, section, BATCH, classified, **options)
    return before, counted(train, optimizer, held)


def test_states_of_an_optimizer_that_made_steps_before_are_within_the_budget():
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    fresh = hocket.prepare(model, optimizer, BATCH, on="1xh200", memory="1GiB", forward=classified)
    plain_bytes = fresh.memory.peak_bytes
    fresh.step(BATCH)
    fresh.state_dict()
    budget_bytes = plain_bytes - 1024
    train = hocket.prepare(
        model, optimizer, BATCH, on="1xh200", memory=budget_bytes, forward=classified
    )
    assert counted(train, optimizer) <= train.memory.peak_bytes <= budget_bytes
    again = hocket.prepare(model, optimizer, BATCH, on="1xh200", memory="1GiB", forward=classified)
    assert again.memory.peak_bytes == plain_bytes


class _Spectral(Chain):
    """Weights are made of others by hooks, and stay as attributes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x):
        y = self.enter(x)
        for layer in self.layers:
            y = layer(y)
        return self.leave(y)


def test_a_first_step_that_sends_all_is_rehearsed_too():
    model = _Spectral()
    optimizer = torch.optim.AdamW(model.parameters())
    policies = {"layers.2": {"activations": "offloaded", "share": 0.1}}
    blocks = tuple(
        MemoryBlock(name=name, update="host", **policies.get(name, {}))
        for name in block_names(model)
    )
    section = Memory(budget_bytes=(0,), blocks=blocks)
    before = rehearsed(model, optimizer, section)
    train = loop_of(model, optimizer, section, BATCH, classified)
    made = (layer[0].weight for layer in model.layers)
    assert counted(train, optimizer, made) == before


@pytest.mark.parametrize(("clip_norm", "accumulate"), [(1.0, 1), (None, 2), (1.0, 3)])
def test_gradients_that_are_gathered_and_clipped_are_rehearsed(clip_norm, accumulate):
    before, held = both(Chain(), {}, clip_norm=clip_norm, accumulate=accumulate)
    assert before - 256 <= held <= before


class _Keeping(Chain):
    """Keeps something of each step until the next one makes its own."""

    def forward(self, x):
        result = super().forward(x)
        self.seen = result.detach().repeat(1, 200)
        return result


class _Masked(Layer):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.mask = torch.rand(500, WIDTH)

    def forward(self, x, scale=None):
        return super().forward(x, scale) * self.mask[:32]


def test_what_a_model_keeps_of_a_step_is_rehearsed_with_the_next_one():
    before, held = both(_Keeping(), OFFLOADED)
    assert held == before


def test_plain_attributes_of_a_model_are_counted():
    model = Chain()
    model.layers = nn.ModuleList(_Masked() for _ in range(3))
    masks = [layer.mask for layer in model.layers]
    before, held = both(model, OFFLOADED, held=masks)
    assert held == before > sum(mask.nbytes for mask in masks)
