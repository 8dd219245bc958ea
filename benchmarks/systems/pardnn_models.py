"""Smaller relatives of the models of ParDNN's evaluation, with the batch that one card holds there.

Layers are as wide as published or half as wide and there are fewer of them, so that a graph has
2,000 to 20,000 ops and is captured in seconds; ParDNN's have 10,578 to 204,792.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from baechi_models import Transformer
from torch import nn
from torch.nn import functional

from hocket.capture.sizes import capture_sizes
from hocket.capture.zoo.recurrent import lstm, unroll
from hocket.capture.zoo.vision import resnet
from hocket.graph.graph import Graph

Built = tuple[nn.Module, dict[str, Any]]
CHARACTERS, WORD, WORDS = 96, 16, 10_000


class CharCRN(nn.Module):
    """Convolutions over the characters of each word, then residual LSTM layers."""

    def __init__(self, layers: int = 6, width: int = 2048) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, 64)
        self.filters = nn.ModuleList(nn.Conv1d(64, width // 4, size) for size in (2, 3, 4, 5))
        self.layers = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of words [batch, step, character]."""
        steps = []
        for word in tokens.unbind(1):
            letters = self.characters(word).transpose(1, 2)
            found = [torch.tanh(each(letters)).amax(2) for each in self.filters]
            steps.append(torch.cat(found, 1))
        for cell in self.layers:
            outputs = unroll(cell, steps)
            steps = [y + x for y, x in zip(outputs, steps, strict=True)]
        logits = self.head(torch.stack(steps, 1))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class EideticCell(nn.Module):
    """A cell of E3D-LSTM: gates by 3-D convolutions, recall by attention over past memories."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gates = nn.Conv3d(2 * channels, 6 * channels, (3, 5, 5), padding="same")
        self.mixes = nn.Conv3d(2 * channels, channels, (3, 5, 5), padding="same")
        self.join = nn.Conv3d(2 * channels, channels, 1)

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor, flow: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next hidden state and the spatio-temporal memory; appends the memory to ``past``."""
        gates = self.gates(torch.cat([x, hidden], 1)).chunk(6, 1)
        recall, entry, forget, output = (torch.sigmoid(gate) for gate in gates[:4])
        query, stored = recall.flatten(2), torch.cat([each.flatten(2) for each in past], 2)
        weights = torch.softmax(query.transpose(1, 2) @ stored, -1)
        recalled = (weights @ stored.transpose(1, 2)).transpose(1, 2).view_as(recall)
        memory = entry * torch.tanh(gates[4]) + recalled
        flow = forget * flow + entry * torch.tanh(self.mixes(torch.cat([x, flow], 1)))
        past.append(memory)
        joined = torch.cat([memory, flow], 1)
        return output * torch.tanh(self.join(joined)), flow


class E3D(nn.Module):
    """Eidetic 3-D LSTM: predicts the next frames of a film."""

    def __init__(self, layers: int = 4, channels: int = 64) -> None:
        super().__init__()
        self.enter = nn.Conv3d(16, channels, 1)
        self.layers = nn.ModuleList(EideticCell(channels) for _ in range(layers))
        self.leave = nn.Conv3d(channels, 16, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """The error of the prediction of frames [batch, step, patch, depth, row, column]."""
        steps = frames.unbind(1)
        state: list[torch.Tensor] = []
        past: list[list[torch.Tensor]] = []
        flow = torch.zeros_like(self.enter(steps[0]))
        loss = torch.zeros((), device=frames.device)
        for now, following in pairwise(steps):
            x = self.enter(now)
            if not state:
                state = [torch.zeros_like(x) for _ in self.layers]
                past = [[torch.zeros_like(x)] for _ in self.layers]
            for index, cell in enumerate(self.layers):
                x, flow = cell(x, state[index], flow, past[index])
                state[index] = x
            loss = loss + functional.mse_loss(self.leave(x), following)
        return loss


def _char_crn(batch: int) -> Built:
    tokens = torch.zeros(batch, 15, WORD, dtype=torch.int64)
    return CharCRN(), {"tokens": tokens, "labels": torch.zeros(batch, 15, dtype=torch.int64)}


def _e3d(batch: int) -> Built:
    return E3D(), {"frames": torch.zeros(batch, 8, 16, 2, 16, 16)}


def _transformer(batch: int) -> Built:
    tokens = torch.zeros(batch, 128, dtype=torch.int64)
    labels = torch.zeros(batch, 128, 30_000)
    model = Transformer(1024, 16, 4096)
    return model, {"tokens": tokens, "targets": tokens.clone(), "labels": labels}


class Model(NamedTuple):
    """A model, the batch of one card, and what was published for 16 cards."""

    name: str
    build: Callable[[int], Built]
    batch: int
    published: int


MODELS = (
    Model("Word-RNN", lambda batch: lstm(batch, 28, layers=8, width=2048), 16, 2048),
    Model("Char-CRN", _char_crn, 8, 2048),
    Model("WRN", lambda batch: resnet(101, batch, width_factor=4), 1, 32),
    Model("TRN", _transformer, 1, 128),
    Model("E3D", _e3d, 1, 32),
)


def captured(model: Model) -> Graph:
    """The training step of 4 times the batch of one card, which knows other sizes."""
    with torch.device("meta"):
        built, batch = model.build(4 * model.batch)
    return capture_sizes(built, batch, optimizer="adam", name=model.name)
