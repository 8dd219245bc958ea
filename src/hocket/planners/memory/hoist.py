"""Hoist what gives memory back: a walk along an order that runs ahead wherever that pays.

Hill and valley (Liu, 1987, "An application of generalized tree pebbling to sparse matrix
factorization", extended to graphs that are not trees): when an op becomes ready, or becomes
the last to hold a storage, up to ``reach`` ops that follow from it are tried, best first; if they
end with no more bytes than before and stay under a target in between, they are run at once. So an
update with its passing results follows its gradient directly, which a rule that looks at single
ops cannot see. The same walk from the end to the beginning delays what takes memory. O(ops · reach
· pins of an op).
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from hocket.base.arrays import BoolArray, IntArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import Heaps, new_heaps, zeros
from hocket.kernels.heaps import pop, push
from hocket.planners.memory.storages import Direction, Storages

# Run ops one after another and count the bytes that are held; any run can be taken back.
#
# The rule: an op's storages and workspace are taken when it starts, and when it ends everything is
# released that nobody reads later. O(pins of the op) per run, forwards or backwards.


class Walk(NamedTuple):
    """State of a walk through the ops."""

    waits: LongArray
    """Per op: how many of those before it have not run; -1 when it has run itself."""
    opener: LongArray
    """Per storage: the op that opened it, or -1; see `Direction.first_opener`."""
    num_left: LongArray
    """Per storage: closers that have not run."""
    held: LongArray
    """Two numbers: bytes held now, and the most so far."""


def new_walk(direction: Direction) -> Walk:
    """The walk before its first op."""
    held = zeros(2)
    held[:] = direction.num_bytes[direction.first_opener >= 0].sum()
    return Walk(
        waits=direction.num_waits.copy(),
        opener=direction.first_opener.copy(),
        num_left=direction.num_closers.copy(),
        held=held,
    )


@kernel
def taken_bytes(direction: Direction, walk: Walk, op: int) -> int:
    """Bytes that an op takes when it starts."""
    total: int = direction.passing_bytes[op]
    for at in range(direction.open_ptr[op], direction.open_ptr[op + 1]):
        storage = direction.opens[at]
        if walk.opener[storage] < 0:
            total += direction.num_bytes[storage]
    return total


@kernel
def released_bytes(direction: Direction, walk: Walk, op: int) -> int:
    """Bytes that an op releases when it ends, if it ran now."""
    total: int = direction.passing_bytes[op]
    for at in range(direction.close_ptr[op], direction.close_ptr[op + 1]):
        storage = direction.closes[at]
        if walk.num_left[storage] == 1:
            total += direction.num_bytes[storage]
    return total


@kernel
def run_op(direction: Direction, walk: Walk, op: int) -> int:
    """Run an op that is ready; returns the bytes held while it ran."""
    most: int = walk.held[0] + taken_bytes(direction, walk, op)
    walk.held[0] = most - released_bytes(direction, walk, op)
    walk.held[1] = max(walk.held[1], most)
    walk.waits[op] = -1
    for at in range(direction.open_ptr[op], direction.open_ptr[op + 1]):
        storage = direction.opens[at]
        if walk.opener[storage] < 0:
            walk.opener[storage] = op
    for at in range(direction.close_ptr[op], direction.close_ptr[op + 1]):
        walk.num_left[direction.closes[at]] -= 1
    for at in range(direction.after_ptr[op], direction.after_ptr[op + 1]):
        walk.waits[direction.after[at]] -= 1
    return most


@kernel
def take_back(direction: Direction, walk: Walk, op: int) -> None:
    """Undo the op that ran last; the most so far stays."""
    for at in range(direction.after_ptr[op], direction.after_ptr[op + 1]):
        walk.waits[direction.after[at]] += 1
    for at in range(direction.close_ptr[op], direction.close_ptr[op + 1]):
        storage = direction.closes[at]
        walk.num_left[storage] += 1
        if walk.num_left[storage] == 1:
            walk.held[0] += direction.num_bytes[storage]
    for at in range(direction.open_ptr[op], direction.open_ptr[op + 1]):
        storage = direction.opens[at]
        if walk.opener[storage] == op:
            walk.opener[storage] = -1
            walk.held[0] -= direction.num_bytes[storage]
    walk.waits[op] = 0


@kernel
def _fill_curve(direction: Direction, walk: Walk, order: LongArray, curve: LongArray) -> None:
    for position in range(len(order)):
        curve[position] = run_op(direction, walk, order[position])


def memory_curve(storages: Storages, order: IntArray | LongArray) -> LongArray:
    """Bytes held while each op runs, by position; without what exists before the step."""
    curve = zeros(len(order))
    _fill_curve(storages.forwards, new_walk(storages.forwards), order.astype(np.int64), curve)
    return curve


def peak_bytes(storages: Storages, order: IntArray | LongArray) -> int:
    """The most bytes that an order holds at once, without what exists before the step."""
    return int(memory_curve(storages, order).max(initial=0))


SHORT_REACH, LONG_REACH = 12, 40
"""Ops that one look ahead tries: enough for a fused update, or for one in single ops."""
_WIDTH = 48
"""Ops among which it chooses."""
_MOST = 2**62
_ZERO = cast(int, np.int64(0))
"""For a plain 0 as argument the compiler would make a further version of a function."""


class _WalkScratch(NamedTuple):
    """Arrays that one walk works in."""

    queue: LongArray
    """Ops to look ahead from; a ring."""
    queued: BoolArray
    num_queued: LongArray
    """Two numbers: where the ring begins, and how many ops it holds."""
    tried: LongArray
    """Ops of the present look ahead, in the order in which they run."""
    choice: LongArray
    """Ops that it can go on with."""
    num_choices: LongArray
    stack: LongArray
    place: LongArray
    """Position of the search for missing ops at each op of the stack."""
    seen: LongArray
    """Per op: the number of the search that met it last."""
    num_searches: LongArray
    waiting: Heaps
    """Ops that need more bytes than the target leaves, by those bytes."""


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
    direction: Direction, walk: Walk, scratch: _WalkScratch, op: int, looks_ahead: bool
) -> None:
    """Take ops that follow an op or end the same storages: offer them to the present look ahead,
    or queue those that may be worth running now that the op has run."""
    for at in range(direction.after_ptr[op], direction.after_ptr[op + 1]):
        if looks_ahead or walk.waits[direction.after[at]] == 0:
            _note(scratch, direction.after[at], looks_ahead)
    for at in range(direction.close_ptr[op], direction.close_ptr[op + 1]):
        storage = direction.closes[at]
        if walk.num_left[storage] != 1:
            continue
        for index in range(direction.closer_ptr[storage], direction.closer_ptr[storage + 1]):
            if walk.waits[direction.closers[index]] >= 0:
                _note(scratch, direction.closers[index], looks_ahead)


@kernel
def _choose(direction: Direction, walk: Walk, scratch: _WalkScratch, target: int) -> int:
    """The offered op that leaves the least bytes and fits the target, of those that are ready.

    Without one, the op that waits for the fewest others. It is taken out; -1 for none.
    """
    best, best_net, is_ready = -1, _MOST, False
    at = 0
    while at < scratch.num_choices[0]:
        op = scratch.choice[at]
        waits = walk.waits[op]
        if waits < 0:
            scratch.num_choices[0] -= 1
            scratch.choice[at] = scratch.choice[scratch.num_choices[0]]
            continue
        if waits == 0:
            taken = taken_bytes(direction, walk, op)
            net = taken - released_bytes(direction, walk, op)
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
def _missing(
    direction: Direction, walk: Walk, scratch: _WalkScratch, op: int, first: int, limit: int
) -> int:
    """List what has to run for ``op``, itself last, in ``tried`` from ``first`` on.

    Depth first; returns where the list ends, or -1 where it would be longer than ``limit``.
    """
    scratch.num_searches[0] += 1
    search, depth, end = scratch.num_searches[0], 0, first
    scratch.stack[0] = op
    scratch.place[0] = direction.before_ptr[op]
    scratch.seen[op] = search
    while depth >= 0:
        top = scratch.stack[depth]
        at = scratch.place[depth]
        while at < direction.before_ptr[top + 1]:
            other = direction.before[at]
            if walk.waits[other] >= 0 and scratch.seen[other] != search:
                break
            at += 1
        scratch.place[depth] = at + 1
        if at < direction.before_ptr[top + 1]:
            if depth + 1 == len(scratch.stack):
                return -1
            depth += 1
            other = direction.before[at]
            scratch.seen[other] = search
            scratch.stack[depth] = other
            scratch.place[depth] = direction.before_ptr[other]
            continue
        if end == limit:
            return -1
        scratch.tried[end] = top
        end += 1
        depth -= 1
    return end


@kernel
def _look_ahead(
    direction: Direction, walk: Walk, scratch: _WalkScratch, op: int, target: int, reach: int
) -> int:
    """Run ops from ``op`` on until no more bytes are held than before; how many, or 0."""
    start_bytes, most = walk.held[0], walk.held[1]
    scratch.num_choices[0] = 0
    count = 0
    while op >= 0 and count < reach:
        end = _missing(direction, walk, scratch, op, count, reach)
        while count < end:
            next_op = scratch.tried[count]
            if walk.held[0] + taken_bytes(direction, walk, next_op) > target:
                break
            run_op(direction, walk, next_op)
            count += 1
            if walk.held[0] <= start_bytes:
                return count
            _follow(direction, walk, scratch, next_op, True)
        if count < end:
            break
        op = _choose(direction, walk, scratch, target)
    for at in range(count - 1, -1, -1):
        take_back(direction, walk, scratch.tried[at])
    walk.held[1] = most
    return 0


@kernel
def _hoist_from(
    direction: Direction,
    walk: Walk,
    scratch: _WalkScratch,
    order: LongArray,
    num_done: int,
    target: int,
    reach: int,
) -> int:
    """Run all that pays, beginning with what is queued; how many ops have run then."""
    while True:
        if scratch.num_queued[1] == 0:
            headroom = target - walk.held[0]
            if scratch.waiting.size[0] == 0 or scratch.waiting.key[0] > headroom:
                return num_done
            _enqueue(scratch, pop(scratch.waiting, _ZERO))
        op = scratch.queue[scratch.num_queued[0]]
        scratch.num_queued[0] = (scratch.num_queued[0] + 1) % len(scratch.queue)
        scratch.num_queued[1] -= 1
        scratch.queued[op] = False
        if walk.waits[op] < 0:
            continue
        taken = taken_bytes(direction, walk, op)
        if walk.held[0] + taken > target:
            if taken <= target and scratch.waiting.size[0] < len(scratch.waiting.key) - 1:
                push(scratch.waiting, _ZERO, float(taken), op)
            continue
        count = _look_ahead(direction, walk, scratch, op, target, reach)
        for at in range(count):
            order[num_done + at] = scratch.tried[at]
        for at in range(count):
            _follow(direction, walk, scratch, scratch.tried[at], False)
        num_done += count


@kernel
def _hoist(
    direction: Direction,
    walk: Walk,
    scratch: _WalkScratch,
    base: LongArray,
    order: LongArray,
    target: int,
    reach: int,
) -> int:
    num_done = 0
    for position in range(len(base)):
        op = base[position]
        if walk.waits[op] < 0:
            continue
        run_op(direction, walk, op)
        order[num_done] = op
        num_done += 1
        _follow(direction, walk, scratch, op, False)
        num_done = _hoist_from(direction, walk, scratch, order, num_done, target, reach)
    most: int = walk.held[1]
    return most


def hoisted(
    storages: Storages, base: LongArray, target: int, *, backwards: bool, reach: int
) -> tuple[LongArray, int]:  # fmt: skip
    """An order that follows ``base`` and runs ahead where it pays, and its peak.

    ``target`` is what running ahead may not exceed. With ``backwards`` the walk starts at the end,
    so that ops are delayed instead.
    """
    direction = storages.backwards if backwards else storages.forwards
    num_ops = storages.num_ops
    scratch = _WalkScratch(
        queue=zeros(num_ops + 1),
        queued=np.zeros(num_ops, dtype=np.bool_),
        num_queued=zeros(2),
        tried=zeros(reach),
        choice=zeros(_WIDTH),
        num_choices=zeros(1),
        stack=zeros(reach + 1),
        place=zeros(reach + 1),
        seen=zeros(num_ops),
        num_searches=zeros(1),
        waiting=new_heaps(np.array([0, 4 * num_ops + 1])),
    )
    order = zeros(num_ops)
    along = np.ascontiguousarray(base[::-1] if backwards else base)
    most = _hoist(direction, new_walk(direction), scratch, along, order, target, reach)
    return (np.ascontiguousarray(order[::-1]) if backwards else order), int(most)
