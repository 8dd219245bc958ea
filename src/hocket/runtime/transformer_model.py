"""A plain decoder-only transformer built from its shape, with synthetic text to train on.

Plans that contain only the shape of a transformer run this module, and exported scripts contain its
source. Each parameter is initialized by a seed from its name, so that all parallel configurations
start from the same weights. There is no dropout, because masks and thus losses would differ between
configurations.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hocket.transformer import Recompute, Transformer

_ROTARY_BASE = 10_000.0


class CausalAttention(nn.Module):
    """Causal attention.

    The number of heads is derived from the width of the projections' results, so that a
    tensor-parallel rank can have a part of the heads.
    """

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
        """Attend from each token to itself and all earlier ones."""
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
    """Apply rotary position embeddings: rotate pairs of channels by angles that grow with the
    position."""
    half = heads.shape[-1] // 2
    options = {"dtype": torch.float32, "device": heads.device}
    speeds = _ROTARY_BASE ** (-torch.arange(half, **options) / half)  # type: ignore[call-overload]
    angles = torch.arange(heads.shape[-2], **options)[:, None] * speeds  # type: ignore[call-overload]
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Mlp(nn.Module):
    """MLP of two matrices with GELU, or of three with SwiGLU."""

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
        """Apply the MLP to each token."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """One transformer layer: attention and MLP, each with a norm before it."""

    def __init__(self, model: Transformer, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recomputes = recompute == "full"
        self.attention_norm = _norm(model)
        self.attention = CausalAttention(model, recomputes=recompute == "selective")
        self.mlp_norm = _norm(model)
        self.mlp = Mlp(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the results of attention and MLP to the residual stream."""
        if self.recomputes:
            return checkpoint(self._pass, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._pass(x)

    def _pass(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Token embedding, plus position embedding if positions are learned."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = (
            nn.Parameter(torch.empty(model.sequence, model.hidden))
            if model.learned_positions
            else None
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer."""
        x: torch.Tensor = self.tokens(ids)
        return x if self.positions is None else x + self.positions


class Head(nn.Module):
    """Final norm and output layer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.logits = nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token."""
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


TIED = ("embedding.tokens.weight", "head.logits.weight")
"""Names of the two copies of a tied embedding."""


def _norm(model: Transformer) -> nn.Module:
    return nn.LayerNorm(model.hidden) if model.biases else nn.RMSNorm(model.hidden)


def fill(module: nn.Module, prefix: str, model: Transformer, seed: int) -> None:
    """Initialise each parameter by values that depend only on its name and the seed."""
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


# Distance of the seeds of two steps, so that seeds of their sequences do not collide.
_STEPS_APART = 1 << 32


def token_batch(
    model: Transformer, sequences: range, *, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw token ids and the ids that follow them, for some sequences of a step's batch."""
    rows = []
    for sequence in sequences:
        generator = torch.Generator().manual_seed(seed * 7919 + step * _STEPS_APART + sequence)
        rows.append(torch.randint(model.vocabulary, (model.sequence + 1,), generator=generator))
    text = torch.stack(rows)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy per token, in float64 if logits are float64, else float32."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class TransformerModel(nn.Module):
    """The entire model; its forward pass returns the loss."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embedding = Embedding(model)
        self.layers = nn.ModuleList(TransformerBlock(model) for _ in range(model.layers))
        self.head = Head(model)
        self.is_tied = model.tied_embeddings
        self.tie()

    def tie(self) -> None:
        """Share the embedding's weight with the output layer; call again after parameters were
        replaced."""
        if self.is_tied:
            self.head.logits.weight = self.embedding.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting the next tokens."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return token_loss(self.head(x), targets)


def built_in_model(
    model: Transformer, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TransformerModel:
    """Build the module of a transformer's shape, with weights drawn from the seed."""
    with torch.device("meta"):
        module = TransformerModel(model)
    module = module.to(dtype).to_empty(device="cpu")
    module.tie()
    fill(module.embedding, "embedding", model, seed)
    for number, layer in enumerate(module.layers):
        fill(layer, f"layers.{number}", model, seed)
    fill(module.head, "head", model, seed)
    return module
