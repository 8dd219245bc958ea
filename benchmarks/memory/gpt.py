"""A GPT of any size with tied embeddings, its batches and its update."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEQUENCE, VOCABULARY = 1024, 50304
HEAD_WIDTH = 128


class Layer(nn.Module):
    """A layer of GPT-2, without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(SEQUENCE, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x)).float()
        return functional.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1))


def built(width: int, num_layers: int, device: str) -> Gpt:
    """A model with weights of one seed, drawn on the GPU layer by layer and kept on ``device``."""
    with torch.device("meta"):
        model = Gpt(width, num_layers)
    draws = torch.Generator(DEVICE).manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty(parameter.shape, device=DEVICE)
            if parameter.dim() == 1:
                value.fill_(1.0 if "norm" in name or isinstance(module, nn.LayerNorm) else 0.0)
                if name == "bias":
                    value.zero_()
            else:
                value.normal_(0, 0.02, generator=draws)
            setattr(module, name, nn.Parameter(value.to(device)))
    model.head.weight = model.words.weight
    return model.train()


def forward(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss under autocast."""
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(*batch)


def batches(count: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches for everybody."""
    draws = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        words = torch.randint(VOCABULARY, (tokens // SEQUENCE, SEQUENCE + 1), generator=draws)
        # Few different words, so that there is something to learn.
        words = words % 997
        found.append((words[:, :-1].contiguous().to(DEVICE), words[:, 1:].contiguous().to(DEVICE)))
    return found


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """The update of all."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, **options)
