"""Buffers of the host and of the device are taken in turns: steps that go on take no more."""

import pytest
import torch
from runtime.budget_loops import CPU, loop_of
from runtime.budget_models import MODELS
from runtime.train_loops import adamw
from torch import nn

from hocket.capture import CaptureWarning
from hocket.plan.sections import MemoryBlock
from hocket.runtime.offload.copy_streams import CopyStreams
from hocket.runtime.offload.model_blocks import uniform
from hocket.runtime.offload.parameter_blocks import Block
from hocket.runtime.offload.prefetch import StagingBuffers

STREAMED = {"activations": "offloaded", "parameters": "streamed", "update": "host"}


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_norm": 1.0, "accumulate": 2}])
def test_gradients_land_where_earlier_ones_have_landed(options):
    model, batches, forward = MODELS["blocks"]()
    section = uniform(model, 0, **{**STREAMED, "activations": "kept"})
    train = loop_of(model, adamw(model), section, batches[0], forward, **options)
    for _ in range(12):
        train.step(batches[0])
    train.state_dict()
    # Those that are there and those that come on top of them.
    master_bytes = sum(b.master.numel() for b in train._strategy.blocks if b.master is not None)
    assert 0 < train._strategy._pool.num_bytes <= 2 * master_bytes


def test_a_block_comes_to_the_buffer_that_was_used_longest_ago():
    """The other one has what is needed next."""
    policy = MemoryBlock(name="", parameters="streamed", update="host")
    first, second, third = (Block(policy, at, {}) for at in range(3))
    for block in (first, second, third):
        block.parameters = [nn.Parameter(torch.full((4,), float(block.index)))]
        block.move_to_host({}, pinned=False)
    buffers = StagingBuffers(CopyStreams(CPU, is_real=False), first.fetched_bytes, 2)
    buffers.fetch(first, set())
    buffers.fetch(second, set())
    buffers.fetch(first, set())
    buffers.fetch(third, set())
    assert buffers.find(second) is None
    buffers.fetch(second, {first})
    assert buffers.find(third) is None
    for block in (first, second):
        staging = buffers.find(block)
        assert staging.buffer[:16].view(torch.float32).tolist() == 4 * [block.index]


class _Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.is_turned = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), False

    def forward(self, x):
        for layer in reversed(self.layers) if self.is_turned else self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_step_that_goes_another_way_says_so_once():
    model, batch = _Turning(), torch.randn(4, 8)
    train = loop_of(model, adamw(model), uniform(model, 0, **STREAMED), batch)
    train.step(batch)
    train.step(batch)
    assert not train.lost
    model.is_turned = True
    with pytest.warns(CaptureWarning, match="in the same order"):
        train.step(batch)
    assert "in the same order" in train.lost
    model.is_turned = False
    train.step(batch)
