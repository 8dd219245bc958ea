"""The least bytes that any order holds when a given op runs, as a minimum cut.

Just before an op runs, a set of ops has run that holds all that comes before it, nothing that comes
after it, and with each op all that comes before that one. The bytes of such a set are those of the
storages with a producer inside and a reader outside, so the least of them is a minimum cut: one arc
per storage with its bytes, arcs without limit from each op to those before it (Picard, 1976,
"Maximal closure of a graph", on storages instead of weights). Whole bytes, so nothing is rounded.
The maximum flow proves the value; only ops that are neither before nor after the given one take
part. Dinic's algorithm, see `hocket.planners.communication.flow`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.communication.flow import UNLIMITED, flow_graph, max_flow
from hocket.planners.memory.storages import Direction, Storages

BETWEEN, BEFORE, AFTER = 0, 1, 2
"""Sides of an op: what may run before or after it, what runs before it, itself and what follows."""


class OpCut(NamedTuple):
    """The cheapest moment for an op."""

    op: int
    num_bytes: int
    """Bytes held while it runs: no order holds fewer then."""
    has_run: NDArray[np.bool_]
    """Per op: whether it has run at that moment."""
    flow: LongArray
    """Per storage: how much of the flow that proves the bytes goes through it."""
    read_flow: LongArray
    """Per entry of `Storages.readers`: how much of its storage's flow goes to this reader."""
    pair_flow: LongArray
    """[pair, 3]: an op, one that comes after it, and what flows back from that one to it."""


@kernel
def _reach(ptr: LongArray, nodes: LongArray, mark: int, side: LongArray, stack: LongArray) -> None:
    """Mark all that can be reached from ``stack[0]``, but not that itself."""
    size = 1
    while size > 0:
        size -= 1
        node = stack[size]
        for at in range(ptr[node], ptr[node + 1]):
            if side[nodes[at]] != mark:
                side[nodes[at]] = mark
                stack[size] = nodes[at]
                size += 1


def sides_of(ways: Direction, op: int) -> LongArray:
    """Per op: on which side of ``op`` it is."""
    side, stack = zeros(len(ways.num_waits)), zeros(len(ways.num_waits) + 1)
    stack[0] = op
    _reach(ways.before_ptr, ways.before, BEFORE, side, stack)
    stack[0] = op
    _reach(ways.after_ptr, ways.after, AFTER, side, stack)
    side[op] = AFTER
    return side


def taken_by(storages: Storages, op: int) -> int:
    """Bytes that an op takes when it starts."""
    first, stop = np.searchsorted(storages.producer, [op, op + 1])
    return int(storages.num_bytes[first:stop].sum() + storages.passing_bytes[op])


def minimum_cut(storages: Storages, op: int) -> OpCut:
    """The cheapest moment for ``op``."""
    side = sides_of(storages.forwards, op)
    num_ops, num_storages = storages.num_ops, len(storages.producer)
    storage_of_read = np.repeat(np.arange(num_storages), np.diff(storages.reader_ptr))
    reader_side = side[storages.readers]
    goes_on = storages.is_kept.copy()
    goes_on[storage_of_read[reader_side == AFTER]] = True
    made = side[storages.producer]
    source, sink = num_ops, num_ops + 1
    # Node of an op, or of what runs before or after in any case.
    node = np.where(side == BEFORE, source, np.where(side == AFTER, sink, np.arange(num_ops)))
    counts = (made != AFTER) & ~goes_on
    inner = np.flatnonzero(counts[storage_of_read] & (reader_side == BETWEEN))
    num_inner = np.bincount(storage_of_read[inner], minlength=num_storages)
    to_sink = np.flatnonzero((made != AFTER) & goes_on)
    alone = num_inner == 1
    single = inner[alone[storage_of_read[inner]]]
    several = inner[~alone[storage_of_read[inner]]]
    own = np.flatnonzero(num_inner > 1)
    own_node = np.zeros(num_storages, dtype=np.int64)
    own_node[own] = num_ops + 2 + np.arange(len(own))
    order = np.flatnonzero((side[storages.before] == BETWEEN) & (side[storages.after] == BETWEEN))
    one = storage_of_read[single]
    tails = (
        node[storages.producer[to_sink]], node[storages.producer[one]],
        node[storages.producer[own]], own_node[storage_of_read[several]], storages.after[order],
    )  # fmt: skip
    heads = (
        np.full(len(to_sink), sink), storages.readers[single], own_node[own],
        storages.readers[several], storages.before[order],
    )  # fmt: skip
    sizes = (
        storages.num_bytes[to_sink], storages.num_bytes[one], storages.num_bytes[own],
        np.full(len(several), UNLIMITED), np.full(len(order), UNLIMITED),
    )  # fmt: skip
    used = np.unique(np.concatenate((*tails, *heads, [source, sink])))
    short = np.zeros(num_ops + 2 + len(own), dtype=np.int64)
    short[used] = np.arange(len(used))
    pairs = short[np.stack((np.concatenate(tails), np.concatenate(heads)), axis=1)]
    graph, place = flow_graph(len(used), pairs)
    capacity = np.zeros(len(graph.arc_head), dtype=np.int64)
    limits = np.concatenate(sizes).astype(np.int64)
    capacity[place] = limits
    total = max_flow(graph, capacity, int(short[source]), int(short[sink]), UNLIMITED)
    moved = capacity[graph.arc_reverse[place]]
    parts = np.split(moved, np.cumsum([len(tail) for tail in tails])[:-1])
    flow = np.zeros(num_storages, dtype=np.int64)
    flow[to_sink], flow[one], flow[own] = parts[:3]
    used_pairs = order[parts[4] > 0]
    pair_flow = np.stack(
        (storages.before[used_pairs], storages.after[used_pairs], parts[4][parts[4] > 0]), axis=1
    )
    read_flow = np.zeros(len(storages.readers), dtype=np.int64)
    read_flow[single], read_flow[several] = parts[1], parts[3]
    _give_to_first(read_flow, storages, to_sink, parts[0], reader_side, storage_of_read)
    has_run = side == BEFORE
    reached = np.zeros(num_ops + 2 + len(own), dtype=np.bool_)
    reached[used] = graph.level >= 0
    has_run |= (side == BETWEEN) & reached[:num_ops]
    return OpCut(op, total + taken_by(storages, op), has_run, flow, read_flow, pair_flow)


def _give_to_first(
    read_flow: LongArray,
    storages: Storages,
    to_sink: LongArray,
    amount: LongArray,
    reader_side: LongArray,
    storage_of_read: LongArray,
) -> None:
    """What flows on through a storage goes to its first reader that comes after, if it has one."""
    late = np.flatnonzero(reader_side == AFTER)
    first = np.full(len(storages.producer), -1, dtype=np.int64)
    first[storage_of_read[late[::-1]]] = late[::-1]
    target = first[to_sink]
    read_flow[target[target >= 0]] = amount[target >= 0]
