"""What models keep for generating words, which is no part of training.

Keys and values of attention in a cache are copies that no gradient needs, and a part that is
computed again would add them once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Models of Hugging Face whose configuration asks for a cache go without, as they were then."""
    # Encoders and decoders may have configurations of their own.
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    caching: list[Any] = [each for each in found.values() if getattr(each, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
