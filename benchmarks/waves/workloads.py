"""Workloads of the benchmarks of waves: models whose kernels are small beside a large device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from hocket.capture.loss import ChosenLoss

Workload = Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]
"""From a number of samples to a model, whose output is or has the loss, and a batch."""


class Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, taken: int, made: int) -> None:
        super().__init__()
        stride = 1 if taken == made else 2
        self.first = nn.Conv2d(taken, made, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(made) for _ in range(2))
        self.added, self.stride = made - taken, stride

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        made = self.norms[1](self.second(functional.relu(self.norms[0](self.first(image)))))
        beside = image[:, :, :: self.stride, :: self.stride]
        beside = functional.pad(beside, (0, 0, 0, 0, 0, self.added))
        return functional.relu(made + beside)


class ResNet56(nn.Module):
    """As published for CIFAR: three times nine blocks of 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, *(width for width in (16, 32, 64) for _ in range(9))]
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*map(Block, widths, widths[1:]))
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.blocks(functional.relu(self.norm(self.stem(images))))
        return functional.cross_entropy(self.head(found.mean((2, 3))), labels)


class Mixer(nn.Module):
    """A small MLP-Mixer: eight times across 64 patches, then across 128 channels."""

    def __init__(self, patches: int = 64, width: int = 128, depth: int = 8) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.rows = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for _ in range(depth)
            for size in (patches, width)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.cut(images).flatten(2).transpose(1, 2)
        for number, (norm, row) in enumerate(zip(self.norms, self.rows, strict=True)):
            inner = norm(found)
            mixed = row(inner) if number % 2 else row(inner.transpose(1, 2)).transpose(1, 2)
            found = found + mixed
        return functional.cross_entropy(self.head(found.mean(1)), labels)


class Words(nn.Module):
    """Two layers of an LSTM over words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.body = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next word."""
        scores = self.head(self.body(self.table(input_ids))[0])
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def resnet56(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """ResNet-56 at the size of CIFAR."""
    images = torch.randn(batch, 3, 32, 32)
    return ResNet56(), {"images": images, "labels": torch.randint(10, (batch,))}


def bert(batch: int, **sizes: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT-base on 128 words."""
    model = BertForMaskedLM(BertConfig(**sizes))
    words = torch.randint(1000 if not sizes else sizes["vocab_size"], (batch, 128))
    return model, {"input_ids": words, "labels": words}


def gpt2(batch: int, length: int = 512, **sizes: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 small."""
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    words = torch.randint(1000 if not sizes else sizes["vocab_size"], (batch, length))
    return model, {"input_ids": words, "labels": words}


def lstm(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """An LSTM of 512 over 64 words."""
    return Words(8192, 512), {"input_ids": torch.randint(8192, (batch, 64))}


def mixer(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small mixer at the size of CIFAR."""
    images = torch.randn(batch, 3, 32, 32)
    return Mixer(), {"images": images, "labels": torch.randint(10, (batch,))}


WORKLOADS: dict[str, tuple[Workload, int]] = {
    "ResNet-56, CIFAR, 256": (resnet56, 256),
    "BERT-base 16 x 128": (bert, 16),
    "GPT-2 small 4 x 512": (gpt2, 4),
    "LSTM 2 x 512": (lstm, 64),
    "ResNet-56, CIFAR, 32": (resnet56, 32),
    "GPT-2 small 4 x 64": (partial(gpt2, length=64), 4),
    "Mixer, CIFAR, 64": (mixer, 64),
}
"""What is trained, and the samples of a step."""


def _toy_bert(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return bert(batch, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=64)  # fmt: skip


def _toy_lstm(batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Words(32, 16), {"input_ids": torch.randint(32, (batch, 8))}


TOYS: dict[str, tuple[Workload, int]] = {
    "BERT, toy": (_toy_bert, 4),
    "LSTM, toy": (_toy_lstm, 4),
    "Mixer, toy": (mixer, 4),
}
"""The same at sizes that a processor trains in a moment."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all rows."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_step(model: nn.Module, batch: dict[str, torch.Tensor], **options: Any) -> Any:
    """A step of plain PyTorch, compiled where there are options."""
    optimizer, loss_of = adamw(model), ChosenLoss(None)
    run = torch.compile(model, **options) if options else model

    def step() -> torch.Tensor:
        loss = loss_of(run(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
