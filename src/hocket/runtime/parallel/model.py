"""A plain decoder-only transformer, built stage by stage from its shape.

Every parameter is drawn by its name in the whole model, so a rank builds its own part alone and
all divisions start from the same weights. Dropout is left out: its masks would differ between
divisions, and with them the losses.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hocket.transformer import Recompute, Transformer

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of a model that one virtual stage holds."""

    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> range:
        """Numbers of its layers in the whole model."""
        return range(self.first_layer, self.first_layer + self.num_layers)


def slices_of(layers: tuple[int, ...]) -> tuple[Slice, ...]:
    """The parts of a model whose virtual stages have these numbers of layers."""
    return tuple(
        Slice(
            first_layer=sum(layers[:index]),
            num_layers=count,
            has_embedding=index == 0,
            has_head=index == len(layers) - 1,
        )
        for index, count in enumerate(layers)
    )


class CausalAttention(nn.Module):
    """Causal attention; how many heads it sees follows from what its projections give."""

    def __init__(self, model: Transformer, recomputes: bool) -> None:
        super().__init__()
        self.head_width, self.recomputes = model.head_width, recomputes
        self.is_rotary = not model.learned_positions
        inner = model.heads * model.head_width
        shared = model.kv_heads * model.head_width
        self.query = nn.Linear(model.hidden, inner, bias=model.biases)
        self.key = nn.Linear(model.hidden, shared, bias=model.biases)
        self.value = nn.Linear(model.hidden, shared, bias=model.biases)
        self.output = nn.Linear(inner, model.hidden, bias=model.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each token with those before it."""
        parts = (self.query(x), self.key(x), self.value(x))
        if self.recomputes:
            mixed = checkpoint(self._mix, *parts, use_reentrant=False)
        else:
            mixed = self._mix(*parts)
        return self.output(mixed)  # type: ignore[no-any-return]

    def _mix(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(part) for part in (query, key, value))
        if self.is_rotary:
            query, key = _rotated(query), _rotated(key)
        shares = query.shape[1] // key.shape[1]
        if shares > 1:
            key, value = (part.repeat_interleave(shares, dim=1) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def _heads(self, part: torch.Tensor) -> torch.Tensor:
        shape = *part.shape[:-1], -1, self.head_width
        return part.view(shape).transpose(1, 2)


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Turn pairs of channels by angles that grow with the position."""
    half = heads.shape[-1] // 2
    options = {"dtype": torch.float32, "device": heads.device}
    speeds = _ROTARY_BASE ** (-torch.arange(half, **options) / half)  # type: ignore[call-overload]
    angles = torch.arange(heads.shape[-2], **options)[:, None] * speeds  # type: ignore[call-overload]
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Mlp(nn.Module):
    """Two matrices, or three where the third one gates."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden, model.mlp_width, bias=model.biases)
        self.down = nn.Linear(model.mlp_width, model.hidden, bias=model.biases)
        self.gate = (
            nn.Linear(model.hidden, model.mlp_width, bias=model.biases)
            if model.mlp == "swiglu"
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widen, bend, narrow."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """One layer."""

    def __init__(self, model: Transformer, recompute: Recompute) -> None:
        super().__init__()
        self.recomputes = recompute == "full"
        self.attention_norm = _norm(model)
        self.attention = CausalAttention(model, recomputes=recompute == "selective")
        self.mlp_norm = _norm(model)
        self.mlp = Mlp(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each added to what came in."""
        if self.recomputes:
            return checkpoint(self._pass, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._pass(x)

    def _pass(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Tokens, and positions where they are learned."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = (
            nn.Parameter(torch.empty(model.sequence, model.hidden))
            if model.learned_positions
            else None
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input."""
        x: torch.Tensor = self.tokens(ids)
        return x if self.positions is None else x + self.positions


class Head(nn.Module):
    """The last norm and the output layer.

    Where embeddings are tied the output layer is a copy of its own with the same start, on one
    device too: the gradients of both copies are summed after the backward pass.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.logits = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """One virtual stage; its parameters have the names of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = None
        self.layers = nn.ModuleDict()
        self.head: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids or activations in, activations or logits out."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


TIED = ("embedding.tokens.weight", "head.logits.weight")
"""Names of the two copies of a tied embedding."""


def _norm(model: Transformer) -> nn.Module:
    return nn.LayerNorm(model.hidden) if model.biases else nn.RMSNorm(model.hidden)


def fill(module: nn.Module, prefix: str, model: Transformer, seed: int) -> None:
    """Give each parameter its first values, which follow from its name and the seed."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            full = f"{prefix}.{name}"
            if full == TIED[1] and model.tied_embeddings:
                full = TIED[0]
            _draw(parameter, full, model.hidden, seed)


def _draw(parameter: torch.Tensor, name: str, hidden: int, seed: int) -> None:
    if name.endswith("bias"):
        parameter.zero_()
    elif "norm" in name:
        parameter.fill_(1.0)
    else:
        generator = torch.Generator().manual_seed(_seed_of(name, seed))
        drawn = torch.empty(parameter.shape).normal_(0.0, hidden**-0.5, generator=generator)
        parameter.copy_(drawn)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)
