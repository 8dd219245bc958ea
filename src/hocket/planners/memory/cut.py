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

from hocket.base.arrays import BoolArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.communication.flow import UNLIMITED, FlowGraph, max_flow
from hocket.planners.memory.storages import Direction, Storages

BETWEEN, BEFORE, AFTER = 0, 1, 2
"""Sides of an op: what may run before or after it, what runs before it, itself and what follows."""


Pairs = tuple[LongArray, LongArray]
"""Ops that run before others, and these."""
NO_PAIRS: Pairs = (zeros(0), zeros(0))


class OpCut(NamedTuple):
    """The cheapest moment for an op."""

    op: int
    num_bytes: int
    """Bytes held while it runs: no order holds fewer then."""
    has_run: BoolArray
    """Per op: whether it has run at that moment."""


class CutFlow(NamedTuple):
    """What proves the bytes of a cut: as much flows from what runs before an op to what follows."""

    op: int
    through: LongArray
    """Per storage: how much flows through it."""
    to_reader: LongArray
    """Per entry of `Storages.readers`: how much of its storage's flow goes to this reader."""
    back: LongArray
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


def sides_of(ways: Direction, op: int, further: Pairs = NO_PAIRS) -> LongArray:
    """Per op: on which side of ``op`` it is, with further pairs of which the first runs before."""
    side, stack = zeros(len(ways.num_waits)), zeros(len(ways.num_waits) + 1)
    stack[0] = op
    _reach(ways.before_ptr, ways.before, BEFORE, side, stack)
    stack[0] = op
    _reach(ways.after_ptr, ways.after, AFTER, side, stack)
    side[op] = AFTER
    pairs = list(zip(*(column.tolist() for column in further), strict=True))
    is_open = True
    while is_open:
        is_open = False
        for first, second in pairs:
            if side[first] == BETWEEN and (side[second] == BEFORE or second == op):
                side[first], stack[0], is_open = BEFORE, first, True
                _reach(ways.before_ptr, ways.before, BEFORE, side, stack)
            if side[second] == BETWEEN and side[first] == AFTER:
                side[second], stack[0], is_open = AFTER, second, True
                _reach(ways.after_ptr, ways.after, AFTER, side, stack)
    return side


def taken_by(storages: Storages, op: int) -> int:
    """Bytes that an op takes when it starts."""
    first, stop = np.searchsorted(storages.producer, [op, op + 1])
    return int(storages.num_bytes[first:stop].sum() + storages.passing_bytes[op])


class _Network(NamedTuple):
    """Pairs of nodes with what may flow from the first to the second, before they are linked."""

    number: LongArray
    """Node of each op in between, -1 for others."""
    tail: LongArray
    head: LongArray
    limit: LongArray
    kind: LongArray
    """What the flow of a pair is counted for: a storage, its only reader too, one of its readers,
    or a precedence."""
    which: LongArray
    """The storage, the entry of `Storages.readers`, or that of `Storages.before`."""
    size: LongArray
    """Two numbers: pairs and nodes."""


_STORAGE, _LONE_READ, _READ, _PAIR = 0, 1, 2, 3
_SOURCE, _SINK = 0, 1


@kernel
def _node(network: _Network, side: LongArray, op: int) -> int:
    if side[op] == BEFORE:
        return _SOURCE
    if side[op] == AFTER:
        return _SINK
    if network.number[op] < 0:
        network.number[op] = network.size[1]
        network.size[1] += 1
    found: int = network.number[op]
    return found


@kernel
def _add(network: _Network, tail: int, head: int, limit: int, kind: int, which: int) -> None:
    at = network.size[0]
    network.size[0] += 1
    network.tail[at] = tail
    network.head[at] = head
    network.limit[at] = limit
    network.kind[at] = kind
    network.which[at] = which


@kernel
def _list_pairs(
    network: _Network,
    side: LongArray,
    num_bytes: LongArray,
    producer: LongArray,
    is_kept: BoolArray,
    reader_ptr: LongArray,
    readers: LongArray,
    before: LongArray,
    after: LongArray,
) -> None:
    for storage in range(len(producer)):
        if side[producer[storage]] == AFTER:
            continue
        goes_on, num_inner, inner = is_kept[storage], 0, 0
        for at in range(reader_ptr[storage], reader_ptr[storage + 1]):
            if side[readers[at]] == AFTER:
                goes_on = True
            elif side[readers[at]] == BETWEEN:
                num_inner += 1
                inner = at
        if num_inner == 0 and not goes_on:
            continue
        tail, size = _node(network, side, producer[storage]), num_bytes[storage]
        if goes_on:
            _add(network, tail, _SINK, size, _STORAGE, storage)
            continue
        if num_inner == 1:
            _add(network, tail, _node(network, side, readers[inner]), size, _LONE_READ, inner)
            continue
        own = network.size[1]
        network.size[1] += 1
        _add(network, tail, own, size, _STORAGE, storage)
        for at in range(reader_ptr[storage], reader_ptr[storage + 1]):
            if side[readers[at]] == BETWEEN:
                head = _node(network, side, readers[at])
                _add(network, own, head, UNLIMITED, _READ, at)
    for at in range(len(before)):
        if side[before[at]] == BETWEEN and side[after[at]] == BETWEEN:
            tail = _node(network, side, after[at])
            _add(network, tail, _node(network, side, before[at]), UNLIMITED, _PAIR, at)


