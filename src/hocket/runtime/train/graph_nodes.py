"""Nodes and edges of a captured CUDA graph: which call made which, and how calls are tied anew.

A capture on one stream is a chain of calls. Where each of them ended tells which nodes are its own
(`calls_of`); then the edges between calls are taken away and others put there (`change`). These are
functions of the CUDA driver: PyTorch hands out the graph but does not change it. O(nodes + edges).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hocket.capture.driver import call_driver

Nodes = tuple[int, ...]


class EdgeData(ctypes.Structure):
    """``CUgraphEdgeData``: how the later of two nodes is held back."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class Arrow(NamedTuple):
    """An edge of a CUDA graph."""

    src: int
    dst: int
    data: bytes = bytes(8)


def last_nodes(stream: int) -> Nodes:
    """What the next call on a stream that is captured will wait for."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    graph, nodes, data = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
    count = ctypes.c_size_t()
    call_driver(
        "cuStreamGetCaptureInfo_v3", ctypes.c_void_p(stream), ctypes.byref(status),
        ctypes.byref(number), ctypes.byref(graph), ctypes.byref(nodes), ctypes.byref(data),
        ctypes.byref(count),
    )  # fmt: skip
    return tuple(int(nodes[at] or 0) for at in range(count.value))


def arrows_of(graph: int) -> list[Arrow]:
    """All edges."""
    count = ctypes.c_size_t()
    call_driver("cuGraphGetEdges_v2", ctypes.c_void_p(graph), None, None, None, ctypes.byref(count))
    src, dst = ((ctypes.c_void_p * count.value)() for _ in range(2))
    data = (EdgeData * count.value)()
    call_driver("cuGraphGetEdges_v2", ctypes.c_void_p(graph), src, dst, data, ctypes.byref(count))
    rows = zip(src, dst, data, strict=True)
    return [Arrow(int(a or 0), int(b or 0), bytes(c)) for a, b, c in rows]


def change(graph: int, removed: Sequence[Arrow], added: Sequence[Arrow]) -> None:
    """Take edges away and put others there."""
    names = ("cuGraphRemoveDependencies_v2", "cuGraphAddDependencies_v2")
    for name, arrows in zip(names, (removed, added), strict=True):
        if arrows:
            src = (ctypes.c_void_p * len(arrows))(*(arrow.src for arrow in arrows))
            dst = (ctypes.c_void_p * len(arrows))(*(arrow.dst for arrow in arrows))
            data = (EdgeData * len(arrows))(*(EdgeData.from_buffer_copy(a.data) for a in arrows))
            call_driver(name, ctypes.c_void_p(graph), src, dst, data, ctypes.c_size_t(len(arrows)))


class Tied(NamedTuple):
    """Calls of a captured chain: the nodes that each has, and where it begins and ends."""

    first: list[Nodes]
    last: list[Nodes]
    between: list[Arrow]
    """Edges from one call to another."""
    num_nodes: list[int]


def calls_of(arrows: Iterable[Arrow], ends: Sequence[Nodes]) -> Tied:
    """Which nodes are whose: those before the end of a call that no earlier call has.

    ``ends`` are the nodes at which the capture stood after each call.
    """
    into: dict[int, list[Arrow]] = defaultdict(list)
    for arrow in arrows:
        into[arrow.dst].append(arrow)
    owner: dict[int, int] = {}
    first, last, between, num_nodes = [], [], [], []
    for call, end in enumerate(ends):
        own = list(_new_nodes(end, into, owner))
        owner.update(dict.fromkeys(own, call))
        entering = [a for node in own for a in into[node] if owner[a.src] != call]
        between += entering
        begun = {a.dst for a in entering} | {node for node in own if not into[node]}
        first.append(tuple(node for node in own if node in begun))
        last.append(tuple(node for node in end if owner[node] == call))
        num_nodes.append(len(own))
    return Tied(first, last, between, num_nodes)


def _new_nodes(end: Nodes, into: dict[int, list[Arrow]], owner: dict[int, int]) -> Iterator[int]:
    """Nodes from which the end is reached, of no call before."""
    waiting, seen = [*end], set(end)
    while waiting:
        node = waiting.pop()
        if node in owner:
            continue
        yield node
        before = {a.src for a in into[node]} - seen
        seen |= before
        waiting += before


def new_arrows(calls: Tied, pairs: Iterable[tuple[int, int]]) -> list[Arrow]:
    """Edges from where calls end to where those that wait for them begin."""
    return [
        Arrow(src, dst)
        for earlier, later in pairs
        for src in calls.last[earlier]
        for dst in calls.first[later]
    ]
