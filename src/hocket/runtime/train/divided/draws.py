"""Random draws that depend on a seed alone, whatever was drawn before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def draws_of(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of a seed, after which the generators stand where they stood."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
