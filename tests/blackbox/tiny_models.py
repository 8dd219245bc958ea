"""Small models of many kinds: a function of each name returns a model and one batch.

Models return their loss, so that no option is needed beside their names.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Scored(nn.Module):
    """A net whose loss is a mean square, or a cross entropy where targets are integers."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        out = self.net(x)
        if y.dtype == torch.long:
            return functional.cross_entropy(out.flatten(0, -2), y.flatten())
        return functional.mse_loss(out, y)


def _random(*shape):
    return torch.randn(*shape)


def _labels(most, *shape):
    return torch.randint(0, most, shape)


def _dense(widths, act=nn.ReLU):
    layers = []
    for taken, made in pairwise(widths):
        layers += [nn.Linear(taken, made), act()]
    return nn.Sequential(*layers[:-1])


def linear():
    return Scored(nn.Linear(8, 3)), (_random(8, 8), _random(8, 3))


def mlp():
    return Scored(_dense([16, 32, 32, 32, 4])), (_random(8, 16), _random(8, 4))


def deep_mlp():
    return Scored(_dense([32] * 13, nn.Tanh)), (_random(16, 32), _random(16, 32))


def gelu_mlp():
    return Scored(_dense([12, 24, 6], nn.GELU)), (_random(8, 12), _labels(6, 8))


def layer_norm():
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 5))
    return Scored(net), (_random(8, 8), _labels(5, 8))


def batch_norm():
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    return Scored(net), (_random(8, 8), _labels(5, 8))


def dropout():
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 5))
    return Scored(net), (_random(8, 8), _labels(5, 8))


def convolutions():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    return Scored(net), (_random(4, 1, 8, 8), _labels(10, 4))


def group_norm_convolutions():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 9, 4),
    )  # fmt: skip
    return Scored(net), (_random(4, 3, 8, 8), _labels(4, 4))


def one_dimensional_convolution():
    net = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14, 3))
    return Scored(net), (_random(4, 4, 16), _labels(3, 4))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_dense([16, 32, 16]) for _ in range(4))
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def residual():
    return Scored(Residual()), (_random(8, 16), _random(8, 4))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = _dense([8, 16, 16]), _dense([8, 16, 16, 16])
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        return self.out(torch.cat([self.one(x), self.two(x)], 1))


def branches():
    return Scored(Branches()), (_random(8, 8), _random(8, 2))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.out = kind(6, 12, num_layers=2, batch_first=True), nn.Linear(12, 6)

    def forward(self, x):
        return self.out(self.cells(x)[0])


def lstm():
    return Scored(Recurrent(nn.LSTM)), (_random(4, 7, 6), _random(4, 7, 6))


def gru():
    return Scored(Recurrent(nn.GRU)), (_random(4, 7, 6), _labels(6, 4, 7))


class Unrolled(nn.Module):
    """A Python loop over time."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 6), nn.Linear(6, 4)

    def forward(self, series):
        state, loss = series.new_zeros(series.shape[0], 6), 0.0
        for time in range(series.shape[1] - 1):
            state = self.cell(series[:, time], state)
            loss = loss + functional.smooth_l1_loss(self.out(state), series[:, time + 1])
        return loss


def unrolled():
    return Unrolled(), (_random(4, 5, 4),)


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (
            each.view(rows, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(x).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm_2, self.mlp = nn.LayerNorm(width), _dense([width, 4 * width, width], nn.GELU)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Language(nn.Module):
    def __init__(self, layers=2, tied=False, recomputes=False):
        super().__init__()
        self.embed, self.position = nn.Embedding(31, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 31, bias=False)
        self.recomputes = recomputes
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        scores = self.head(self.norm(x))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def _text(rows=4, length=12):
    return _labels(31, rows, length), _labels(31, rows, length)


def language():
    return Language(), _text()


def tied_language():
    return Language(tied=True), _text()


def deep_language():
    return Language(layers=6), _text(8)


def recomputed_language():
    return Language(recomputes=True), _text()


def torch_encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = nn.Sequential(layer, nn.Linear(16, 5))
    return Scored(net), (_random(4, 6, 16), _labels(5, 4, 6))


class Experts(nn.Module):
    """Two experts, each mixed with a weight."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(_dense([8, 16, 8]) for _ in range(2))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        parts = [weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return sum(parts)


def experts():
    return Scored(Experts()), (_random(8, 8), _random(8, 8))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(20, 6, mode="mean"), nn.Linear(6, 1)

    def forward(self, items, target):
        return functional.mse_loss(self.out(self.bags(items)), target)


def bags():
    return Bags(), (_labels(20, 6, 5), _random(6, 1))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.head = _dense([8, 16, 16]), nn.Linear(16, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.relu(self.base(x)))


def frozen():
    return Scored(Frozen()), (_random(8, 8), _random(8, 3))


class Parameters(nn.Module):
    """Parameters of its own beside those of layers, and one that is a scalar."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x * self.scale + self.shift)


def own_parameters():
    return Scored(Parameters()), (_random(8, 8), _random(8, 8))


class Straight(torch.autograd.Function):
    """Rounds in forward, passes gradients straight through."""

    @staticmethod
    def forward(context, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(context, gradient):
        return gradient.clamp(-1, 1)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.second(Straight.apply(torch.tanh(self.first(x))))


def own_function():
    return Scored(Quantized()), (_random(8, 6), _random(8, 1))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = functional.relu_(self.first(x))
        hidden = hidden * 2
        hidden += 1
        return self.second(hidden)


def in_place():
    return Scored(InPlace()), (_random(8, 6), _random(8, 2))


class Statistics(nn.Module):
    """A buffer that forward updates."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.inner(x - self.mean)


def buffers():
    return Scored(Statistics()), (_random(8, 6), _random(8, 6))


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 2)

    def forward(self, features, targets):
        out = self.inner(features)
        return {"loss": functional.mse_loss(out, targets), "out": out}


def mapping():
    return Mapped(), {"features": _random(8, 6), "targets": _random(8, 2)}


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 1, 2, 2)

    def forward(self, x):
        return functional.mse_loss(self.up(torch.relu(self.down(x))), x)


def autoencoder():
    return Autoencoder(), (_random(4, 1, 8, 8),)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    tokens = _labels(64, 4, 8)
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


MODELS = (
    linear, mlp, deep_mlp, gelu_mlp, layer_norm, batch_norm, dropout, convolutions,
    group_norm_convolutions, one_dimensional_convolution, residual, branches, lstm, gru, unrolled,
    language, tied_language, deep_language, recomputed_language, torch_encoder, experts, bags,
    frozen, own_parameters, own_function, in_place, buffers, mapping, autoencoder,
)  # fmt: skip
"""All of them; those that `hocket plan` is given are drawn with seed 0."""
