"""Nets of unequal layers, and of layers whose matrices can be divided."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hocket.plan.make import make_problem

problem_on = partial(make_problem, headroom_bytes=0)


class Stack(nn.Module):
    """Layers of unequal width, heavy enough that devices matter."""

    def __init__(self, widths=(512, 1024, 512, 2048, 512)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Layer(nn.Module):
    """Matrices with the names of GPT-2."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({
            "c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width),
        })  # fmt: skip

    def forward(self, x):
        parts = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Text(nn.Module):
    def __init__(self, width=1024, heads=8, layers=2, vocabulary=64):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
