"""What a run on a GPU trains: sizes of all parts, on the GPU and for a rehearsal on a processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_models import Sizes, gpt
from gpu_rows import GIB, Book


@dataclass(frozen=True)
class Replays:
    """Depth, length and experts of published runs under 12 GB: the most that was trained there."""

    image: int = 224
    channels: int = 512
    depth: int = 1001
    """Convolutions."""
    rows: int = 128
    length: int = 800
    hidden: int = 4096
    width: int = 1024
    """Of a model with experts in place of layers, 8 M parameters each: as many parameters as the
    published 48 of 4 M, planned in half the time."""
    experts: int = 24
    cap: int = 12 * GIB


@dataclass(frozen=True)
class Run:
    """What a run trains, and where its rows go."""

    book: Book
    sizes: Sizes
    width: int
    layers: int
    caps: tuple[int, ...]
    largest: tuple[int, int]
    """Layers of the largest model that the host has room for, and its cap."""
    baseline_width: int
    starts: Mapping[int, int]
    """By cap the depth at which the search begins for systems that hold all parameters."""
    small: tuple[int, int, Sizes]
    """Width, depth and batch of a GPT for many budgets and many steps."""
    smallest: tuple[int, int, Sizes]
    """The same in float64."""
    replays: Replays
    num_steps: int = 100
    """Whose losses are compared."""

    def gpt(self, home: str, layers: int | None = None) -> Callable[[], Any]:
        """How the large model is made."""
        return lambda: gpt(self.width, layers or self.layers, self.sizes, home)

    @property
    def micro(self) -> int:
        """Parts of a step for systems that do not chunk: one sequence each."""
        return max(1, self.sizes.tokens // self.sizes.sequence)


def real_run(book: Book) -> Run:
    """On a GPU of 139 GiB beside 125 GiB of the host, where float32 weights, AdamW's state and
    rounded twins take 14 bytes a parameter, and inputs of layers 0.2 GB a layer."""
    caps = (8 * GIB, 12 * GIB)
    return Run(
        book, Sizes(), width=3072, layers=36, caps=caps, largest=(54, caps[-1]),
        baseline_width=2048, starts=dict(zip(caps, (6, 10), strict=True)),
        small=(512, 6, Sizes(tokens=4096)),
        smallest=(128, 4, Sizes(sequence=256, vocabulary=2048, tokens=1024)),
        replays=Replays(),
    )  # fmt: skip


def toy_run(book: Book) -> Run:
    """On a processor, in minutes."""
    tiny, caps = Sizes(sequence=16, vocabulary=64, tokens=64), (GIB // 1600, GIB // 1024)
    return Run(
        book, tiny, width=32, layers=3, caps=caps, largest=(4, caps[-1]), baseline_width=32,
        starts=dict.fromkeys(caps, 2), small=(32, 3, tiny), smallest=(32, 3, tiny),
        replays=Replays(
            28, 16, 36, rows=4, length=80, hidden=16, width=16, experts=2, cap=GIB // 64
        ),
        num_steps=8,
    )  # fmt: skip
