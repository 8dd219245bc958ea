"""Shape of a decoder-only transformer, which determines its parameters, FLOPs and traffic.

`Transformer` has the sizes, `Experts` those of a mixture of experts, `Latent` those of multi-head
latent attention. `AttentionWidths` derives the sizes of attention's matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
class Latent:
    """Multi-head latent attention (MLA, DeepSeek-V2): keys and values come from one small vector.

    ``head_width`` of the model is that of queries and keys, with the part for rotary positions.
    """

    key_rank: int
    """Width of the vector that all keys and values are made of."""
    rope_width: int
    """Elements per head with rotary positions; all heads share those of the keys."""
    value_width: int
    """Elements of a value per head."""
    query_rank: int = 0
    """Width of the vector that queries are made of; 0 if they are made of the hidden states."""


class AttentionWidths(NamedTuple):
    """Sizes of attention's tensors per token, over all heads, and of its weight matrices."""

    query_width: int
    key_width: int
    value_width: int
    output_width: int
    latent_width: int
    """Columns of the projections into the latent vectors of MLA; 0 for other models."""
    query_rank: int
    """Rows of the matrix that makes queries: the hidden width without MLA."""
    key_rank: int
    """Rows of the matrix that makes keys and values."""
    up_width: int
    """Columns of the matrix that makes keys and values."""


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
    latent: Latent | None = None
    source: str = ""
    """Source of the figures."""

    @property
    def attention(self) -> AttentionWidths:
        """Sizes of attention's tensors and weight matrices."""
        latent, query = self.latent, self.heads * self.head_width
        if latent is None:
            key = self.kv_heads * self.head_width
            return AttentionWidths(query, key, key, query, 0, self.hidden, self.hidden, 2 * key)
        value, rope = self.heads * latent.value_width, self.heads * latent.rope_width
        return AttentionWidths(
            query_width=query,
            key_width=query,
            value_width=value,
            output_width=value,
            latent_width=latent.query_rank + latent.key_rank + latent.rope_width,
            query_rank=latent.query_rank or self.hidden,
            key_rank=latent.key_rank,
            up_width=query - rope + value,
        )
