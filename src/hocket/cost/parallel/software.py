"""What the training program does that its speed and memory depend on, besides the division."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["plain", "flash"]
"""``plain`` keeps the matrix of all pairs of tokens; ``flash`` never writes it."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program and how it is set."""

    name: str
    dtype: str = "bfloat16"
    """Arithmetic of matrix products: float16, bfloat16, float8 or float32."""
    attention: Attention = "flash"
    gradient_bytes: int = 4
    """Bytes per parameter in which gradients are summed."""
    scatters_activations: bool = True
    """Whether tensor-parallel ranks each send their part to the next stage, which gathers it."""
    overlaps_tensor: bool = False
    """Whether tensor-parallel collectives hide behind matrix products."""
    overlaps_data: bool = False
    """Whether collectives of data-parallel ranks hide behind the backward pass."""
    fuses_accumulation: bool = True
    """Whether matrix products add to the gradients of earlier microbatches themselves; otherwise
    one more pass over all gradients does, after each microbatch."""
    gathers_by_tensor: bool = False
    """Whether fully divided weights are gathered tensor by tensor, which fills one network adapter
    at a time, instead of layer by layer."""
    spare_gradient_bytes: int = 0
    """Bytes per parameter of gradients that stay in memory beside their sum."""
    pause_s: float = 0.0
    """What the program adds to each pass over each layer, whatever its size, and nothing hides."""
