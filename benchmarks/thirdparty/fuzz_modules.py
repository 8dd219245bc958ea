"""Modules for the fuzzer: each maps a float tensor [batch, time, WIDTH] to one of the same shape.

Every class is one habit of real models that a tracer can get wrong.
"""

# ruff: noqa: ANN201, ANN205 - the modules are written as users write them

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 8
GLOBAL_SCALE = torch.linspace(0.5, 1.5, WIDTH)
GLOBAL_CACHE: dict[int, torch.Tensor] = {}


class Mlp(nn.Module):
    def __init__(self, act: Any = torch.tanh) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), act

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = m = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.call = lambda x: m["b"](torch.relu(m["a"](x)))

    def forward(self, x):
        return x + self.call(x)


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.call = functools.partial(
            functional.linear, weight=self.layer.weight, bias=self.layer.bias
        )
        self.method = self.layer.forward

    def forward(self, x):
        return self.call(x) + self.method(x)


class ListedTwice(nn.Module):
    """Registered modules that are reached by plain containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.nested = [[self.layers[0]], {"x": (self.layers[1], [self.layers[2]])}]
        self.holder = SimpleNamespace(first=self.layers[0].weight)

    def forward(self, x):
        x = self.nested[0][0](x)
        inner = self.nested[1]["x"]
        return inner[0](x) + inner[1][0](x) @ self.holder.first


class Unregistered(nn.Module):
    """Layers in a plain list: part of the forward pass, no parameters of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH)]
        self.seen = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.seen(x) + self.hidden[0](x)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, w // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, w)
        first, second = self.out(y).chunk(2, -1)
        return torch.cat([second, first], -1) + x.flip(1) + x[:, :1].expand_as(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x) + 0.1
        y[..., 0] *= 2
        y[:, 0].add_(x[:, -1])
        y.mul_(0.5).sigmoid_()
        y = y + 0
        y[:, :, 1:3] = x[:, :, 1:3] * self.layer.bias[:2]
        view = y.view(-1)
        view[::3] += 1
        return y


class InPlaceOnInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x * 1.0
        x = x + 0.0
        x += self.layer(y)
        functional.leaky_relu(x, 0.1, inplace=True)
        return x


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.layer.requires_grad_(False)
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.layer(x))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.layer(x)


class Statistics(nn.Module):
    """Buffers that a step writes, by methods and by ops."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.ones(WIDTH), persistent=False)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
                self.count += 1
                self.hidden.mul_(0.9)
        return self.layer(x - self.mean.clone()) * self.hidden.clone() / (1 + self.count)


class ReplacedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.layer(x - self.mean)


class TransposedBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.group = nn.BatchNorm1d(WIDTH), nn.GroupNorm(2, WIDTH)
        self.instance = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def forward(self, x):
        y = self.norm(x.transpose(1, 2))
        return (self.group(y) + self.instance(y)).transpose(1, 2)


class Hooked(nn.Module):
    """Hooks that change outputs, inputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer.register_forward_hook(lambda module, args, output: output * 1.5)
        self.other.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.layer.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x):
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return self.other(y)


class BackwardHooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_full_backward_hook(
            lambda m, given, made: None if given[0] is None else (given[0] * 0.5,)
        )

    def forward(self, x):
        return self.layer(x)


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        y = functional.dropout(self.layer(x), 0.2, self.training)
        if self.training:
            y = y + 0.1 * torch.randn_like(y) * (torch.rand(x.shape[0], 1, 1) > 0.5)
            y = y * torch.bernoulli(torch.full_like(y, 0.9)) + torch.randperm(WIDTH) * 0.01
        return self.drop(y)


