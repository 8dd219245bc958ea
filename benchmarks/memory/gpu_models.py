"""Models too large for a cap, drawn from one seed: a GPT, a deep ResNet, a long RNN, experts.

Weights are drawn on the GPU module by module and kept where they are asked for, so that a model
larger than the GPU's free memory can be made for the host. Losses are means over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# Asked without starting CUDA: parts of a run are forked, and a started CUDA does not survive that.
DEVICE = "cuda" if torch.version.cuda and Path("/dev/nvidiactl").exists() else "cpu"
HEAD_WIDTH = 128


@dataclass(frozen=True)
class Sizes:
    """What a run trains."""

    sequence: int = 1024
    vocabulary: int = 50304
    tokens: int = 16384
    """Per step."""


class Layer(nn.Module):
    """A layer of GPT-2, without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, max(1, width // HEAD_WIDTH), min(width, HEAD_WIDTH))
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Experts(nn.Module):
    """Feed-forward parts of which each token takes one, in equal shares by its place."""

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
            for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.norm(x).flatten(0, 1).chunk(len(self.experts))
        mixed = torch.cat([expert(p) for expert, p in zip(self.experts, parts, strict=False)])
        return x + mixed.view_as(x)


class BatchedExperts(nn.Module):
    """The same with the matrices of all experts in one parameter, multiplied as a batch."""

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1).unflatten(0, (len(self.up), -1))
        return x + torch.bmm(functional.relu(torch.bmm(rows, self.up)), self.down).view_as(x)


class Gpt(nn.Module):
    """A language model that returns its loss; with experts, these stand in place of the layers."""

    def __init__(
        self, width: int, num_layers: int, sizes: Sizes, num_experts: int = 0, hidden: int = 0,
        *, batched: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        experts = BatchedExperts if batched else Experts
        self.words = nn.Embedding(sizes.vocabulary, width)
        self.places = nn.Embedding(sizes.sequence, width)
        self.layers = nn.ModuleList(
            experts(width, hidden, num_experts) if num_experts else Layer(width)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return functional.cross_entropy(scores.view(-1, scores.shape[-1]), labels.view(-1))


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True), nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


class DeepResNet(nn.Module):
    """About ``depth`` convolutions as in the second stage of ResNet-152: 512 channels, 28 x 28.

    Nine blocks of three convolutions make a stage, as people write deep nets; with a stage for each
    block, a step of a thousand convolutions takes minutes to plan.
    """

    def __init__(self, depth: int, size: int = 224, channels: int = 512) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, size // 28, size // 28)
        blocks = [Bottleneck(channels) for _ in range(depth // 3)]
        self.blocks = nn.ModuleList(
            nn.Sequential(*blocks[first : first + 9]) for first in range(0, len(blocks), 9)
        )
        self.classify = nn.Linear(channels, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.classify(x.mean((2, 3))), labels)


class Steps(nn.Module):
    """Several steps of an LSTM, whose parameters all pieces share."""

    def __init__(self, cell: nn.LSTMCell) -> None:
        super().__init__()
        self.weights = nn.ParameterList(cell.parameters())

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, ...]) -> Any:
        seen = []
        for step in x.unbind(1):
            state = torch.lstm_cell(step, state, *self.weights)
            seen.append(state[0])
        return torch.stack(seen, 1), state


class LongRnn(nn.Module):
    """An unrolled LSTM in pieces of 20 steps."""

    def __init__(self, length: int, width: int = 1024, piece: int = 20) -> None:
        super().__init__()
        cell = nn.LSTMCell(width, width)
        self.pieces = nn.ModuleList(Steps(cell) for _ in range(length // piece))
        self.classify = nn.Linear(width, 29)

    def forward(self, sound: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        state = (torch.zeros_like(sound[:, 0]), torch.zeros_like(sound[:, 0]))
        seen = []
        for piece, part in zip(self.pieces, sound.chunk(len(self.pieces), 1), strict=True):
            heard, state = piece(part, state)
            seen.append(self.classify(heard))
        return functional.cross_entropy(torch.cat(seen, 1).flatten(0, 1), labels.flatten())


class Listener(nn.Module):
    """Recurrent layers of cuDNN, each after a norm."""

    def __init__(self, width: int, num_layers: int = 4) -> None:
        super().__init__()
        kinds = (nn.LSTM, nn.GRU) * (num_layers // 2)
        self.layers = nn.ModuleList(kind(width, width, batch_first=True) for kind in kinds)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in kinds)
        self.classify = nn.Linear(width, 29)

    def forward(self, sound: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            sound = sound + layer(norm(sound))[0]
        return functional.cross_entropy(self.classify(sound).flatten(0, 1), labels.flatten())


def drawn(model: nn.Module, home: str) -> nn.Module:
    """A model made on the meta device, with weights of one seed, kept on ``home``."""
    draws = torch.Generator(DEVICE).manual_seed(0)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        is_norm = isinstance(module, nn.LayerNorm | nn.BatchNorm2d)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                value = torch.empty(parameter.shape, device=DEVICE)
                if parameter.dim() == 1:
                    value.fill_(1.0 if is_norm and name == "weight" else 0.0)
                else:
                    value.normal_(0, 0.02, generator=draws)
                # Memory of the host is touched by all cores first: the copy would do it with one.
                kept = torch.empty(parameter.shape, device=home).fill_(0)
                made[parameter] = nn.Parameter(kept.copy_(value))
            setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            fill = torch.ones if name == "running_var" else torch.zeros
            module.register_buffer(name, fill(buffer.shape, dtype=buffer.dtype, device=home))
    return model.train()


def gpt(width: int, num_layers: int, sizes: Sizes, home: str, **experts: int) -> nn.Module:
    """A GPT with weights."""
    with torch.device("meta"):
        model = Gpt(width, num_layers, sizes, **experts)
    return drawn(model, home)


def word_batch(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch for everybody; few different words, so that there is something to learn."""
    draws = torch.Generator().manual_seed(1)
    shape = (max(1, sizes.tokens // sizes.sequence), sizes.sequence + 1)
    words = torch.randint(sizes.vocabulary, shape, generator=draws) % 997 % sizes.vocabulary
    return words[:, :-1].contiguous().to(DEVICE), words[:, 1:].contiguous().to(DEVICE)


def forward(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss under autocast."""
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(*batch)


def plain_forward(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss in float32."""
    return model(*batch)
