"""Memory that training takes on a GPU beyond its tensors: caching allocator and CUDA context.

A memory budget covers `torch.cuda.max_memory_reserved()` and the CUDA context, so `card_bytes`
estimates both from allocated bytes. By default the allocator never merges its segments, and
reserved up to 39 % more than was allocated. Expandable segments grow and shrink by pages, and
return unused pages before an allocation fails. `expand_segments` therefore switches them on for
training within a budget. It uses PyTorch's private setter (checked with 2.11 and 2.13), because
there is no public one, and the environment variable is read before a program can set it.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_SETTING = "expandable_segments"
_PAGE_BYTES = 20 * 2**20
"""Granularity at which segments of large tensors grow; for small tensors it is a tenth of this."""
_NUM_PARTIAL_PAGES = 2
"""Partly used pages: one of large tensors and one of small tensors."""
_FRAGMENTED = 0.04
"""Fraction of allocated bytes lost to fragmentation: 1.5 to 5.5 % for three models on an H200; the
allocator recovers a part of that when memory is short."""
_FRAGMENTED_IN_GRAPH = 0.02
"""Additional fraction with a CUDA graph, whose memory pool returns nothing."""
_CONTEXT_GROWTH_BYTES = 160 * 2**20
"""Growth of the CUDA context by kernels that first steps load: measured from 0.67 to 0.83 GiB."""
_MAX_CONTEXT_BYTES = 2**30
"""Upper limit of the context's size: larger measurements include memory of other processes."""


def expand_segments(device: torch.device) -> str:
    """Switch to expandable segments; return the reason if that is impossible, else an empty
    string."""
    if device.type != "cuda":
        return ""
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        return f"PyTorch's allocator is {backend}"
    name, given = _given()
    settings = dict(entry.split(":", 1) for entry in given.split(",") if ":" in entry)
    if settings.get(_SETTING, "True") != "True":
        return f"{name} switches them off"
    if _SETTING not in settings:
        # The setter resets settings that it does not name, so the user's are passed again.
        _set(",".join(filter(None, (given, f"{_SETTING}:True"))))
    torch.cuda.empty_cache()
    return "" if _are_expandable(device) else "this driver or platform has none"


def _given() -> tuple[str, str]:
    """Return name and value of the variable with the allocator's settings; empty if unset."""
    return next(((name, os.environ[name]) for name in _VARIABLES if os.environ.get(name)), ("", ""))


def _set(settings: str) -> None:
    setter: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (setter or torch.cuda.memory._set_allocator_settings)(settings)


def _are_expandable(device: torch.device) -> bool:
    """True if new segments are expandable; PyTorch ignores the setting on unsupported platforms."""
    probe = torch.empty(_PAGE_BYTES, dtype=torch.uint8, device=device)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    found = any(segment.get("is_expandable", False) for segment in segments)
    del probe
    torch.cuda.empty_cache()
    return found


def card_bytes(device: torch.device, allocated_bytes: int, *, is_replayed: bool = False) -> int:
    """Estimate the device memory that a step needs if its tensors take ``allocated_bytes``."""
    if device.type != "cuda":
        return allocated_bytes
    part = _FRAGMENTED + (_FRAGMENTED_IN_GRAPH if is_replayed else 0.0)
    gaps = int(part * allocated_bytes) + _NUM_PARTIAL_PAGES * _PAGE_BYTES
    return allocated_bytes + gaps + context_bytes(device) + _CONTEXT_GROWTH_BYTES


def context_bytes(device: torch.device) -> int:
    """Estimate the process's GPU memory outside the allocator: context, kernels, libraries."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return min(max(used, 0), _MAX_CONTEXT_BYTES)