class PythonDraw(nn.Module):
    """Decides by Python's generator: nothing that a traced step shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if self.training and random.random() < 0.5:
            return x
        return self.layer(x)


class NumpyDraw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scale = float(np.random.uniform(0.5, 1.5)) if self.training else 1.0
        return self.layer(x) * scale


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(7)

    def forward(self, x):
        noise = torch.rand(x.shape[-1], generator=self.generator) if self.training else 1.0
        return self.layer(x) * noise


class ShapeCondition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for _ in range(x.shape[1] % 3):
            x = self.small(x)
        return self.large(x) if len(x) > 3 else x * x.size(0)


class DataCondition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.some(x) if x.mean() > 0 else self.other(x)


class Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.layer(x) * self.scale.exp() * (1 + self.scale.item())


class ToNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x) * float(x.detach().numpy().std() + 0.5)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x) @ torch.eye(WIDTH)
            with torch.autocast("cpu", enabled=False):
                y = self.out(y.float())
        return y


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=True) if self.training else self.inner(x)


class NonReentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())
        self.later = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        run = functools.partial(checkpoint, self.inner, use_reentrant=False)
        return self.later(run(x))


class CheckpointedSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x):
        return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)


@dataclass
class Outcome:
    value: torch.Tensor
    extra: dict[str, Any]


class ManyOutputs(nn.Module):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x, *, flag=True, **others):
            return Outcome(self.a(x), {"b": [self.b(x), None], "flag": flag, **others})

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        found = self.inner(x, flag=False, word="yes")
        return found.value + found.extra["b"][0].sum(-1, keepdim=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        index = x.argmax(-1)
        return self.out(self.table(index) + x)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, power):
        ctx.save_for_backward(x, weight)
        ctx.power = power
        return x * weight**power

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        by_weight = (grad * x * ctx.power * weight ** (ctx.power - 1)).sum((0, 1))
        return grad * weight**ctx.power, by_weight, None


class Negate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class OwnFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Negate.apply(self.layer(Scale.apply(x, self.weight, 2)))


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        y = self.layer(x)
        return y + (target - y).detach() + y.data * 0.1


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.weight(x) + self.spectral(x)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.layer, "weight", Symmetric())

    def forward(self, x):
        with parametrize.cached():
            return self.layer(self.layer(x))


class Recurrent(nn.Module):
    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=mask)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        y = self.encoder(x, src_key_padding_mask=padded)
        return self.cross(x, y, y, need_weights=False)[0]


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.3)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(self.weight)
        return torch.fft.irfft(spectrum, n=WIDTH, dim=-1) + torch.conj(spectrum).abs().sum(-1, True)


class Indexing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x):
        values, order = self.layer(x).sort(stable=True, dim=-1)
        top, where = values.topk(3, -1)
        y = torch.zeros_like(x).scatter_add(-1, where, top)
        y = y.index_add(0, torch.tensor([0, 0, 1][: len(x)]), x[:3])
        y = torch.where(order > 3, y, values) + torch.cumsum(x, 1)
        y = y.masked_fill(y > 2, 0.5).index_copy(1, torch.tensor([0]), x[:, :1])
        return (
            y
            + self.rows[torch.arange(x.shape[1]) % 5]
            + torch.einsum("btw,wv->btv", x, x[0].T @ x[0])
        )


class Nonzero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, chosen = x.clone(), (x.sum(-1) > 0).nonzero(as_tuple=True)
        y[chosen] = self.layer(x[chosen])
        return y


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.up, self.pool = nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2), nn.MaxPool1d(2)

    def forward(self, x):
        y = functional.pad(self.conv(x.transpose(1, 2)), (1, 1), mode="replicate")[..., 1:-1]
        return self.pool(self.up(y)).transpose(1, 2)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(10, WIDTH, mode="mean")

    def forward(self, x):
        index = (x.detach().abs() * 3).long().clamp(0, 9)
        return x + self.table(index).mean(2) + self.bag(index.flatten(0, 1)).view_as(x)


class Limited(nn.Module):
    """Writes into the parameter that it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = (
            nn.Embedding(10, WIDTH, max_norm=1.0),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(0.5, 0.99)
        return x * self.weight + self.table((x[..., 0] > 0).long())


class Counter(nn.Module):
    """A number on the module that changes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += self.training
        return self.layer(x) * (1 + 0.1 * min(self.calls, 3))


class CounterInList(nn.Module):
    """The same where attributes do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), [0]

    def forward(self, x):
        self.calls[0] += self.training
        return self.layer(x) * (1 + 0.1 * self.calls[0])


class CounterInClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        calls = 0

        def scale() -> float:
            nonlocal calls
            calls += 1
            return 1 + 0.01 * calls

        self.scale = scale

    def forward(self, x):
        return self.layer(x) * (self.scale() if self.training else 1.0)