@kernel
def _link(network: _Network, graph: FlowGraph, place: LongArray) -> None:
    """Sort both arcs of each pair by their tails."""
    ptr, num_pairs = graph.arc_ptr, network.size[0]
    for at in range(num_pairs):
        ptr[network.tail[at] + 1] += 1
        ptr[network.head[at] + 1] += 1
    for node in range(1, len(ptr)):
        ptr[node] += ptr[node - 1]
    free = graph.next_arc
    for node in range(len(free)):
        free[node] = ptr[node]
    for at in range(num_pairs):
        tail, head = network.tail[at], network.head[at]
        there, back = free[tail], free[head]
        free[tail] += 1
        free[head] += 1
        graph.arc_head[there], graph.arc_head[back] = head, tail
        graph.arc_reverse[there], graph.arc_reverse[back] = back, there
        place[at] = there


class _Solved(NamedTuple):
    side: LongArray
    network: _Network
    graph: FlowGraph
    moved: LongArray
    """Per pair: what flows."""
    total: int


def _solved(storages: Storages, op: int, further: Pairs) -> _Solved:
    side = sides_of(storages.forwards, op, further)
    before, after = storages.before, storages.after
    if len(further[0]):
        before, after = np.append(before, further[0]), np.append(after, further[1])
    most = len(storages.producer) + len(storages.readers) + len(before)
    network = _Network(
        number=np.full(storages.num_ops, -1, dtype=np.int64),
        tail=zeros(most), head=zeros(most), limit=zeros(most), kind=zeros(most), which=zeros(most),
        size=np.array([0, 2]),
    )  # fmt: skip
    _list_pairs(
        network, side, storages.num_bytes, storages.producer, storages.is_kept,
        storages.reader_ptr, storages.readers, before, after,
    )  # fmt: skip
    num_pairs, num_nodes = network.size.tolist()
    graph = FlowGraph(
        arc_ptr=zeros(num_nodes + 1),
        arc_head=zeros(2 * num_pairs),
        arc_reverse=zeros(2 * num_pairs),
        level=zeros(num_nodes),
        next_arc=zeros(num_nodes),
        path=zeros(num_nodes + 1),
    )
    place, capacity = zeros(num_pairs), zeros(2 * num_pairs)
    _link(network, graph, place)
    capacity[place] = network.limit[:num_pairs]
    total = int(max_flow(graph, capacity, _SOURCE, _SINK, UNLIMITED))
    return _Solved(side, network, graph, capacity[graph.arc_reverse[place]], total)


def minimum_cut(storages: Storages, op: int, further: Pairs = NO_PAIRS) -> OpCut:
    """The cheapest moment for ``op``, where further pairs of ops are ordered as well."""
    found = _solved(storages, op, further)
    has_run = found.side == BEFORE
    inner = found.network.number >= 0
    has_run[inner] = found.graph.level[found.network.number[inner]] >= 0
    return OpCut(op, found.total + taken_by(storages, op), has_run)


def maximum_flow(storages: Storages, op: int) -> CutFlow:
    """The flow that proves what the minimum cut of ``op`` is."""
    side, network, _, moved, _ = _solved(storages, op, NO_PAIRS)
    kind, which = network.kind[: len(moved)], network.which[: len(moved)]
    through, to_reader = zeros(len(storages.producer)), zeros(len(storages.readers))
    through[which[kind == _STORAGE]] = moved[kind == _STORAGE]
    is_read, is_lone = (kind == _LONE_READ) | (kind == _READ), kind == _LONE_READ
    to_reader[which[is_read]] = moved[is_read]
    storage = np.repeat(np.arange(len(through)), np.diff(storages.reader_ptr))
    through[storage[which[is_lone]]] = moved[is_lone]
    # What flows on through a storage goes to its first reader that comes after, if it has one.
    late = np.flatnonzero(side[storages.readers] == AFTER)[::-1]
    first = np.full(len(through), -1, dtype=np.int64)
    first[storage[late]] = late
    ends = np.flatnonzero((first >= 0) & (through > 0))
    to_reader[first[ends]] = through[ends]
    used = (kind == _PAIR) & (moved > 0)
    pair = which[used]
    back = np.stack((storages.before[pair], storages.after[pair], moved[used]), axis=1)
    return CutFlow(op, through, to_reader, back)
