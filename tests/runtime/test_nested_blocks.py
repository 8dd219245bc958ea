"""Blocks of models whose layers lie in lists of lists, U-Nets and models without numbers."""

import copy

import numpy as np
import pytest
import torch
from planners.memory.steps import placed
from runtime.train_loops import adamw, plain_steps
from torch import nn
from torch.nn import functional

import hocket
from hocket.planners.memory.blocks import cut_step
from hocket.planners.memory.maker import FULL_RECOMPUTE, PLAIN, PlanMaker
from hocket.simulate import simulate


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(1, width), nn.Conv2d(width, width, 3, padding=1)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(self.mix(x)))))


class Stages(nn.Module):
    """Lists of lists, as in ConvNeXt and Swin."""

    def __init__(self, depths=(2, 6, 2), widths=(8, 16, 32)):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        stages, before = [], widths[0]
        for depth, width in zip(depths, widths, strict=True):
            stage = nn.Module()
            stage.shrink = nn.Conv2d(before, width, 2, stride=2)
            stage.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
            stages.append(stage)
            before = width
        self.stages, self.head = nn.ModuleList(stages), nn.Linear(widths[-1], 10)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage.blocks(stage.shrink(x))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Blocks in lists of lists on the way down and up, and skips between them."""

    def __init__(self, widths=(8, 16)):
        super().__init__()
        self.enter = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        for width in widths:
            down, up = nn.Module(), nn.Module()
            down.resnets = nn.ModuleList(Residual(width) for _ in range(4))
            down.shrink = nn.Conv2d(width, 2 * width, 2, stride=2)
            up.grow = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
            up.resnets = nn.ModuleList(Residual(width) for _ in range(4))
            self.down_blocks.append(down)
            self.up_blocks.insert(0, up)
        self.leave = nn.Conv2d(widths[0], 10, 1)

    def forward(self, x):
        x, skips = self.enter(x), []
        for down in self.down_blocks:
            for resnet in down.resnets:
                x = resnet(x)
            skips.append(x)
            x = down.shrink(x)
        for up in self.up_blocks:
            x = up.grow(x) + skips.pop()
            for resnet in up.resnets:
                x = resnet(x)
        return self.leave(x).mean((2, 3))


class Named(nn.Module):
    """Layers that have names and no numbers, in modules of modules."""

    def __init__(self, width=8):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        for part in ("early", "late"):
            stage = nn.Module()
            for layer in ("one", "two", "three", "four"):
                stage.add_module(layer, Residual(width))
            self.add_module(part, stage)
        self.leave = nn.Linear(width, 10)

    def forward(self, x):
        x = self.enter(x)
        for stage in (self.early, self.late):
            for layer in stage.children():
                x = layer(x)
        return self.leave(x.mean((2, 3)))


def sequence_of_sequences():
    body = nn.Sequential(*(Residual(8) for _ in range(8)))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 10))  # fmt: skip


MODELS = {
    "lists of lists": (Stages, 0.5),
    "sequential of sequential": (sequence_of_sequences, 0.45),
    "U-Net": (UNet, 0.5),
    "names without numbers": (Named, 0.45),
}
"""With the part of the plain peak that full recompute keeps at least."""


def made(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name][0]()


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def batches(count=3, size=16):
    torch.manual_seed(1)
    return [(torch.randn(4, 3, size, size), torch.randint(10, (4,))) for _ in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_no_block_is_a_whole_stage(name):
    graph = hocket.capture(made(name), batches(1, 64)[0], forward=loss_of)
    maker = PlanMaker(*placed(graph), float("inf"))
    plans = {plan.name: plan for plan in maker.usual()}
    part = plans[FULL_RECOMPUTE].peak_bytes / plans[PLAIN].peak_bytes
    assert part < MODELS[name][1]


def test_flat_lists_stay_as_they_are():
    graph = hocket.capture(
        nn.Sequential(*(Residual(8) for _ in range(8))), torch.randn(2, 8, 16, 16)
    )
    assert cut_step(graph).names[:8] == tuple(str(number) for number in range(8))


def test_a_list_whose_members_take_turns_is_not_cut():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Residual(8), Residual(8)])

        def forward(self, x):
            for number in (0, 1, 0, 1):
                x = self.parts[number](x)
            return x

    model = nn.Sequential(nn.Conv2d(3, 8, 1), Turns(), nn.Conv2d(8, 3, 1))
    blocks = cut_step(hocket.capture(model, torch.randn(2, 3, 16, 16)))
    assert blocks.names == ("0", "1", "2")
    assert np.all(np.diff(blocks.start) > 0)


@pytest.mark.parametrize("name", ["lists of lists", "U-Net"])
def test_training_within_half_of_the_memory_gives_the_same_losses(name):
    model, given = made(name), batches()
    plain = copy.deepcopy(model)
    graph = hocket.capture(model, given[0], forward=loss_of, device="cpu")
    most = simulate(*placed(graph)).peak_bytes.max()
    train = hocket.prepare(
        model, adamw(model), given[0], forward=loss_of, memory=int(0.5 * most), on="1xh200"
    )
    assert train.memory.peak_bytes <= 0.5 * most
    ours = [train.step(batch).item() for batch in given]
    assert ours == plain_steps(plain, adamw(plain), given, forward=loss_of)
