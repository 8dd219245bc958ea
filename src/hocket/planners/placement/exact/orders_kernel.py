"""All orders of one placement of a tiny graph, compiled; `exhaustive` says what is done and why.

An order is chosen op by op, each when a device comes to an open position in its order: the engine
runs what is decided, and stops there. What has happened by then happens whatever is chosen, so a
device that was too full, or a bound as long as the best known step, ends the branch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.arrays import ByteArray, FloatArray
from hocket.kernels import kernel
from hocket.simulate.evaluate import carry_out
from hocket.simulate.events import UNDECIDED
from hocket.simulate.lowering import Draft
from hocket.simulate.state import State

NOISE = 1e-9
"""A step that is shorter by less than this share is no reason to go on."""


class Orders(NamedTuple):
    """What is known of a placement, and what has been chosen so far."""

    ancestors: ByteArray
    """Per op: a bit for each op that must end before it starts."""
    delay_s: FloatArray
    """Per place: seconds of the transfer that fills it; 0 for none."""
    tail_s: FloatArray
    """Per op: seconds from its end to the end of the step, at least."""
    end_s: FloatArray
    """Per op: when it ends, at least; negative while that is not known."""
    free_s: FloatArray
    """Per device: when it can start another op."""
    left_s: FloatArray
    """Per device: seconds of the ops that it has not started."""
    last_s: FloatArray
    """Per device: the least time from the end of one of these to the end of the step."""
    asked: ByteArray
    """Per depth: the device that chooses."""
    chosen: ByteArray
    """Per depth: the op that it chose last; -1 for none yet."""
    num_decided: ByteArray
    """Per device: decided positions in its order."""


class Best(NamedTuple):
    """The best plan so far."""

    step_s: FloatArray
    """One number; infinite while there is no plan."""
    device: ByteArray
    lineup: ByteArray
    score: FloatArray
    """Of the latest run."""
    runs_left: ByteArray
    """One number: how often the engine may still run."""


@kernel
def measure(draft: Draft, orders: Orders) -> None:
    """Delays and tails of the placement in the tables."""
    ops, places, transfers = draft.tables.runs, draft.tables.places, draft.tables.transfers
    for index in range(draft.scratch.num_found[0]):
        orders.delay_s[index] = 0.0
    for transfer in range(draft.scratch.num_found[1]):
        orders.delay_s[transfers.place[transfer]] = transfers.duration_s[transfer]
    for op in range(len(ops.device)):
        orders.tail_s[op] = 0.0
    for step in range(len(ops.device)):
        op = len(ops.device) - 1 - step
        after_s = ops.duration_s[op] + orders.tail_s[op]
        for index in range(ops.read_ptr[op], ops.read_ptr[op + 1]):
            tensor = draft.given.reads[index]
            if draft.given.is_made[tensor]:
                maker = draft.given.home_op[tensor]
                delay_s = orders.delay_s[places.read_place[index]]
                orders.tail_s[maker] = max(orders.tail_s[maker], delay_s + after_s)


@kernel
def _ready_s(draft: Draft, orders: Orders, op: int) -> float:
    """When all that an op reads can be there, at the earliest."""
    ready_s, ops = 0.0, draft.tables.runs
    for index in range(ops.read_ptr[op], ops.read_ptr[op + 1]):
        tensor = draft.given.reads[index]
        made_s = 0.0
        if draft.given.is_made[tensor]:
            made_s = orders.end_s[draft.given.home_op[tensor]]
        ready_s = max(ready_s, made_s + orders.delay_s[draft.tables.places.read_place[index]])
    return ready_s


@kernel
def bound_s(draft: Draft, orders: Orders) -> float:
    """A bound on the step from ``end_s`` of what has started and ``free_s`` of the devices.

    What has not started starts when its device is free or later, after what it reads, and each
    device has all of it to run.
    """
    ops, least_s = draft.tables.runs, 0.0
    for device in range(len(orders.num_decided)):
        orders.left_s[device], orders.last_s[device] = 0.0, np.inf
    for op in range(len(ops.device)):
        if orders.end_s[op] < 0.0:
            device = ops.device[op]
            start_s = max(orders.free_s[device], _ready_s(draft, orders, op))
            orders.end_s[op] = start_s + ops.duration_s[op]
            orders.left_s[device] += ops.duration_s[op]
            orders.last_s[device] = min(orders.last_s[device], orders.tail_s[op])
        least_s = max(least_s, orders.end_s[op] + orders.tail_s[op])
    for device in range(len(orders.num_decided)):
        if orders.last_s[device] < np.inf:
            run_s = orders.free_s[device] + orders.left_s[device]
            least_s = max(least_s, run_s + orders.last_s[device])
    return least_s


@kernel
def _bound_from_s(draft: Draft, state: State, orders: Orders, asking: int) -> float:
    """A bound on the step of whatever the asking device may choose now."""
    ops, cursor = draft.tables.runs, state.schedule.cursor
    for op in range(len(ops.device)):
        orders.end_s[op] = -1.0
    now = 0.0
    if cursor[asking] > ops.lineup_ptr[asking]:
        last = ops.lineup[cursor[asking] - 1]
        now = state.spans.op_start_s[last] + ops.duration_s[last]
    for device in range(len(orders.num_decided)):
        orders.free_s[device] = now
        for at in range(ops.lineup_ptr[device], cursor[device]):
            op = ops.lineup[at]
            orders.end_s[op] = state.spans.op_start_s[op] + ops.duration_s[op]
            orders.free_s[device] = max(orders.free_s[device], orders.end_s[op])
    return bound_s(draft, orders)


@kernel
def _is_too_full(draft: Draft, state: State) -> bool:
    for device in range(len(state.memory.peak)):
        if state.memory.peak[device] > draft.given.memory_bytes[device]:
            return True
    return False


@kernel
def _next_choice(draft: Draft, orders: Orders, device: int, previous: int) -> int:
    """The op after ``previous`` that a device may run next, the longest tail first; -1 for none."""
    ops, found = draft.tables.runs, -1
    open_ops = 0
    for op in range(len(ops.device)):
        if ops.device[op] == device and ops.priority[op] == UNDECIDED:
            open_ops |= 1 << op
    for op in range(len(ops.device)):
        if (open_ops >> op) & 1 == 0 or orders.ancestors[op] & open_ops != 0:
            continue
        if previous >= 0 and not _comes_before(orders, previous, op):
            continue
        if found < 0 or _comes_before(orders, op, found):
            found = op
    return found


@kernel
def _comes_before(orders: Orders, first: int, second: int) -> bool:
    if orders.tail_s[first] != orders.tail_s[second]:
        return bool(orders.tail_s[first] > orders.tail_s[second])
    return first < second


@kernel
def _visit(draft: Draft, state: State, orders: Orders, best: Best) -> int:
    """Run what is decided; the device that asks for more, or -1 where the branch ends."""
    best.runs_left[0] -= 1
    asking = carry_out(draft, state, best.score, True)
    if _is_too_full(draft, state):
        return -1
    if asking >= 0:
        is_hopeless = _bound_from_s(draft, state, orders, asking) >= best.step_s[0] * (1 - NOISE)
        return -1 if is_hopeless else asking
    if best.score[1] < best.step_s[0] * (1 - NOISE):
        best.step_s[0] = best.score[1]
        for op in range(len(best.device)):
            best.device[op] = draft.tables.runs.device[op]
            best.lineup[op] = draft.tables.runs.lineup[op]
    return -1


@kernel
def try_orders(draft: Draft, state: State, orders: Orders, best: Best) -> bool:
    """Try every order of the placement in the tables; whether there was work enough for all."""
    priority, depth = draft.tables.runs.priority, 0
    for device in range(len(orders.num_decided)):
        orders.num_decided[device] = 0
    for op in range(len(priority)):
        priority[op] = UNDECIDED
    orders.asked[0] = _visit(draft, state, orders, best)
    orders.chosen[0] = -1
    while depth >= 0:
        device, previous = orders.asked[depth], orders.chosen[depth]
        if previous >= 0:
            orders.num_decided[device] -= 1
            priority[previous] = UNDECIDED
        op = _next_choice(draft, orders, device, previous) if device >= 0 else -1
        if op < 0:
            depth -= 1
            continue
        if best.runs_left[0] <= 0:
            return False
        priority[op] = orders.num_decided[device]
        orders.num_decided[device] += 1
        orders.chosen[depth] = op
        depth += 1
        orders.asked[depth] = _visit(draft, state, orders, best)
        orders.chosen[depth] = -1
    return True
