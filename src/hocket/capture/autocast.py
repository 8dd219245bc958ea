"""Autocast as accelerators run it, captured on tensors that stand in for theirs.

A step that is recorded for an accelerator has tensors of a processor, on which
``torch.autocast("cuda")`` does nothing; without CUDA PyTorch even switches it off. Meanwhile it is
autocast of a processor in the same type, so that the graph has the types of the machine that is
planned for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def stand_in_autocast() -> Iterator[None]:
    """Autocast that this thread makes for CUDA is that of a processor."""
    own, here = torch.autocast.__init__, threading.get_ident()

    def make(
        autocast: torch.autocast, device_type: str, dtype: torch.dtype | None = None,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        if device_type == "cuda" and threading.get_ident() == here:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        own(autocast, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = make  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = own  # type: ignore[method-assign]
