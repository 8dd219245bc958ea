"""CIFAR-10 scans and the nets that are split: what `cifar_gpu.py` gives to `hocket.classes`.

``CIFAR_SCANS`` names the folder with ``cifar10_{train,test}_jpegscans.npz``; images are decoded
once, into ``CIFAR_CACHE``. Training images are divided into 36,000 to train with and 4,000 to
decide with; the 10,000 test images are apart.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NUM_VALIDATION = 4000
VGG19 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512)


def folder() -> Path:
    return Path(os.environ["CIFAR_SCANS"])


def cache() -> Path:
    return Path(os.environ.get("CIFAR_CACHE", "/tmp/hocket-cifar"))


def few() -> int | None:
    """``CIFAR_FEW``: only so many images of each split, to try the scripts."""
    return int(os.environ.get("CIFAR_FEW", "0")) or None


def decode(split: str) -> None:
    """JPEG scans as arrays of bytes, once."""
    from PIL import Image

    cache().mkdir(parents=True, exist_ok=True)
    with np.load(folder() / f"cifar10_{split}_jpegscans.npz", allow_pickle=False) as stored:
        prefix, scans = stored["prefix"].tobytes(), stored["scans"].tobytes()
        ends = np.cumsum(stored["lengths"].astype(np.int64))
        labels, names = stored["labels"], stored["class_names"]
    starts = ends - np.diff(np.concatenate([[0], ends]))
    chosen = np.linspace(0, len(labels) - 1, min(2 * (few() or len(labels)), len(labels))).astype(
        int
    )
    starts, ends, labels = starts[chosen], ends[chosen], labels[chosen]
    pixels = np.empty((len(labels), 32, 32, 3), np.uint8)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        file = io.BytesIO(prefix + scans[start:end] + b"\xff\xd9")
        pixels[index] = np.asarray(Image.open(file).convert("RGB"))
    np.savez(cache() / f"{split}.npz", pixels=pixels, labels=labels, names=names)


def _normal(pixels: np.ndarray) -> torch.Tensor:
    whole = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    return (whole - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def images() -> dict[str, Any]:
    """The three splits."""
    with np.load(cache() / "train.npz", allow_pickle=False) as train:
        pixels, labels, names = train["pixels"], train["labels"], train["names"]
    order = np.random.default_rng(0).permutation(len(labels))
    held_out = min(NUM_VALIDATION, len(order) // 2)
    held, rest = order[:held_out], order[held_out:]
    with np.load(cache() / "test.npz", allow_pickle=False) as test:
        mine = np.random.default_rng(1).permutation(len(test["labels"]))[: few()]
        test_pixels, test_labels = test["pixels"][mine], test["labels"][mine]
    return {
        "train": (_normal(pixels[rest]), labels[rest].astype(np.int64)),
        "validation": (_normal(pixels[held]), labels[held].astype(np.int64)),
        "test": (_normal(test_pixels), test_labels.astype(np.int64)),
        "names": [str(name) for name in names],
        "augment": augment,
    }


def augment(batch: torch.Tensor) -> torch.Tensor:
    """Each image moved by up to four pixels, and mirrored or not."""
    count, device = len(batch), batch.device
    padded = functional.pad(batch, (4, 4, 4, 4), mode="reflect")
    span = torch.arange(32, device=device)
    rows = (torch.randint(0, 9, (count, 1), device=device) + span)[:, None, :, None]
    columns = (torch.randint(0, 9, (count, 1), device=device) + span)[:, None, None, :]
    images = torch.arange(count, device=device)[:, None, None, None]
    channels = torch.arange(3, device=device)[None, :, None, None]
    moved = padded[images, channels, rows, columns]
    is_mirrored = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return torch.where(is_mirrored, moved.flip(3), moved)


def vgg19() -> nn.Module:
    """VGG-19 with batch norm for 32 x 32 images."""
    layers: list[nn.Module] = []
    width = 3
    for each in VGG19:
        if each == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [
            nn.Conv2d(width, each, 3, padding=1, bias=False),
            nn.BatchNorm2d(each),
            nn.ReLU(),
        ]
        width = each
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Block(nn.Module):
    """Two convolutions and a sum; the padding shortcut is a convolution with the same effect."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            with torch.no_grad():
                self.shortcut.weight.zero_()
                first = (outputs - inputs) // 2
                for channel in range(inputs):
                    self.shortcut.weight[first + channel, channel] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """The CIFAR ResNet of He et al. with three stages of ``blocks`` blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        width = 16
        for stage, (outputs, stride) in enumerate(((16, 1), (32, 2), (64, 2)), 1):
            made = [
                Block(width if k == 0 else outputs, outputs, stride if k == 0 else 1)
                for k in range(blocks)
            ]
            setattr(self, f"layer{stage}", nn.Sequential(*made))
            width = outputs
        self.linear = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet56() -> nn.Module:
    """ResNet-56, untrained: published weights have seen the images that decide here."""
    return ResNet(9)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, self.num_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A small vision transformer: 4 x 4 patches, mean over tokens."""

    def __init__(self, width: int = 384, depth: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.patch = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, 2, 1), nn.ReLU(), nn.Conv2d(width // 2, width, 3, 2, 1)
        )
        self.position = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def vit() -> nn.Module:
    """The transformer."""
    return ViT()
