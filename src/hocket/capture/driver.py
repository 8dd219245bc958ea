"""CUDA driver functions that PyTorch does not expose."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments: Any) -> None:
    """Call a driver function; raises `RuntimeError` if it fails."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} of the CUDA driver failed with error {code}")


def num_captured(stream: int) -> int:
    """Number of nodes in the CUDA graph that a stream is being captured into."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    call_driver(
        "cuStreamGetCaptureInfo_v3", ctypes.c_void_p(stream), ctypes.byref(status),
        ctypes.byref(number), ctypes.byref(graph), None, None, None,
    )  # fmt: skip
    count = ctypes.c_size_t()
    call_driver("cuGraphGetNodes", graph, None, ctypes.byref(count))
    return count.value
