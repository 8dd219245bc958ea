"""Hoist ops that free memory: walk along an order and run later ops early if that pays.

Hill and valley (Liu, 1987, "An application of generalized tree pebbling to sparse matrix
factorization", extended to graphs that are not trees). If an op becomes ready, or is the last op
that a storage waits for, a look-ahead tries up to `REACH` ops that follow from it, best first. If
no more bytes are held after them than before, and the target is never exceeded, they run at once.
So an update runs directly after its gradient together with its temporary results, which a rule for
single ops would miss. O(ops · reach · storages of an op).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.planners.memory.storages import OpTables, Storages

# Run ops one after another and count the bytes that are held; any run can be undone.
#
# The rule: an op's results and workspace are allocated when it starts, and when it ends everything
# is released that no later op reads. O(reads of the op) per run.


class Walk(NamedTuple):
    """State of a walk through the ops."""

    waits: LongArray
    """[op]: number of its predecessors that have not run; -1 once it has run itself."""
    num_left: LongArray
    """[storage]: number of readers that have not run, plus one if it is kept."""
    held: LongArray
    """Two numbers: bytes held now, and the peak so far."""


def new_walk(tables: OpTables) -> Walk:
    """Return the state of a walk before its first op."""
    return Walk(tables.num_waits.copy(), tables.num_closers.copy(), zeros(2))


@kernel
def released_bytes(tables: OpTables, walk: Walk, op: int) -> int:
    """Bytes that an op would release at its end if it ran now."""
    total: int = tables.passing_bytes[op]
    for at in range(tables.read_ptr[op], tables.read_ptr[op + 1]):
        storage = tables.reads[at]
        if walk.num_left[storage] == 1:
            total += tables.num_bytes[storage]
    return total


@kernel
def run_op(tables: OpTables, walk: Walk, op: int) -> int:
    """Run a ready op; returns the bytes held while it ran."""
    most: int = walk.held[0] + tables.taken_bytes[op]
    walk.held[0] = most - released_bytes(tables, walk, op)
    walk.held[1] = max(walk.held[1], most)
    walk.waits[op] = -1
    for at in range(tables.read_ptr[op], tables.read_ptr[op + 1]):
        walk.num_left[tables.reads[at]] -= 1
    for at in range(tables.after_ptr[op], tables.after_ptr[op + 1]):
        walk.waits[tables.after[at]] -= 1
    return most


@kernel
def take_back(tables: OpTables, walk: Walk, op: int) -> None:
    """Undo the op that ran last; the peak so far stays."""
    for at in range(tables.after_ptr[op], tables.after_ptr[op + 1]):
        walk.waits[tables.after[at]] += 1
    for at in range(tables.read_ptr[op], tables.read_ptr[op + 1]):
        walk.num_left[tables.reads[at]] += 1
    # The counters are back in the state before the op, so this is what its run released.
    walk.held[0] += released_bytes(tables, walk, op) - tables.taken_bytes[op]
    walk.waits[op] = 0


@kernel
def _fill_curve(tables: OpTables, walk: Walk, order: LongArray, curve: LongArray) -> None:
    for position in range(len(order)):
        curve[position] = run_op(tables, walk, order[position])


def memory_curve(storages: Storages, order: IntArray | LongArray) -> LongArray:
    """[position]: bytes held while the op there runs, without what exists before the step."""
    curve = zeros(len(order))
    _fill_curve(storages.tables, new_walk(storages.tables), order.astype(np.int64), curve)
    return curve


def peak_bytes(storages: Storages, order: IntArray | LongArray) -> int:
    """Peak of an order, without what exists before the step."""
    return int(memory_curve(storages, order).max(initial=0))


REACH = 12
"""Largest number of ops in a look-ahead: enough for an update with its temporary results."""
_WIDTH = 48
"""Largest number of ops among which a look-ahead chooses the next one."""
_MOST = 2**62


class _WalkScratch(NamedTuple):
    """Arrays that a walk reuses."""

    queue: LongArray
    """Ring buffer of ops from which to look ahead."""
    queued: BoolArray
    num_queued: LongArray
    """Two numbers: start of the ring buffer, and number of ops in it."""
    tried: LongArray
    """Ops of the current look-ahead, in the order in which they run."""
    choice: LongArray
    """Ops that the current look-ahead may run next."""
    num_choices: LongArray
    stack: LongArray
    place: LongArray
    """Next predecessor to visit of each op on ``stack``."""
    seen: LongArray
    """[op]: number of the last search that visited it."""
    num_searches: LongArray


@kernel
def _enqueue(scratch: _WalkScratch, op: int) -> None:
    if scratch.queued[op]:
        return
    scratch.queued[op] = True
    at = (scratch.num_queued[0] + scratch.num_queued[1]) % len(scratch.queue)
    scratch.queue[at] = op
    scratch.num_queued[1] += 1


@kernel
def _offer(scratch: _WalkScratch, op: int) -> None:
    if scratch.num_choices[0] < len(scratch.choice):
        scratch.choice[scratch.num_choices[0]] = op
        scratch.num_choices[0] += 1


@kernel
def _note(scratch: _WalkScratch, op: int, looks_ahead: bool) -> None:
    if looks_ahead:
        _offer(scratch, op)
    else:
        _enqueue(scratch, op)


@kernel
def _follow(
    tables: OpTables, walk: Walk, scratch: _WalkScratch, op: int, looks_ahead: bool
) -> None:
    """Collect ops that follow ``op`` or that close the same storages.

    With ``looks_ahead`` they become choices of the current look-ahead. Otherwise they are queued if
    they are ready or close a storage of which they are the last to run.
    """
    for at in range(tables.after_ptr[op], tables.after_ptr[op + 1]):
        if looks_ahead or walk.waits[tables.after[at]] == 0:
            _note(scratch, tables.after[at], looks_ahead)
    for at in range(tables.read_ptr[op], tables.read_ptr[op + 1]):
        storage = tables.reads[at]
        if walk.num_left[storage] != 1:
            continue
        for index in range(tables.reader_ptr[storage], tables.reader_ptr[storage + 1]):
            if walk.waits[tables.readers[index]] >= 0:
                _note(scratch, tables.readers[index], looks_ahead)


@kernel
def _choose(tables: OpTables, walk: Walk, scratch: _WalkScratch, target: int) -> int:
    """Remove and return the next op of a look-ahead; -1 if there is none.

    Of the ready choices that fit the target, this is the one after which the fewest bytes are held.
    If there is none, it is the choice with the fewest predecessors left.
    """
    # Bytes and numbers of predecessors share this variable: unready ops are compared only with each
    # other, until the first ready one resets it.
    best, best_net, is_ready = -1, _MOST, False
    at = 0
    while at < scratch.num_choices[0]:
        op = scratch.choice[at]
        waits = walk.waits[op]
        if waits < 0:
            scratch.num_choices[0] -= 1
            # Ops that have run are replaced by the last choice, which takes constant time.
            scratch.choice[at] = scratch.choice[scratch.num_choices[0]]
            continue
        if waits == 0:
            taken = tables.taken_bytes[op]
            net = taken - released_bytes(tables, walk, op)
            if walk.held[0] + taken <= target and (not is_ready or net < best_net):
                best, best_net, is_ready = at, net, True
        elif not is_ready and waits < best_net:
            best, best_net = at, waits
        at += 1
    if best < 0:
        return -1
    found: int = scratch.choice[best]
    scratch.num_choices[0] -= 1
    scratch.choice[best] = scratch.choice[scratch.num_choices[0]]
    return found


@kernel
def _missing(tables: OpTables, walk: Walk, scratch: _WalkScratch, op: int, first: int) -> int:
    """Write the ops that must run for ``op``, then ``op`` itself, to ``tried`` from ``first`` on.

    A depth-first search. Returns the end of the list, or -1 if it would be longer than `REACH`.
    """
    scratch.num_searches[0] += 1
    search, depth, end = scratch.num_searches[0], 0, first
    scratch.stack[0] = op
    scratch.place[0] = tables.before_ptr[op]
    scratch.seen[op] = search
    while depth >= 0:
        top = scratch.stack[depth]
        at = scratch.place[depth]
        while at < tables.before_ptr[top + 1]:
            other = tables.before[at]
            if walk.waits[other] >= 0 and scratch.seen[other] != search:
                break
            at += 1
        scratch.place[depth] = at + 1
        if at < tables.before_ptr[top + 1]:
            # A chain deeper than the stack is longer than `REACH` in any case.
            if depth + 1 == len(scratch.stack):
                return -1
            depth += 1
            other = tables.before[at]
            scratch.seen[other] = search
            scratch.stack[depth] = other
            scratch.place[depth] = tables.before_ptr[other]
            continue
        if end == REACH:
            return -1
        scratch.tried[end] = top
        end += 1
        depth -= 1
    return end


@kernel
def _look_ahead(tables: OpTables, walk: Walk, scratch: _WalkScratch, op: int, target: int) -> int:
    """Run ops from ``op`` on until no more bytes are held than before; returns their number.

    If that fails, all of them are undone and 0 is returned.
    """
    start_bytes, most = walk.held[0], walk.held[1]
    scratch.num_choices[0] = 0
    count = 0
    while op >= 0 and count < REACH:
        end = _missing(tables, walk, scratch, op, count)
        while count < end:
            next_op = scratch.tried[count]
            if walk.held[0] + tables.taken_bytes[next_op] > target:
                break
            run_op(tables, walk, next_op)
            count += 1
            if walk.held[0] <= start_bytes:
                return count
            _follow(tables, walk, scratch, next_op, True)
        if count < end:
            break
        op = _choose(tables, walk, scratch, target)
    for at in range(count - 1, -1, -1):
        take_back(tables, walk, scratch.tried[at])
    # Undoing keeps the peak, so it is restored here.
    walk.held[1] = most
    return 0


@kernel
def _hoist_from(
    tables: OpTables,
    walk: Walk,
    scratch: _WalkScratch,
    order: LongArray,
    num_done: int,
    target: int,
) -> int:
    """Run queued ops whose look-ahead pays; returns the number of ops that have run then."""
    while True:
        if scratch.num_queued[1] == 0:
            return num_done
        op = scratch.queue[scratch.num_queued[0]]
        scratch.num_queued[0] = (scratch.num_queued[0] + 1) % len(scratch.queue)
        scratch.num_queued[1] -= 1
        scratch.queued[op] = False
        if walk.waits[op] < 0 or walk.held[0] + tables.taken_bytes[op] > target:
            continue
        count = _look_ahead(tables, walk, scratch, op, target)
        for at in range(count):
            order[num_done + at] = scratch.tried[at]
        for at in range(count):
            # Only now, since ops that were undone must not queue their followers.
            _follow(tables, walk, scratch, scratch.tried[at], False)
        num_done += count


@kernel
def _hoist(
    tables: OpTables,
    walk: Walk,
    scratch: _WalkScratch,
    base: LongArray,
    order: LongArray,
    target: int,
) -> int:
    num_done = 0
    for position in range(len(base)):
        op = base[position]
        if walk.waits[op] < 0:
            continue
        run_op(tables, walk, op)
        order[num_done] = op
        num_done += 1
        _follow(tables, walk, scratch, op, False)
        num_done = _hoist_from(tables, walk, scratch, order, num_done, target)
    most: int = walk.held[1]
    return most


def hoisted(storages: Storages, base: LongArray, target: int) -> tuple[LongArray, int]:
    """Return an order that follows ``base`` but runs ops early if that pays, and its peak.

    Ops that run early never exceed ``target``.
    """
    tables, num_ops = storages.tables, storages.num_ops
    scratch = _WalkScratch(
        queue=zeros(num_ops + 1),
        queued=np.zeros(num_ops, dtype=np.bool_),
        num_queued=zeros(2),
        tried=zeros(REACH),
        choice=zeros(_WIDTH),
        num_choices=zeros(1),
        stack=zeros(REACH + 1),
        place=zeros(REACH + 1),
        seen=zeros(num_ops),
        num_searches=zeros(1),
    )
    order = zeros(num_ops)
    most = _hoist(tables, new_walk(tables), scratch, np.ascontiguousarray(base), order, target)
    return order, int(most)
