"""CPU time of a training step by ``hocket.prepare`` on one CPU core, beside plain PyTorch.

    PYTHONPATH=src:tests python benchmarks/runtime/train_overhead.py

One thread, AdamW, best of five turns of each; the last model is so small that Python is its limit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from runtime.small_zoo import SMALL_ZOO
from torch import nn

from hocket.training import prepare


def scores_to_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss is taken outside of the model."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def convolutions() -> tuple[nn.Module, Any, Any]:
    """A small network of images."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip
    return model, (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))), scores_to_loss


def perceptron() -> tuple[nn.Module, Any, Any]:
    """Six wide layers."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    return model, (torch.randn(256, 512), torch.randint(10, (256,))), scores_to_loss


def toy_gpt2() -> tuple[nn.Module, Any, Any]:
    """Three layers of width 32."""
    model, batch = SMALL_ZOO["gpt2"]()
    return model, batch, lambda model, batch: model(**batch).loss


class Tagger(nn.Module):
    """A tag for each word by two layers of a GRU in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 96)
        self.body = nn.GRU(96, 96, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(192, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of tags, all words below each other."""
        return self.head(self.body(self.table(words))[0]).flatten(0, 1)


def recurrent() -> tuple[nn.Module, Any, Any]:
    """Thousands of small calls."""
    return Tagger(), (torch.randint(500, (32, 40)), torch.randint(12, (32 * 40,))), scores_to_loss


def measure(build: Callable[[], tuple[nn.Module, Any, Any]], steps: int = 5) -> dict[str, float]:
    """Seconds of CPU time per step of both."""
    torch.manual_seed(0)
    model, batch, loss_of = build()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters())
    train = prepare(
        model, torch.optim.AdamW(model.parameters()), batch, on="1xv100-16g", forward=loss_of
    )

    def plain() -> None:
        optimizer.zero_grad()
        loss_of(twin, batch).backward()
        optimizer.step()

    best: dict[str, float] = {}
    for turn in range(6):
        for name, step in (("plain", plain), ("hocket", lambda: train.step(batch))):
            began = time.process_time()
            for _ in range(steps):
                step()
            took_s = (time.process_time() - began) / steps
            if turn:
                best[name] = min(best.get(name, took_s), took_s)
    return best


def main() -> None:
    """One line per model."""
    torch.set_num_threads(1)
    for build in (convolutions, perceptron, toy_gpt2, recurrent):
        best = measure(build)
        ratio = best["hocket"] / best["plain"]
        times = ", ".join(f"{name} {1e3 * took_s:.2f} ms" for name, took_s in best.items())
        print(f"{build.__name__:14} {times}, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
