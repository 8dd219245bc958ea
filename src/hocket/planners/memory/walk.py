"""Run ops one after another and count the bytes that are held; any run can be taken back.

The rule: an op's storages and workspace are taken when it starts, and when it ends everything is
released that nobody reads later. O(pins of the op) per run, forwards or backwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.memory.storages import Direction, Storages


class Walk(NamedTuple):
    """Where a walk through the ops stands."""

    waits: LongArray
    """Per op: how many of those before it have not run; -1 when it has run itself."""
    opener: LongArray
    """Per storage: the op that opened it, or -1; see `Direction.first_opener`."""
    num_left: LongArray
    """Per storage: closers that have not run."""
    held: LongArray
    """Two numbers: bytes held now, and the most so far."""


def new_walk(ways: Direction) -> Walk:
    """The walk before its first op."""
    held = zeros(2)
    held[:] = ways.num_bytes[ways.first_opener >= 0].sum()
    return Walk(
        waits=ways.num_waits.copy(),
        opener=ways.first_opener.copy(),
        num_left=ways.num_closers.copy(),
        held=held,
    )


@kernel
def taken_bytes(ways: Direction, walk: Walk, op: int) -> int:
    """Bytes that an op takes when it starts."""
    total: int = ways.passing_bytes[op]
    for at in range(ways.open_ptr[op], ways.open_ptr[op + 1]):
        storage = ways.opens[at]
        if walk.opener[storage] < 0:
            total += ways.num_bytes[storage]
    return total


@kernel
def released_bytes(ways: Direction, walk: Walk, op: int) -> int:
    """Bytes that an op releases when it ends, if it ran now."""
    total: int = ways.passing_bytes[op]
    for at in range(ways.close_ptr[op], ways.close_ptr[op + 1]):
        storage = ways.closes[at]
        if walk.num_left[storage] == 1:
            total += ways.num_bytes[storage]
    return total


@kernel
def run_op(ways: Direction, walk: Walk, op: int) -> int:
    """Run an op that is ready; returns the bytes held while it ran."""
    most: int = walk.held[0] + taken_bytes(ways, walk, op)
    walk.held[0] = most - released_bytes(ways, walk, op)
    walk.held[1] = max(walk.held[1], most)
    walk.waits[op] = -1
    for at in range(ways.open_ptr[op], ways.open_ptr[op + 1]):
        storage = ways.opens[at]
        if walk.opener[storage] < 0:
            walk.opener[storage] = op
    for at in range(ways.close_ptr[op], ways.close_ptr[op + 1]):
        walk.num_left[ways.closes[at]] -= 1
    for at in range(ways.after_ptr[op], ways.after_ptr[op + 1]):
        walk.waits[ways.after[at]] -= 1
    return most


@kernel
def take_back(ways: Direction, walk: Walk, op: int) -> None:
    """Undo the op that ran last; the most so far stays."""
    for at in range(ways.after_ptr[op], ways.after_ptr[op + 1]):
        walk.waits[ways.after[at]] += 1
    for at in range(ways.close_ptr[op], ways.close_ptr[op + 1]):
        storage = ways.closes[at]
        walk.num_left[storage] += 1
        if walk.num_left[storage] == 1:
            walk.held[0] += ways.num_bytes[storage]
    for at in range(ways.open_ptr[op], ways.open_ptr[op + 1]):
        storage = ways.opens[at]
        if walk.opener[storage] == op:
            walk.opener[storage] = -1
            walk.held[0] -= ways.num_bytes[storage]
    walk.waits[op] = 0


@kernel
def _fill_curve(ways: Direction, walk: Walk, order: LongArray, curve: LongArray) -> None:
    for position in range(len(order)):
        curve[position] = run_op(ways, walk, order[position])


def memory_curve(storages: Storages, order: IntArray | LongArray) -> LongArray:
    """Bytes held while each op runs, by position; without what exists before the step."""
    curve = zeros(len(order))
    _fill_curve(storages.forwards, new_walk(storages.forwards), order.astype(np.int64), curve)
    return curve


def peak_bytes(storages: Storages, order: IntArray | LongArray) -> int:
    """The most bytes that an order holds at once, without what exists before the step."""
    return int(memory_curve(storages, order).max(initial=0))
