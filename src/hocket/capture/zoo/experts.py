"""A transformer with a mixture of experts in every layer, with fixed capacity per expert.

Every expert computes the same number of token slots, so all shapes are known before the run. Tokens
beyond an expert's capacity are dropped, and empty slots contain zeros.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from hocket.capture.zoo.language import Built


class Expert(nn.Module):
    """A two-layer perceptron."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.rise = nn.Linear(width, hidden)
        self.fall = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output for the expert's slots."""
        output: torch.Tensor = self.fall(functional.relu(self.rise(x)))
        return output


class Mixture(nn.Module):
    """Routes each token to its highest-scoring expert, within the expert's capacity."""

    def __init__(self, width: int, hidden: int, experts: int, slack: float = 1.25) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))
        self.slack = slack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Expert outputs, weighted by the router, in token order."""
        tokens = x.flatten(0, -2)
        num_experts = len(self.experts)
        capacity = max(1, math.ceil(self.slack * tokens.shape[0] / num_experts))
        weight, choice = torch.softmax(self.router(tokens), -1).max(-1)
        # By expert: running sums are fast along rows and a hundred times slower along columns.
        is_chosen = functional.one_hot(choice, num_experts).t().contiguous()
        place = (is_chosen.cumsum(-1) * is_chosen).sum(0) - 1
        # An additional slot beyond the capacity collects the dropped tokens.
        slot = choice * (capacity + 1) + place.clamp(max=capacity)
        slots = tokens.new_zeros(num_experts * (capacity + 1), tokens.shape[1])
        by_expert = slots.index_copy(0, slot, tokens).view(num_experts, capacity + 1, -1)
        outputs = [
            functional.pad(expert(by_expert[index, :capacity]), (0, 0, 0, 1))
            for index, expert in enumerate(self.experts)
        ]
        chosen = torch.cat(outputs).index_select(0, slot)
        return (chosen * weight.unsqueeze(-1)).view_as(x)


class Layer(nn.Module):
    """Causal self-attention, then a mixture of experts."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mixture = Mixture(width, hidden, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        batch, seq, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        output: torch.Tensor = x + self.mixture(self.norm2(x))
        return output


class ExpertTransformer(nn.Module):
    """A language model whose every layer has its own experts."""

    def __init__(
        self, layers: int, experts: int, width: int, hidden: int, vocabulary: int, seq: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(seq, width)
        self.layers = nn.ModuleList(
            Layer(width, width // 64, hidden, experts) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def moe(
    batch: int, seq: int, *, layers: int = 12, experts: int = 32, width: int = 512,
    hidden: int = 2048, vocabulary: int = 32000,
) -> Built:  # fmt: skip
    """A language model with a mixture of experts per layer: by default 12 layers of 32."""
    model = ExpertTransformer(layers, experts, width, hidden, vocabulary, seq)
    names = ("tokens", "labels")
    return model, {name: torch.randint(vocabulary, (batch, seq)) for name in names}


def moe_12x32(batch: int, seq: int) -> Built:
    """12 layers of 32 experts, about 852 million parameters."""
    return moe(batch, seq)


class Perceptron(nn.Module):
    """Linear layers with rectifiers between them."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        for layer in self.layers:
            inputs = functional.relu(layer(inputs))
        return functional.cross_entropy(self.head(inputs), labels)


def mlp(batch: int, seq: int, *, layers: int = 8, width: int = 1024) -> Built:
    """A perceptron of 8 hidden layers of width 1024."""
    inputs = {"inputs": torch.randn(batch, width), "labels": torch.randint(10, (batch,))}
    return Perceptron(layers, width, 10), inputs
