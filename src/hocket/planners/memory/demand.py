"""Demand-driven emission: compute what the next result needs, and nothing before it is needed.

The ops that nobody waits for are visited in the graph's order or against it, and each is preceded
by what it still misses, depth first. Of what one op misses, that goes first whose making holds most
beyond its result (Sethi and Ullman, 1970, with bytes for registers): so a sum over many steps adds
each part as it is made, and chains of different layers are not mixed. Exact on trees, a good start
elsewhere. O(ops + precedences · log).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import Heaps, new_heaps, zeros
from hocket.kernels.heaps import pop, push
from hocket.planners.memory.storages import Direction, Storages

_ZERO = cast(int, np.int64(0))
"""For a plain 0 as argument the compiler would make a further version of a function."""


class _Needs(NamedTuple):
    result_bytes: LongArray
    """Per op: what is held of it when it has run."""
    most_bytes: LongArray
    """Per op: what is held at most while it and all that it needs are made, nothing shared."""
    before: LongArray
    """As `Direction.before`, in the order in which they are made."""
    queue: LongArray
    heap: Heaps


@kernel
def _fill_needs(ways: Direction, waits: LongArray, needs: _Needs) -> None:
    last = 0
    for op in range(len(waits)):
        if waits[op] == 0:
            needs.queue[last] = op
            last += 1
    first = 0
    while first < last:
        op = needs.queue[first]
        first += 1
        for at in range(ways.before_ptr[op], ways.before_ptr[op + 1]):
            other = ways.before[at]
            beyond = needs.most_bytes[other] - needs.result_bytes[other]
            push(needs.heap, _ZERO, -float(beyond), other)
        held, most = 0, 0
        for at in range(ways.before_ptr[op], ways.before_ptr[op + 1]):
            other = pop(needs.heap, _ZERO)
            needs.before[at] = other
            most = max(most, held + needs.most_bytes[other])
            held += needs.result_bytes[other]
        needs.most_bytes[op] = max(most, held + needs.most_bytes[op])
        for at in range(ways.after_ptr[op], ways.after_ptr[op + 1]):
            waits[ways.after[at]] -= 1
            if waits[ways.after[at]] == 0:
                needs.queue[last] = ways.after[at]
                last += 1


@kernel
def _emit(
    ways: Direction,
    before: LongArray,
    roots: LongArray,
    has_run: BoolArray,
    stack: LongArray,
    place: LongArray,
    order: LongArray,
) -> None:
    count = 0
    for root in roots:
        depth = 0
        stack[0] = root
        place[0] = ways.before_ptr[root]
        while depth >= 0:
            op = stack[depth]
            if place[depth] < ways.before_ptr[op + 1]:
                other = before[place[depth]]
                place[depth] += 1
                if not has_run[other]:
                    depth += 1
                    stack[depth] = other
                    place[depth] = ways.before_ptr[other]
                continue
            depth -= 1
            if not has_run[op]:
                has_run[op] = True
                order[count] = op
                count += 1


def demand_order(storages: Storages, *, last_first: bool) -> LongArray:
    """All ops, each as late as the results before it allow, these in order or backwards."""
    ways, num_ops = storages.forwards, storages.num_ops
    made = zeros(num_ops)
    np.add.at(made, storages.producer, storages.num_bytes)
    read = zeros(num_ops)
    reader_of = storages.readers
    np.maximum.at(read, reader_of, np.repeat(storages.num_bytes, np.diff(storages.reader_ptr)))
    needs = _Needs(
        # A view makes nothing, but what it looks at is held for its readers.
        result_bytes=np.where(made > 0, made, read),
        most_bytes=made + storages.passing_bytes,
        before=zeros(len(ways.before)),
        queue=zeros(num_ops),
        heap=new_heaps(np.array([0, int(np.diff(ways.before_ptr).max(initial=0)) + 1])),
    )
    _fill_needs(ways, ways.num_waits.copy(), needs)
    roots = np.flatnonzero(np.diff(ways.after_ptr) == 0)
    roots = np.ascontiguousarray(roots[::-1]) if last_first else roots
    order, has_run = zeros(num_ops), np.zeros(num_ops, dtype=np.bool_)
    _emit(ways, needs.before, roots, has_run, zeros(num_ops), zeros(num_ops), order)
    return order
