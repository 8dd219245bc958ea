"""The U-Net of Stable Diffusion XL in plain torch (Podell et al. 2023, arXiv:2307.01952)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from hocket.capture.zoo.language import Built

_TIME, _CONTEXT, _LATENT, _HEAD = 1280, 2048, 4, 64


class Residual(nn.Module):
    """Two convolutions around the embedding of the time step."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, after), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The block's result at one time step."""
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        result: torch.Tensor = hidden + self.shortcut(x)
        return result


class Attention(nn.Module):
    """Attention over pixels or over the words of a prompt."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context, width, bias=False)
        self.value = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Attention of each pixel to the context."""
        parts = (self.query(x), self.key(context), self.value(context))
        heads = [part.unflatten(2, (-1, _HEAD)).transpose(1, 2) for part in parts]
        mixed = functional.scaled_dot_product_attention(*heads)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention over pixels, over words, and a gated MLP."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.own, self.words = Attention(width, width), Attention(width, context)
        self.widen, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The pixels after one layer."""
        given = self.norm1(x)
        x = x + self.own(given, given)
        x = x + self.words(self.norm2(x), context)
        wide, gate = self.widen(self.norm3(x)).chunk(2, dim=-1)
        result: torch.Tensor = x + self.narrow(wide * functional.gelu(gate))
        return result


class Mixer(nn.Module):
    """Blocks over the pixels of one level; none where ``depth`` is 0."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, context) for _ in range(depth))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Output after all attention blocks of the level."""
        pixels = self.before(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            pixels = block(pixels, context)
        mixed = self.after(pixels).transpose(1, 2).reshape(x.shape)
        result: torch.Tensor = x + mixed
        return result


class Level(nn.Module):
    """A residual block followed by attention blocks."""

    def __init__(self, before: int, width: int, depth: int, time: int, context: int) -> None:
        super().__init__()
        self.residual = Residual(before, width, time)
        self.mixer = Mixer(width, depth, context) if depth else None

    def forward(self, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The level's pixels at one time step."""
        hidden: torch.Tensor = self.residual(x, time)
        return hidden if self.mixer is None else self.mixer(hidden, context)


class UNet(nn.Module):
    """Predicts the noise of latents; the loss is its mean squared error."""

    def __init__(
        self, widths: Sequence[int] = (320, 640, 1280), depths: Sequence[int] = (0, 2, 10),
        time: int = _TIME, context: int = _CONTEXT,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first = nn.Conv2d(_LATENT, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, width = [widths[0]], widths[0]
        for level, (wide, depth) in enumerate(zip(widths, depths, strict=True)):
            for _ in range(2):
                self.down.append(Level(width, wide, depth, time, context))
                width = wide
                skips.append(width)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = Level(width, width, depths[-1], time, context)
        self.last_middle = Residual(width, width, time)
        for level in reversed(range(len(widths))):
            for _ in range(3):
                self.up.append(
                    Level(width + skips.pop(), widths[level], depths[level], time, context)
                )
                width = widths[level]
            if level:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, _LATENT, 3, padding=1)

    def forward(
        self, latents: torch.Tensor, time: torch.Tensor, context: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of one batch."""
        hidden = self.first(latents)
        kept = [hidden]
        for part in self.down:
            is_level = isinstance(part, Level)
            hidden = part(hidden, time, context) if is_level else part(hidden)
            kept.append(hidden)
        hidden = self.last_middle(self.middle(hidden, time, context), time)
        for part in self.up:
            if isinstance(part, Level):
                hidden = part(torch.cat([hidden, kept.pop()], dim=1), time, context)
            else:
                hidden = part(functional.interpolate(hidden, scale_factor=2.0))
        return functional.mse_loss(self.last(functional.silu(self.norm(hidden))), noise)


def sdxl_unet(batch: int, seq: int, *, side: int = 128) -> Built:
    """SDXL's U-Net on latents of 1024 x 1024 images, prompts of ``seq`` words."""
    latents = torch.randn(batch, _LATENT, side, side)
    return UNet(), {
        "latents": latents,
        "time": torch.randn(batch, _TIME),
        "context": torch.randn(batch, seq, _CONTEXT),
        "noise": torch.randn_like(latents),
    }
