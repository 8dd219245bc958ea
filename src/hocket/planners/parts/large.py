"""Which graphs are so large that planning or simulating them once more takes long."""

from __future__ import annotations

_LARGE_OPS = 50_000


def is_large(num_ops: int) -> bool:
    """Whether planners do with one plan, one order or few rounds what they would else try again."""
    return num_ops > _LARGE_OPS
