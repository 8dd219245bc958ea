"""Shape of a decoder-only transformer, which determines its size, FLOPs and traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MlpKind = Literal["gelu", "swiglu"]
"""``gelu``: two matrices; ``swiglu``: three, one of them a gate."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the dense MLP."""

    count: int
    """Routed experts per layer."""
    active: int
    """Routed experts per token (top-k)."""
    mlp_width: int
    """Inner width of one expert."""
    shared_width: int = 0
    """Inner width of the shared experts together, which every token uses; 0 for none."""
    dense_layers: int = 0
    """Layers at the start that keep the dense MLP."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Shape and training options of a decoder-only transformer."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Key and value heads: ``heads`` without sharing, 1 for multi-query attention."""
    head_width: int
    mlp_width: int
    mlp: MlpKind
    vocabulary: int
    sequence: int
    """Tokens of one training sequence."""
    tied_embeddings: bool
    """True if the output layer is the embedding's matrix."""
    learned_positions: bool
    biases: bool
    """True if linear layers and norms have biases."""
    dropout: bool
    """True if dropout masks are saved for the backward pass."""
    experts: Experts | None = None
    source: str = ""
    """Source of the figures."""
