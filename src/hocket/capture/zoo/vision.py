"""Convolutional networks in plain torch: residual networks of any depth, Inception v3."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hocket.base.errors import UsageError
from hocket.capture.zoo.language import Built

_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class Classifier(nn.Module):
    """A network whose loss is the cross-entropy of its class scores."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        return functional.cross_entropy(self.network(images), labels)


def _image_batch(batch: int, size: int, classes: int = 1000) -> dict[str, torch.Tensor]:
    return {
        "images": torch.randn(batch, 3, size, size),
        "labels": torch.randint(classes, (batch,)),
    }


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, channels_in: int, width: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        kept = x if self.shortcut is None else self.shortcut(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += kept
        output: torch.Tensor = self.relu(y)
        return output


def _stage_sizes(depth: int) -> tuple[int, int, int, int]:
    """Blocks per stage; depths beyond 152 grow in the third stage, as 101 and 152 do."""
    if depth in _STAGES:
        return _STAGES[depth]
    blocks, rest = divmod(depth - 2, 3)
    if rest or depth < 152:
        raise UsageError(
            f"there is no residual network with {depth} layers",
            hint="use 50, 101, 152 or a larger depth of the form 3 n + 2, such as 1001",
        )
    return 3, 8, blocks - 14, 3


def resnet(depth: int, batch: int, *, width_factor: int = 1, size: int = 224) -> Built:
    """A residual network with bottleneck blocks, for images of ``size`` x ``size``."""
    network = nn.Sequential()
    network.add_module("stem", nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ))  # fmt: skip
    channels = 64
    for stage, blocks in enumerate(_stage_sizes(depth)):
        base = 64 * 2**stage
        layers = []
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, base * width_factor, 4 * base, stride))
            channels = 4 * base
        network.add_module(f"stage{stage + 1}", nn.Sequential(*layers))
    network.add_module("head", nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000),
    ))  # fmt: skip
    return Classifier(network), _image_batch(batch, size)


def wide_resnet(batch: int, seq: int) -> Built:
    """A residual network of 101 layers, twice as wide inside its blocks."""
    return resnet(101, batch, width_factor=2)


# ── Inception v3 ─────────────────────────────────────────────────────────────────────────────────


def _conv(
    channels_in: int, channels_out: int, kernel: int | tuple[int, int], stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> nn.Sequential:  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(channels_out, eps=0.001),
        nn.ReLU(inplace=True),
    )


class Branches(nn.Module):
    """Parallel branches over one input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenated output of all branches."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def _pooled(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels_in, channels_out, 1))


def _block_a(channels: int, pool: int) -> Branches:
    return Branches(
        _conv(channels, 64, 1),
        nn.Sequential(_conv(channels, 48, 1), _conv(48, 64, 5, padding=2)),
        nn.Sequential(_conv(channels, 64, 1), _conv(64, 96, 3, padding=1),
                      _conv(96, 96, 3, padding=1)),
        _pooled(channels, pool),
    )  # fmt: skip


def _block_b(channels: int) -> Branches:
    return Branches(
        _conv(channels, 384, 3, 2),
        nn.Sequential(_conv(channels, 64, 1), _conv(64, 96, 3, padding=1), _conv(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def _seven(widths: list[int], first_is_row: bool) -> list[nn.Sequential]:
    """Alternating 1x7 and 7x1 convolutions."""
    layers = []
    for index, (channels_in, channels_out) in enumerate(pairwise(widths)):
        row = (index % 2 == 0) == first_is_row
        kernel, padding = ((1, 7), (0, 3)) if row else ((7, 1), (3, 0))
        layers.append(_conv(channels_in, channels_out, kernel, padding=padding))
    return layers


def _block_c(channels: int, width: int) -> Branches:
    return Branches(
        _conv(channels, 192, 1),
        nn.Sequential(_conv(channels, width, 1), *_seven([width, width, 192], True)),
        nn.Sequential(_conv(channels, width, 1), *_seven([width] * 4 + [192], False)),
        _pooled(channels, 192),
    )


def _block_d(channels: int) -> Branches:
    return Branches(
        nn.Sequential(_conv(channels, 192, 1), _conv(192, 320, 3, 2)),
        nn.Sequential(_conv(channels, 192, 1), *_seven([192, 192, 192], True),
                      _conv(192, 192, 3, 2)),
        nn.MaxPool2d(3, 2),
    )  # fmt: skip


def _fork(channels: int) -> Branches:
    return Branches(
        _conv(channels, 384, (1, 3), padding=(0, 1)), _conv(channels, 384, (3, 1), padding=(1, 0))
    )


def _block_e(channels: int) -> Branches:
    return Branches(
        _conv(channels, 320, 1),
        nn.Sequential(_conv(channels, 384, 1), _fork(384)),
        nn.Sequential(_conv(channels, 448, 1), _conv(448, 384, 3, padding=1), _fork(384)),
        _pooled(channels, 192),
    )


class InceptionV3(nn.Module):
    """Inception v3 for 299 x 299 images; its loss includes the auxiliary classifier's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 32, 3, 2), _conv(32, 32, 3), _conv(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2), _conv(64, 80, 1), _conv(80, 192, 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.middle = nn.Sequential(
            _block_a(192, 32), _block_a(256, 64), _block_a(288, 64), _block_b(288),
            _block_c(768, 128), _block_c(768, 160), _block_c(768, 160), _block_c(768, 192),
        )  # fmt: skip
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, 3), _conv(768, 128, 1), _conv(128, 768, 5), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(768, 1000),
        )  # fmt: skip
        self.top = nn.Sequential(
            _block_d(768), _block_e(1280), _block_e(2048), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Dropout(), nn.Linear(2048, 1000),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        x = self.middle(self.stem(images))
        loss = functional.cross_entropy(self.top(x), labels)
        return loss + 0.4 * functional.cross_entropy(self.auxiliary(x), labels)


def inception_v3(batch: int, seq: int) -> Built:
    """Inception v3 with its auxiliary classifier."""
    return InceptionV3(), _image_batch(batch, 299)
