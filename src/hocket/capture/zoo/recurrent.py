"""Recurrent networks unrolled over time, one cell per layer and step: GNMT and a plain LSTM."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from hocket.capture.zoo.language import Built

State = tuple[torch.Tensor, torch.Tensor]


def unroll(
    cell: nn.Module, inputs: list[torch.Tensor], *, reverse: bool = False
) -> list[torch.Tensor]:
    """Outputs of a cell over time."""
    state: State | None = None
    outputs = []
    for x in reversed(inputs) if reverse else inputs:
        state = cell(x, state)
        outputs.append(state[0])
    return outputs[::-1] if reverse else outputs


class Attention(nn.Module):
    """Additive attention of one decoder state over all encoder outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(
        self, state: torch.Tensor, keys: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """Weighted mean of the memory by attention scores."""
        scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys))
        weights = torch.softmax(scores, 1)
        return (weights * memory).sum(1)


class GNMT(nn.Module):
    """Google's translation network: bidirectional first layer, residual LSTM layers, attention."""

    def __init__(
        self,
        layers: int,
        vocabulary: int = 32000,
        width: int = 1024,
        *,
        dropout: float = 0.2,
        cell: Callable[[int, int], nn.Module] = nn.LSTMCell,
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.forwards = cell(width, width)
        self.backwards = cell(width, width)
        self.encoder = nn.ModuleList(
            cell(2 * width if layer == 0 else width, width) for layer in range(layers - 1)
        )
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(cell(2 * width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(width, vocabulary)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Outputs of the last encoder layer, [batch, step, width]."""
        steps = list(self.dropout(self.source(tokens)).unbind(1))
        ahead = unroll(self.forwards, steps)
        behind = unroll(self.backwards, steps, reverse=True)
        steps = [torch.cat(pair, 1) for pair in zip(ahead, behind, strict=True)]
        for layer, cell in enumerate(self.encoder):
            outputs = unroll(cell, [self.dropout(x) for x in steps])
            if layer > 0:
                outputs = [y + x for y, x in zip(outputs, steps, strict=True)]
            steps = outputs
        return torch.stack(steps, 1)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The loss of one batch."""
        memory = self.encode(tokens)
        keys = self.attention.key(memory)
        first, *others = self.decoder
        context = torch.zeros_like(memory[:, 0])
        state: State | None = None
        contexts, steps = [], []
        for x in self.dropout(self.target(targets)).unbind(1):
            state = first(torch.cat([x, context], 1), state)
            context = self.attention(state[0], keys, memory)
            contexts.append(context)
            steps.append(state[0])
        for layer, cell in enumerate(others):
            joined = [
                torch.cat([self.dropout(x), c], 1) for x, c in zip(steps, contexts, strict=True)
            ]
            outputs = unroll(cell, joined)
            if layer > 0:
                outputs = [y + x for y, x in zip(outputs, steps, strict=True)]
            steps = outputs
        logits = self.head(torch.stack(steps, 1))
        return self.loss(logits.flatten(0, 1), labels.flatten())

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of all tokens."""
        return functional.cross_entropy(logits, labels)


def gnmt(layers: int, batch: int, seq: int, *, vocabulary: int = 32000, width: int = 1024) -> Built:
    """GNMT with ``layers`` encoder and decoder layers on sentences of ``seq`` tokens."""
    names = ("tokens", "targets", "labels")
    return (
        GNMT(layers, vocabulary, width),
        {name: torch.randint(vocabulary, (batch, seq)) for name in names},
    )


def gnmt_4(batch: int, seq: int) -> Built:
    """GNMT with 4 layers."""
    return gnmt(4, batch, seq)


def gnmt_8(batch: int, seq: int) -> Built:
    """GNMT with 8 layers."""
    return gnmt(8, batch, seq)


class UnrolledLSTM(nn.Module):
    """A language model of LSTM layers, unrolled."""

    def __init__(self, layers: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        steps = list(self.embedding(tokens).unbind(1))
        for cell in self.layers:
            steps = unroll(cell, steps)
        logits = self.head(torch.stack(steps, 1))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm(
    batch: int, seq: int, *, layers: int = 2, vocabulary: int = 10000, width: int = 1024
) -> Built:
    """A two-layer LSTM unrolled over ``seq`` steps."""
    tokens = {name: torch.randint(vocabulary, (batch, seq)) for name in ("tokens", "labels")}
    return UnrolledLSTM(layers, vocabulary, width), tokens
