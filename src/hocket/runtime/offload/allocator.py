"""Memory of a card beyond the tensors of a step: PyTorch's caching allocator and the CUDA context.

A budget is what a card must have: `torch.cuda.max_memory_reserved()` and the CUDA context. By
default the allocator never joins its segments, so that it reserved up to 39 % more than was
allocated. Expandable segments grow and shrink by pages, and unused pages are returned before an
allocation fails; so they are switched on for training within a budget.

The setter is a private function of PyTorch (checked with 2.11 and 2.13): there is no public one,
and the environment variable is read before a program can set it.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_SETTING = "expandable_segments"
_PAGE_BYTES = 20 * 2**20
"""Growth of segments of large tensors; those of small ones grow by a tenth of it."""
_NUM_PARTIAL_PAGES = 2
"""Pages that are partly used: one of large and one of small tensors."""
_FRAGMENTED = 0.04
"""Share of allocated bytes that is lost in gaps: 1.5 to 5.5 % for three models on an H200, of which
the allocator returns a part when it has to."""
_FRAGMENTED_IN_GRAPH = 0.02
"""Added by a CUDA graph, whose pool returns nothing."""
_CONTEXT_GROWTH_BYTES = 160 * 2**20
"""Kernels that the first steps load: the context grew from 0.67 to 0.83 GiB there."""
_MAX_CONTEXT_BYTES = 2**30
"""Larger values include memory of other processes."""


def expand_segments(device: torch.device) -> str:
    """Switch the allocator to expandable segments; returns the reason where that is impossible."""
    if device.type != "cuda":
        return ""
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        return f"PyTorch's allocator is {backend}"
    name, given = _given()
    settings = dict(entry.split(":", 1) for entry in given.split(",") if ":" in entry)
    if settings.get(_SETTING, "True") != "True":
        return f"{name} switches them off"
    if _SETTING not in settings:
        # Settings that are not named return to their defaults, so the given ones are named again.
        _set(",".join(filter(None, (given, f"{_SETTING}:True"))))
    torch.cuda.empty_cache()
    return "" if _are_expandable(device) else "this driver or platform has none"


def _given() -> tuple[str, str]:
    """Return the environment variable of the allocator's settings, and its value."""
    return next(((name, os.environ[name]) for name in _VARIABLES if os.environ.get(name)), ("", ""))


def _set(settings: str) -> None:
    setter: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (setter or torch.cuda.memory._set_allocator_settings)(settings)


def _are_expandable(device: torch.device) -> bool:
    """True if a new segment is expandable: PyTorch ignores the setting where it cannot."""
    probe = torch.empty(_PAGE_BYTES, dtype=torch.uint8, device=device)
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    found = any(segment.get("is_expandable", False) for segment in segments)
    del probe
    torch.cuda.empty_cache()
    return found


def card_bytes(device: torch.device, allocated_bytes: int, *, is_replayed: bool = False) -> int:
    """Return the memory that a card must have for a step that allocates so much."""
    if device.type != "cuda":
        return allocated_bytes
    part = _FRAGMENTED + (_FRAGMENTED_IN_GRAPH if is_replayed else 0.0)
    gaps = int(part * allocated_bytes) + _NUM_PARTIAL_PAGES * _PAGE_BYTES
    return allocated_bytes + gaps + context_bytes(device) + _CONTEXT_GROWTH_BYTES


def context_bytes(device: torch.device) -> int:
    """Return the memory of the process beside the allocator: context, kernels, libraries."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return min(max(used, 0), _MAX_CONTEXT_BYTES)