class State(nn.Module):
    """What one step leaves is read by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        y = self.layer(x)
        if self.state is not None and self.state.shape == y.shape[1:]:
            y = y + 0.5 * self.state
        if self.training:
            self.state = y.detach().mean(0)
        return y


class StateInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.states = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x):
        y = self.layer(x)
        if self.states:
            y = y + 0.5 * self.states[-1]
        if self.training:
            self.states.append(y.detach().mean((0, 1)))
            del self.states[:-2]
        return y


class LazyCache(nn.Module):
    shared: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.linspace(0, 1, WIDTH)
        if x.shape[1] not in self.shared:
            self.shared[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        if x.shape[1] not in GLOBAL_CACHE:
            GLOBAL_CACHE[x.shape[1]] = torch.ones(x.shape[1], 1)
        return self.layer(x) * self.mask + self.shared[x.shape[1]] * GLOBAL_CACHE[x.shape[1]]


class Globals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.plain = nn.Linear(WIDTH, WIDTH), torch.linspace(1, 2, WIDTH)
        self.listed = [torch.full((WIDTH,), 0.5)]

    def forward(self, x):
        return self.layer(x) * GLOBAL_SCALE + self.plain * self.listed[0]


class GradientInside(nn.Module):
    """A gradient penalty: autograd inside of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.enable_grad():
            given = x.detach().requires_grad_(True)
            score = torch.tanh(self.layer(given)).sum()
            (slope,) = torch.autograd.grad(score, given, create_graph=True)
        return self.layer(x) + slope


class Transforms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weights = dict(self.layer.named_parameters())
        one = lambda row: torch.func.functional_call(self.layer, weights, (row,))  # noqa: E731
        return torch.vmap(one)(x)


class ParameterContainers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(WIDTH))})

    @property
    def weight(self):
        return self.listed[0] * self.named["a"]

    def forward(self, x):
        return x * self.weight + self.listed[1]


class Types(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.short = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).bfloat16()

    def forward(self, x):
        return (self.wide(x.double()) + self.short(x.bfloat16())).to(x.dtype)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        state, rows = x[:, 0], []
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
            rows.append(self.norm(state))
        return torch.stack(rows, 1)


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        if torch.is_grad_enabled():
            y = y * 1.1
        return y if self.training else y - 1


class Experts(nn.Module):
    """Routes rows to one of several experts: sizes depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)
            y[rows] += expert(x[rows]) * weights[rows][:, None]
        return y


class LeftBehind(nn.Module):
    """Leaves losses and activations on itself, as auxiliary losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.balance, self.last = nn.Linear(WIDTH, WIDTH), None, None

    def forward(self, x):
        y = self.layer(x)
        self.balance, self.last = y.square().mean(), y.detach()
        return y


class SplitParameters(nn.Module):
    """Parameters that are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * WIDTH)
        self.first, self.second = nn.Parameter(flat[:WIDTH]), nn.Parameter(flat[WIDTH:])

    def forward(self, x):
        return x * self.first + self.second


class NestedSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stage = lambda: nn.Sequential(Mlp(), nn.Sequential(Mlp(torch.relu), nn.LayerNorm(WIDTH)))  # noqa: E731
        self.stages = nn.ModuleList(nn.ModuleList(stage() for _ in range(2)) for _ in range(2))

    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x


class Skips(nn.Module):
    """A U-Net's skips: activations that later blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.ModuleList(Mlp() for _ in range(3)),
            nn.ModuleList(Mlp() for _ in range(3)),
        )

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop())
        return x


ALL = (
    Mlp, Closure, Partial, ListedTwice, Unregistered, Views, InPlace, InPlaceOnInput, Frozen,
    Unused, Statistics, ReplacedBuffer, TransposedBatchNorm, Hooked, BackwardHooked, Draws,
    PythonDraw, NumpyDraw, OwnGenerator, ShapeCondition, DataCondition, Item, ToNumpy, Autocast,
    Reentrant, NonReentrant, CheckpointedSequence, ManyOutputs, Tied, OwnFunctions, NoGrad, Normed,
    Parametrized, Recurrent, Attention, Decoder, Fourier, Indexing, Nonzero, Convolution,
    Embeddings, Limited, Counter, CounterInList, CounterInClosure, State, StateInList, LazyCache,
    Globals, GradientInside, Transforms, ParameterContainers, Types, Repeated, Modes, Experts,
    LeftBehind, SplitParameters, NestedSequence, Skips,
)  # fmt: skip
