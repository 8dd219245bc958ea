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
    configs = {id(config): config for module in model.modules()
               if (config := getattr(module, "config", None)) is not None}  # fmt: skip
    # Parts that read and parts that write have configs of their own.
    caching: list[Any] = [c for c in configs.values() if getattr(c, "use_cache", None)]
    before = [config.use_cache for config in caching]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config, use_cache in zip(caching, before, strict=True):
            config.use_cache = use_cache


def single_number(value: Any) -> Any:
    """A single number or a word without what its gradient needs; None for all else.

    Caches among what a model returns hold the whole graph.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    return value if isinstance(value, int | float | str) else None
