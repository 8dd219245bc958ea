"""The models of Gavel's table as graphs, from the sizes that its repository states.

LM is a two-layer LSTM of width 200 on WikiText-2 (35 steps, 33,278 words), ResNet-18 the one for
images of 32 x 32, Transformer six and six layers of width 512 on Multi30k; sentences are taken to
be 25 tokens and 3,000 words long, which its repository does not state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hocket.capture import capture
from hocket.capture.zoo import recurrent, vision
from hocket.graph import Graph

_SENTENCE, _WORDS = 25, 3000


class _Block(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class _ResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        ]  # fmt: skip
        inside = 64
        for stage in range(4):
            for block in range(2):
                width, stride = 64 * 2**stage, 2 if stage and not block else 1
                layers.append(_Block(inside, width, stride))
                inside = width
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inside, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.body(images)), labels)


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(_WORDS, 512), nn.Embedding(_WORDS, 512)
        self.body = nn.Transformer(512, 8, 6, 6, 2048, 0.1, batch_first=True)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.body(self.source(tokens), self.target(targets))
        logits = functional.linear(hidden, self.target.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _resnet18(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _ResNet18(), {
        "images": torch.empty(batch, 3, 32, 32),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


def _transformer(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    words = {name: torch.zeros(batch, _SENTENCE, dtype=torch.long) for name in ("tokens", "labels")}
    return _Transformer(), {**words, "targets": words["tokens"].clone()}


_BUILD: dict[str, tuple[Callable[[int], tuple[Any, dict[str, Any]]], str]] = {
    "ResNet-18": (_resnet18, "sgd"),
    "ResNet-50": (lambda batch: vision.resnet(50, batch), "sgd"),
    "Transformer": (_transformer, "adamw"),
    "LM": (lambda batch: recurrent.lstm(batch, 35, vocabulary=33278, width=200), "sgd"),
}


@cache
def gavel_graph(model: str, batch: int) -> Graph:
    """One training step of a model of the table."""
    build, optimizer = _BUILD[model]
    with torch.device("meta"):
        network, data = build(batch)
    return capture(network, data, optimizer=optimizer, name=f"{model} (batch size {batch})")
