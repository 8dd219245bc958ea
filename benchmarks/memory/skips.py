"""A U-Net for `hocket fit`: what its levels make on the way down is read again on the way up.

.venv/bin/hocket fit benchmarks/memory/skips.py:net --on 1xh200 --memory 1.49GiB
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 128, 256, 512)
BATCH = (8, 3, 256, 256)


def _pair(before: int, width: int) -> nn.Sequential:
    """Two convolutions with norms."""
    layers: list[nn.Module] = []
    for channels in (before, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels; the mean square of what it makes is the loss."""

    def __init__(self) -> None:
        """Layers of the way down and up."""
        super().__init__()
        befores = (BATCH[1], *WIDTHS[:-1])
        self.down = nn.ModuleList(_pair(b, w) for b, w in zip(befores, WIDTHS, strict=True))
        ups = list(zip(WIDTHS[1:], WIDTHS[:-1], strict=True))[::-1]
        self.up = nn.ModuleList(_pair(below + width, width) for below, width in ups)
        self.out = nn.Conv2d(WIDTHS[0], 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        """The loss."""
        skips, now = list[Tensor](), images
        for level, layer in enumerate(self.down):
            now = layer(functional.max_pool2d(now, 2) if level else now)
            skips.append(now)
        for layer, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            now = layer(torch.cat([skip, functional.interpolate(now, scale_factor=2.0)], 1))
        return self.out(now).square().mean()


def net() -> tuple[nn.Module, tuple[Tensor]]:
    """The model and a batch."""
    return UNet(), (torch.zeros(BATCH),)
