"""What a step keeps of what a model returns."""

from __future__ import annotations

from typing import Any

import torch


def single_number(value: Any) -> Any:
    """A single number or a word without what its gradient needs; None for all else.

    Caches among what a model returns hold the whole graph.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    return value if isinstance(value, int | float | str) else None
