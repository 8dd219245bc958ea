"""Places: on which devices each tensor is during the step, and in whose bytes it lives there.

A place is a pair (tensor, device). Every tensor is at its home, and on each other device
with an op that reads it; a transfer fills these further places unless the tensor is the batch. An
alias lives in the bytes of its base where both are on the device from the start or made there.
O(reads log reads) in numpy, where only reads from other devices are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, IntArray
from hocket.graph.graph import Graph, Role

_MAX_ALIAS_DOUBLINGS = 32
"""Enough for a chain of 2**32 aliases."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Places:
    """Places in the order: tensors at their homes, then the others by (tensor, device)."""

    tensor: IntArray
    device: IntArray
    is_before: NDArray[np.bool_]
    """Whether the tensor is there when the step begins."""
    storage: IntArray
    """The place whose bytes this one lives in: itself unless it is an alias."""
    num_bytes: ByteArray
    """Bytes that come with the place: 0 where it lives in another's."""
    is_kept: NDArray[np.bool_]
    """Whether the bytes stay until the end of the step."""
    num_uses: IntArray
    """How many ends release the bytes: of the producer, of each read, of each transfer out."""
    reader: IntArray
    """The op of each entry of ``graph.reads``."""
    read_place: IntArray
    """The place of each entry of ``graph.reads``."""
    transfer_place: IntArray
    """The place that each transfer fills, in order of (tensor, device)."""
    send_ptr: ByteArray
    """The end of op i makes transfers ``send_ptr[i]`` up to ``send_ptr[i + 1]`` ready; those before
    ``send_ptr[0]`` are ready when the step begins."""


def home_devices(graph: Graph, device_of: IntArray) -> IntArray:
    """The device on which each tensor first is: that of its `Graph.home_op`, or device 0."""
    return np.append(device_of, 0)[graph.home_op].astype(np.int32)


def find_places(graph: Graph, device_of: IntArray, num_devices: int) -> Places:
    """Where the tensors of ``graph`` are when its ops run on ``device_of``."""
    num_tensors = graph.num_tensors
    home = home_devices(graph, device_of)
    reader = np.repeat(np.arange(graph.num_ops, dtype=np.int32), np.diff(graph.read_ptr))
    read_place = graph.reads.copy()
    read_device = device_of[reader]
    away = np.flatnonzero(read_device != home[graph.reads])
    key = graph.reads[away].astype(np.int64) * num_devices + read_device[away]
    away_key, inverse = _distinct(key)
    read_place[away] = num_tensors + inverse
    away_tensor, away_device = np.divmod(away_key, max(num_devices, 1))
    tensor: IntArray = np.concatenate((np.arange(num_tensors), away_tensor)).astype(np.int32)
    device: IntArray = np.concatenate((home, away_device)).astype(np.int32)

    is_made = graph.tensor_producer[tensor] >= 0
    is_input = graph.tensor_role[tensor] == Role.INPUT
    is_away = np.arange(len(tensor)) >= num_tensors
    is_copy = is_away & (is_made | ~is_input)
    storage = _storages(graph, tensor, device, is_copy, away_key, num_devices)
    owns = storage == np.arange(len(tensor))
    transfer_place = np.flatnonzero(is_copy).astype(np.int32)
    is_kept = np.zeros(len(tensor), dtype=np.bool_)
    is_kept[storage[np.where(is_copy, is_input, graph.is_held[tensor])]] = True
    num_uses = (
        np.bincount(storage[read_place], minlength=len(tensor))
        + np.bincount(storage[tensor[transfer_place]], minlength=len(tensor))
        + (owns & is_made & ~is_copy)
    )
    return Places(
        tensor=tensor,
        device=device,
        is_before=~is_made & ~is_copy,
        storage=storage,
        num_bytes=np.where(owns, graph.tensor_bytes[tensor], 0),
        is_kept=is_kept,
        num_uses=num_uses.astype(np.int32),
        reader=reader,
        read_place=read_place,
        transfer_place=transfer_place,
        send_ptr=np.searchsorted(tensor[transfer_place], graph.made_ptr).astype(np.int64),
    )


def _storages(
    graph: Graph,
    tensor: IntArray,
    device: IntArray,
    is_copy: NDArray[np.bool_],
    away_key: NDArray[np.int64],
    num_devices: int,
) -> IntArray:
    """The place whose bytes each place lives in."""
    storage = np.arange(len(tensor), dtype=np.int32)
    alias = np.flatnonzero((graph.alias_of[tensor] >= 0) & ~is_copy)
    if not len(alias):
        return storage
    base = graph.alias_of[tensor[alias]]
    base_key = base.astype(np.int64) * num_devices + device[alias]
    found = np.searchsorted(away_key, base_key)
    is_away = np.zeros(len(alias), dtype=np.bool_)
    inside = found < len(away_key)
    is_away[inside] = away_key[found[inside]] == base_key[inside]
    # Before the step a copy has not come yet, so nothing can live in it: own bytes then.
    made = graph.tensor_producer[tensor[alias]] >= 0
    place = np.where(is_away, graph.num_tensors + found, alias)
    place = np.where(is_away & ~made & is_copy[np.where(is_away, place, 0)], alias, place)
    place = np.where(device[base] == device[alias], base, place)
    storage[alias] = place
    return _roots(storage)


def _distinct(key: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct keys, ascending, and which of them each key is.

    As ``np.unique`` with its inverse, but sorting numbers instead of positions: numpy does that
    several times as fast.
    """
    count = max(len(key), 1)
    packed = np.sort(key * count + np.arange(len(key)))
    ordered, position = packed // count, packed % count
    is_new = np.ones(len(key), dtype=np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    inverse = np.empty(len(key), dtype=np.int64)
    inverse[position] = np.cumsum(is_new) - 1
    return ordered[is_new], inverse


def _roots(parent: IntArray) -> IntArray:
    """Follow ``parent`` from every index to the end of its chain."""
    for _ in range(_MAX_ALIAS_DOUBLINGS):
        further = parent[parent]
        if np.array_equal(further, parent):
            break
        parent = further
    return parent
