"""Texts of six topics and a small transformer that classifies them."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

LENGTH, WORDS = 12, 60


def texts():
    """A third of the words are of the topic, the others of any."""
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 6
    of_topic = labels[:, None] * 10 + rng.integers(0, 10, (600, LENGTH))
    is_of_topic = rng.random((600, LENGTH)) < 0.5
    return np.where(is_of_topic, of_topic, rng.integers(0, WORDS, (600, LENGTH))), labels


class Attention(nn.Module):
    num_heads = 2

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, 32), nn.Parameter(torch.zeros(LENGTH, 32))
        self.norm, self.attention, self.head = nn.LayerNorm(32), Attention(), nn.Linear(32, 6)

    def forward(self, x):
        x = self.embed(x) + self.position
        return self.head((x + self.attention(self.norm(x))).mean(1))


def transformer():
    return Transformer()
