"""A U-Net of the kind that diffusion models train, for ``predict_configs.py``.

Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020: blocks of two convolutions with
group norms, a time embedding added between them, attention at the two coarsest sizes, and skips
from the way down to the way up.
"""

from __future__ import annotations

import torch
from torch import nn

WIDTHS = (128, 256, 256, 512)
_GROUPS, _HEAD = 32, 64


class _Block(nn.Module):
    def __init__(self, before: int, after: int, attends: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(_GROUPS, before), nn.GroupNorm(_GROUPS, after)])
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(4 * WIDTHS[0], after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.attention = _Attention(after) if attends else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        changed = self.first(nn.functional.silu(self.norms[0](x)))
        changed = changed + self.time(nn.functional.silu(time))[:, :, None, None]
        changed = self.second(nn.functional.silu(self.norms[1](changed)))
        result: torch.Tensor = self.attention(self.skip(x) + changed)
        return result


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width, rows, columns = x.shape
        flat = self.norm(x).flatten(2).transpose(1, 2)
        parts = self.project(flat).view(batch, rows * columns, 3, width // _HEAD, _HEAD)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, rows * columns, width))
        return x + mixed.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """Predicts the noise of noisy images."""

    def __init__(self) -> None:
        super().__init__()
        hidden = 4 * WIDTHS[0]
        self.time = nn.Sequential(
            nn.Linear(WIDTHS[0], hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )
        self.enter = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        down, up, pools, grows, before = [], [], [], [], WIDTHS[0]
        for level, width in enumerate(WIDTHS):
            down += [_Block(before, width, level > 1), _Block(width, width, level > 1)]
            pools.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
            before = width
        self.middle = _Block(before, before, attends=True)
        for level, width in reversed(list(enumerate(WIDTHS))):
            grows.append(nn.ConvTranspose2d(before, width, 4, stride=2, padding=1))
            up += [_Block(2 * width, width, level > 1), _Block(2 * width, width, level > 1)]
            before = width
        self.down, self.up = nn.ModuleList(down), nn.ModuleList(up)
        self.pools, self.grows = nn.ModuleList(pools), nn.ModuleList(grows)
        self.leave = nn.Conv2d(before, 3, 3, padding=1)

    def forward(
        self, images: torch.Tensor, phases: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """The mean squared error of the predicted noise."""
        time, x, skips = self.time(phases), self.enter(images), []
        for level, pool in enumerate(self.pools):
            for block in self.down[2 * level : 2 * level + 2]:
                x = block(x, time)
                skips.append(x)
            x = pool(x)
        x = self.middle(x, time)
        for level, grow in enumerate(self.grows):
            x = grow(x)
            for block in self.up[2 * level : 2 * level + 2]:
                x = block(torch.cat([x, skips.pop()], dim=1), time)
        return nn.functional.mse_loss(self.leave(x), noise)


def unet(
    batch: int = 16, seq: int = 64, dtype: str = "float32"
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The network and a batch of ``seq`` x ``seq`` images; phases are sines of the time steps."""
    number = getattr(torch, dtype)
    images = torch.randn(batch, 3, seq, seq, dtype=number)
    phases = torch.randn(batch, WIDTHS[0], dtype=number)
    return UNet().to(number), {"images": images, "phases": phases, "noise": images.clone()}
