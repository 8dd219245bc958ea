"""The models of Baechi's evaluation, as its two public programs build them.

``beomyeol/baechi`` (TensorFlow) trains a GNMT of four layers of 512 units, vocabulary 30,000,
``LSTMBlockCell``, no dropout and Adam. ``chiragcshetty/BaechiPyTorch`` trains Inception-V3 and the
base Transformer of "Attention is all you need" (vocabulary 30,000, 50 tokens) with SGD and a mean
squared error over the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hocket.capture import capture, load_model
from hocket.capture.zoo.recurrent import GNMT
from hocket.graph.graph import Graph

VOCABULARY = 30_000


class BlockCell(nn.Module):
    """An LSTM cell of one product, as TensorFlow's ``LSTMBlockCell``."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.product = nn.Linear(inputs + width, 4 * width)

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next output and cell state."""
        if state is None:
            state = (x.new_zeros(len(x), self.width),) * 2
        gates = self.product(torch.cat([x, state[0]], 1))
        entry, candidate, forget, output = gates.chunk(4, 1)
        memory = torch.sigmoid(forget) * state[1] + torch.sigmoid(entry) * torch.tanh(candidate)
        return torch.sigmoid(output) * torch.tanh(memory), memory


class CrossEntropy(torch.autograd.Function):
    """Cross entropy that makes its gradient in the forward pass, as TensorFlow's does."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        gradient = torch.softmax(logits, 1)
        picked = labels.unsqueeze(1)
        loss = -gradient.gather(1, picked).log().mean()
        gradient.scatter_add_(1, picked, -torch.ones_like(picked, dtype=logits.dtype))
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0] / len(gradient)), None


class BaechiGNMT(GNMT):
    """The zoo's GNMT with TensorFlow's cell and loss."""

    def __init__(self) -> None:
        super().__init__(4, VOCABULARY, 512, dropout=0.0, cell=BlockCell)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of all tokens."""
        loss: torch.Tensor = CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
        return loss


def gnmt(batch: int, seq: int) -> Graph:
    """A training step of GNMT; the gates of a cell are one kernel, as in TensorFlow."""
    with torch.device("meta"):
        model = BaechiGNMT()
        tokens = {name: _tokens(batch, seq) for name in ("tokens", "targets", "labels")}
    graph = capture(model, tokens, optimizer="adam", name=f"gnmt-{seq}")
    cells = [
        path
        for name, module in model.named_modules()
        if isinstance(module, BlockCell)
        for path in (name, f"{name}.product")
    ]
    return replace(graph, meta={**graph.meta, "recurrent": cells})


def inception(batch: int) -> Graph:
    """A training step of Inception-V3."""
    model, inputs = load_model("inception-v3", batch=batch)
    return capture(model, inputs, optimizer="sgd", name="inception-v3")


class Attention(nn.Module):
    """Attention of 8 heads that writes its matrix, with residual and norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The residual stream after this layer."""

        def split(part: torch.Tensor) -> torch.Tensor:
            return part.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()

        q, k, v = split(self.queries(x)), split(self.keys(memory)), split(self.values(memory))
        scores = (q / q.shape[-1] ** 0.5) @ k.transpose(2, 3)
        weights = self.drop(torch.softmax(scores.masked_fill(mask == 0, -1e9), -1))
        joined = (weights @ v).transpose(1, 2).contiguous().flatten(2)
        return self.norm(self.drop(self.out(joined)) + x)


class FeedForward(nn.Module):
    """Two linear layers with residual and norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream after this layer."""
        return self.norm(self.drop(self.second(torch.relu(self.first(x)))) + x)


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder where it also reads the encoder's output."""

    def __init__(self, width: int, heads: int, inner: int, *, decodes: bool) -> None:
        super().__init__()
        self.own = Attention(width, heads)
        self.other = Attention(width, heads) if decodes else None
        self.feed = FeedForward(width, inner)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The residual stream after this layer."""
        x = self.own(x, x, mask)
        if self.other is not None and memory is not None:
            x = self.other(x, memory, torch.ones_like(mask))
        return self.feed(x)


class Transformer(nn.Module):
    """The base model: 6 + 6 layers of width 512."""

    def __init__(self, width: int = 512, heads: int = 8, inner: int = 2048) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Layer(width, heads, inner, decodes=False) for _ in range(6))
        self.decoder = nn.ModuleList(Layer(width, heads, inner, decodes=True) for _ in range(6))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The loss of one batch."""
        length = tokens.shape[1]
        everything = torch.ones(length, length, device=tokens.device)
        memory, x = self.source(tokens), self.target(targets)
        for layer in self.encoder:
            memory = layer(memory, everything)
        for layer in self.decoder:
            x = layer(x, everything.tril(), memory)
        return functional.mse_loss(self.head(x), labels)


def transformer(batch: int, seq: int = 50) -> Graph:
    """A training step of the base Transformer."""
    with torch.device("meta"):
        model = Transformer()
        inputs: dict[str, Any] = {name: _tokens(batch, seq) for name in ("tokens", "targets")}
        inputs["labels"] = torch.zeros(batch, seq, VOCABULARY)
    return capture(model, inputs, optimizer="sgd", name="transformer")


def _tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.zeros(batch, seq, dtype=torch.int64)
