"""What a step keeps of what a model returns, and what the model must not keep itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Keys and values that Hugging Face's models keep for generation are no part of training."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before:
        config.use_cache = False
    try:
        yield
    finally:
        if before:
            config.use_cache = before


def single_number(value: Any) -> Any:
    """A single number or a word without what its gradient needs; None for all else.

    Caches among what a model returns hold the whole graph.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    return value if isinstance(value, int | float | str) else None
