"""The event engine, compiled: advances a step from event time to event time and records spans.

At each time, the engine first processes all ends (it releases bytes and marks tensors as arrived),
then starts every op and transfer that can start. Spans of no length cause another round at the same
time. O((ops + reads + transfers) log), plus the cost of shared channels, stated below.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.kernels import kernel
from hocket.kernels.containers import ZERO, Heaps
from hocket.kernels.heaps import mark, pop, push
from hocket.simulate.instructions import (
    QUEUED,
    SHARED,
    Instructions,
    PlaceTable,
    RouteTable,
    RunTable,
    TransferTable,
)
from hocket.simulate.state import Agenda, EngineState, Flow, MemoryState, Spans

# Shared channels: each channel is divided equally among the transfers that use it.
#
# Transfers over the same route always have the same rate, so each route keeps one clock of the work
# done per transfer. A transfer ends when the clock has advanced by the transfer's work since its
# start. A change of rates therefore updates routes, not transfers. O(log transfers + routes that
# share a channel · (path + log routes)) per start or end.


@kernel
def _count(flow: Flow, routes: RouteTable, route: int, change: int | np.int64) -> None:
    """Add ``change`` to the number of transfers on each channel of a route."""
    flow.is_stale[route] = True
    for index in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        flow.num_on[routes.path[index]] += change
        mark(flow.changed, routes.path[index])


@kernel
def _activate(flow: Flow, routes: RouteTable, route: int) -> None:
    """Add a route to the active hops of each channel that it crosses."""
    for hop in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        channel = routes.path[hop]
        at = routes.on_ptr[channel] + flow.num_active[channel]
        flow.active[at] = hop
        flow.position[hop] = at
        flow.num_active[channel] += 1


@kernel
def _deactivate(flow: Flow, routes: RouteTable, route: int) -> None:
    """Remove a route from the active hops of its channels; the last entry moves to its position."""
    for hop in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        channel, at = routes.path[hop], flow.position[hop]
        flow.num_active[channel] -= 1
        last = flow.active[routes.on_ptr[channel] + flow.num_active[channel]]
        flow.active[at] = last
        flow.position[last] = at


@kernel
def begin_flow(
    flow: Flow, routes: RouteTable, route: int, transfer: int, work: float, now: float
) -> None:
    """Start the flow of a transfer over a route."""
    # The clock of an idle route restarts at 0, which keeps its numbers small and exact.
    if flow.heaps.size[route] == 0:
        flow.clock[route], flow.rate[route], flow.since_s[route] = 0.0, 0.0, now
        _activate(flow, routes, route)
    clock = flow.clock[route] + flow.rate[route] * (now - flow.since_s[route])
    push(flow.heaps, route, clock + work, transfer)
    _count(flow, routes, route, np.int64(1))


@kernel
def end_flow(flow: Flow, routes: RouteTable, route: int) -> int:
    """Remove and return the transfer of a route that ends first."""
    transfer = pop(flow.heaps, route)
    _count(flow, routes, route, np.int64(-1))
    if flow.heaps.size[route] == 0:
        _deactivate(flow, routes, route)
    return transfer


@kernel
def flow_end_s(flow: Flow, route: int) -> float:
    """Return the time at which a route's next transfer ends at the current rate."""
    left = flow.heaps.key[flow.heaps.ptr[route]] - flow.clock[route]
    end_s: float = flow.since_s[route] + left / flow.rate[route]
    return end_s


@kernel
def set_next(next_s: FloatArray, route: int, time_s: float) -> None:
    """Set the time at which a route's next transfer ends."""
    at = (len(next_s) >> 1) + route
    next_s[at] = time_s
    while at > 1:
        at >>= 1
        smaller = min(next_s[2 * at], next_s[2 * at + 1])
        # Nothing changes above this node of the tournament tree.
        if next_s[at] == smaller:
            break
        next_s[at] = smaller


@kernel
def next_route(next_s: FloatArray) -> int:
    """Return the route whose next transfer ends first, the lowest number among equal ones."""
    at, num_leaves = 1, len(next_s) >> 1
    while at < num_leaves:
        at = 2 * at if next_s[2 * at] == next_s[at] else 2 * at + 1
    return at - num_leaves


@kernel
def _set_rate(flow: Flow, routes: RouteTable, route: int, now: float) -> None:
    rate = np.inf
    for index in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        rate = min(rate, flow.share[routes.path[index]])
    if rate != flow.rate[route]:
        # Work done so far counts at the old rate.
        flow.clock[route] += flow.rate[route] * (now - flow.since_s[route])
        flow.since_s[route] = now
        flow.rate[route] = rate
    elif not flow.is_stale[route]:
        return
    flow.is_stale[route] = False
    set_next(flow.next_s, route, max(now, flow_end_s(flow, route)))


@kernel
def share_channels(flow: Flow, routes: RouteTable, now: float) -> None:
    """Split each channel equally among its transfers if their number changed."""
    for index in range(flow.changed.size[0]):
        channel = flow.changed.item[index]
        flow.changed.has[channel] = False
        flow.share[channel] = routes.capacity[channel] / flow.num_on[channel]
    for index in range(flow.changed.size[0]):
        channel = flow.changed.item[index]
        first = routes.on_ptr[channel]
        for at in range(first, first + flow.num_active[channel]):
            _set_rate(flow, routes, routes.hop_route[flow.active[at]], now)
    flow.changed.size[0] = 0


# Bytes held on each device: allocated, released after the last use, and logged. O(1) per change.


@kernel
def hold(memory: MemoryState, device: int, num_bytes: int, now: float) -> None:
    """Allocate bytes on a device, or release them if the number is negative."""
    if num_bytes == 0:
        return
    memory.now[device] += num_bytes
    memory.peak[device] = max(memory.peak[device], memory.now[device])
    entry = memory.last[device]
    # Several changes at one time are one entry of the log.
    if memory.log_time_s[entry] != now:
        entry = memory.size[0]
        memory.size[0] += 1
        memory.last[device] = entry
        memory.log_device[entry] = device
        memory.log_time_s[entry] = now
    memory.log_bytes[entry] = memory.now[device]


@kernel
def use_up(memory: MemoryState, places: PlaceTable, place: int, now: float) -> None:
    """Record that one use of the storage of ``place`` has ended; release it after its last use."""
    storage = places.storage[place]
    places.num_uses[storage] -= 1
    if places.num_uses[storage] == 0 and not places.is_kept[storage]:
        hold(memory, places.device[storage], -places.num_bytes[storage], now)


_OP_END, _TRANSFER_END, _TRANSFER_START, _FLOW_START = 0, 1, 2, 3
_KIND = 1 << 40
"""Factor in ``kind * _KIND + index``, which sorts events of one time by kind and index."""
UNDECIDED = np.inf
"""Priority of ops that do not have a position in their strict order yet."""


@kernel
def _arrive(schedule: Agenda, runs: RunTable, place: int, strict: bool) -> None:
    """Record that a tensor is available at a place; ops that lacked only this tensor get ready."""
    for index in range(schedule.user_ptr[place], schedule.user_ptr[place + 1]):
        op = schedule.users[index]
        runs.num_waits[op] -= 1
        if runs.num_waits[op] == 0:
            mark(schedule.touched, runs.queue[op])
            if not strict:
                push(schedule.ready, runs.queue[op], runs.priority[op], op)


@kernel
def _offer(
    schedule: Agenda,
    spans: Spans,
    transfers: TransferTable,
    transfer: int,
    mode: int,
    now: float,
) -> None:
    """Start a transfer whose tensor is ready, or schedule its start if it must queue."""
    spans.transfer_ready_s[transfer] = now
    start_s = now
    if mode == QUEUED:
        send, receive = transfers.send_queue[transfer], transfers.receive_queue[transfer]
        # A transfer occupies both queues from its start, in the order in which tensors become
        # ready.
        start_s = max(now, schedule.queue_free_s[send], schedule.queue_free_s[receive])
        end_s = start_s + transfers.duration_s[transfer]
        schedule.queue_free_s[send] = end_s
        schedule.queue_free_s[receive] = end_s
    spans.transfer_start_s[transfer] = start_s
    event = _TRANSFER_START * _KIND + transfer
    if start_s > now:
        push(schedule.events, ZERO, start_s, event)
    else:
        schedule.starting[schedule.num_starting[0]] = event
        schedule.num_starting[0] += 1


@kernel
def _start_transfers(
    state: EngineState,
    places: PlaceTable,
    transfers: TransferTable,
    routes: RouteTable,
    mode: int,
    now: float,
) -> None:
    schedule = state.schedule
    for index in range(schedule.num_starting[0]):
        event = schedule.starting[index]
        transfer = event % _KIND
        work = transfers.work[transfer]
        if event // _KIND == _TRANSFER_START:
            place = transfers.place[transfer]
            hold(state.memory, places.device[place], places.num_bytes[place], now)
            flow_s = now + transfers.latency_s[transfer]
            if mode != SHARED:
                end_s = now + transfers.duration_s[transfer]
                push(schedule.events, ZERO, end_s, _TRANSFER_END * _KIND + transfer)
                continue
            if work == 0.0:
                push(schedule.events, ZERO, flow_s, _TRANSFER_END * _KIND + transfer)
                continue
            if flow_s > now:
                push(schedule.events, ZERO, flow_s, _FLOW_START * _KIND + transfer)
                continue
        begin_flow(state.flow, routes, transfers.route[transfer], transfer, work, now)
    schedule.num_starting[0] = 0


@kernel
def _is_undecided(schedule: Agenda, runs: RunTable, queue: int) -> bool:
    """Return True if the next position in a stream's strict order has no op yet."""
    at = schedule.cursor[queue]
    if at == runs.lineup_ptr[queue + 1]:
        return False
    return bool(runs.priority[runs.lineup[at]] == UNDECIDED)


@kernel
def _next_op(schedule: Agenda, runs: RunTable, queue: int, strict: bool) -> int:
    """Remove and return the op that a free stream starts now; -1 for none."""
    if not strict:
        return pop(schedule.ready, queue) if schedule.ready.size[queue] > 0 else -1
    at = schedule.cursor[queue]
    if at == runs.lineup_ptr[queue + 1]:
        return -1
    op: int = runs.lineup[at]
    if runs.num_waits[op] > 0:
        return -1
    schedule.cursor[queue] += 1
    return op


@kernel
def _ends_at(schedule: Agenda, queue: int, op: int, end_s: float) -> None:
    schedule.due_s[queue] = end_s
    push(schedule.events, ZERO, end_s, _OP_END * _KIND + op)


@kernel
def _begin_work(schedule: Agenda, runs: RunTable, queue: int, op: int, now: float) -> None:
    """Start an op and schedule its end, which a kernel of the other stream may still delay.

    The host launches one op after another. If two kernels together need more than the device, the
    one that is ready first runs, while the launch gap of the other passes. If both fit, each slows
    the other down while both run; a later concurrent kernel adds its own slowdown to that.
    """
    end_s = now + runs.duration_s[op]
    other = runs.other_stream[queue]
    schedule.running[queue] = op
    # Ops of no length occupy neither the host nor the device.
    if other >= 0 and runs.duration_s[op] > 0.0:
        if runs.issue_s[op] > 0.0:
            begin_s = max(now, schedule.host_free_s[other])
            schedule.host_free_s[queue] = begin_s + runs.issue_s[op]
            end_s = begin_s + runs.duration_s[op]
        beside, due_s = schedule.running[other], schedule.due_s[other]
        if schedule.is_free[other]:
            pass
        elif runs.fill[op] + runs.fill[beside] > 1.0:
            kernel_s = runs.kernel_s[beside]
            # The kernel that is ready first runs first; the other one is delayed to its end.
            if end_s - runs.kernel_s[op] >= due_s - kernel_s:
                end_s = max(end_s, due_s + runs.kernel_s[op])
            elif end_s > due_s - kernel_s:
                _ends_at(schedule, other, beside, end_s + kernel_s)
        elif runs.issue_s[op] == 0.0 and due_s > now:
            times = max(runs.beside[op], runs.beside[beside])
            lost_s = (times - 1.0) * (min(end_s, due_s) - now)
            end_s += lost_s
            _ends_at(schedule, other, beside, due_s + lost_s)
    _ends_at(schedule, queue, op, end_s)


@kernel
def _is_due(schedule: Agenda, queue: int, op: int, now: float) -> bool:
    """Return True if an op ends now; False if a kernel of the other stream has delayed its end."""
    is_running = not schedule.is_free[queue] and schedule.running[queue] == op
    return bool(is_running and schedule.due_s[queue] == now)


@kernel
def _start_ops(
    schedule: Agenda, spans: Spans, memory: MemoryState, runs: RunTable, strict: bool, now: float
) -> bool:
    """Start all ops that can start; return True if the simulation should stop here.

    It stops at a position without an op, and when the step is certain to exceed the limit.
    """
    is_open = False
    limit_s = schedule.limit_s[0]
    for index in range(schedule.touched.size[0]):
        queue = schedule.touched.item[index]
        schedule.touched.has[queue] = False
        if not schedule.is_free[queue]:
            continue
        if strict and _is_undecided(schedule, runs, queue):
            is_open = True
            continue
        op = _next_op(schedule, runs, queue, strict)
        if op < 0:
            continue
        # The step cannot end earlier than the stream's remaining work or the longest path from
        # here.
        if now + max(schedule.left_s[queue], schedule.tail_s[op]) > limit_s:
            return True
        schedule.left_s[queue] -= runs.duration_s[op]
        schedule.is_free[queue] = False
        spans.op_start_s[op] = now
        hold(memory, runs.device[op], runs.alloc_bytes[op], now)
        _begin_work(schedule, runs, queue, op, now)
    schedule.touched.size[0] = 0
    return is_open


@kernel
def _end_op(
    state: EngineState, runs: RunTable, places: PlaceTable, op: int, strict: bool, now: float
) -> None:
    schedule, memory, queue = state.schedule, state.memory, runs.queue[op]
    state.spans.op_end_s[op] = now
    schedule.is_free[queue] = True
    mark(schedule.touched, queue)
    hold(memory, runs.device[op], -runs.workspace_bytes[op], now)
    for index in range(runs.read_ptr[op], runs.read_ptr[op + 1]):
        use_up(memory, places, places.read_place[index], now)
    for tensor in range(runs.made_ptr[op], runs.made_ptr[op + 1]):
        # Only the owner of a storage counts the end of its producer.
        if places.storage[tensor] == tensor:
            use_up(memory, places, tensor, now)
        _arrive(schedule, runs, tensor, strict)


@kernel
def _end_events(
    state: EngineState, tables: Instructions, mode: int, strict: bool, now: float
) -> None:
    """Process all ends at this time, and collect the transfers that start at it."""
    schedule, flow = state.schedule, state.flow
    runs, places, transfers, routes = tables
    while True:
        transfer = -1
        if schedule.events.size[0] > 0 and schedule.events.key[0] == now:
            event = pop(schedule.events, ZERO)
            kind, index = event // _KIND, event % _KIND
            if kind == _OP_END:
                # A delayed op has a second end event; the first one is ignored.
                if not _is_due(schedule, runs.queue[index], index, now):
                    continue
                _end_op(state, runs, places, index, strict, now)
                for sent in range(runs.send_ptr[index], runs.send_ptr[index + 1]):
                    _offer(schedule, state.spans, transfers, sent, mode, now)
                continue
            if kind != _TRANSFER_END:
                schedule.starting[schedule.num_starting[0]] = event
                schedule.num_starting[0] += 1
                continue
            transfer = index
        elif flow.next_s[1] == now:
            route = next_route(flow.next_s)
            # The entry may be outdated, because rates changed after it was written.
            if flow.heaps.size[route] == 0 or flow_end_s(flow, route) > now:
                set_next(flow.next_s, route, np.inf)
                continue
            transfer = end_flow(flow, routes, route)
        if transfer < 0:
            break
        state.spans.transfer_end_s[transfer] = now
        use_up(state.memory, places, transfers.tensor[transfer], now)
        _arrive(schedule, runs, transfers.place[transfer], strict)


@kernel
def _group_users(schedule: Agenda, places: PlaceTable) -> None:
    """List the ops that read at each place, by counting sort."""
    ptr = schedule.user_ptr
    for index in range(len(places.read_place)):
        ptr[places.read_place[index] + 2] += 1
    for place in range(2, len(ptr)):
        ptr[place] += ptr[place - 1]
    # The loop below advances each pointer to the start of the next place, so pointers begin one
    # position too low and are correct afterwards.
    for index in range(len(places.read_place)):
        place = places.read_place[index] + 1
        schedule.users[ptr[place]] = places.reader[index]
        ptr[place] += 1


@kernel
def _longest_after(schedule: Agenda, place: int) -> float:
    """Return the longest path to the end of the step from the ops that read at a place."""
    longest_s = 0.0
    for index in range(schedule.user_ptr[place], schedule.user_ptr[place + 1]):
        longest_s = max(longest_s, schedule.tail_s[schedule.users[index]])
    return longest_s


@kernel
def _is_hopeless(schedule: Agenda, runs: RunTable, transfers: TransferTable) -> bool:
    """Compute the work of each queue and the longest path from each op.

    Returns True if any of them exceeds the limit, so that the step need not be simulated.
    """
    limit_s, most_s = schedule.limit_s[0], 0.0
    schedule.left_s[:] = 0.0
    for op in range(len(runs.device) - 1, -1, -1):
        longest_s = 0.0
        for tensor in range(runs.made_ptr[op], runs.made_ptr[op + 1]):
            longest_s = max(longest_s, _longest_after(schedule, tensor))
        for sent in range(runs.send_ptr[op], runs.send_ptr[op + 1]):
            after_s = _longest_after(schedule, transfers.place[sent])
            longest_s = max(longest_s, transfers.duration_s[sent] + after_s)
        schedule.tail_s[op] = longest_s + runs.duration_s[op]
        schedule.left_s[runs.queue[op]] += runs.duration_s[op]
        most_s = max(most_s, schedule.tail_s[op], schedule.left_s[runs.queue[op]])
    return bool(most_s > limit_s)


@kernel
def _line_up(runs: RunTable, ready: Heaps) -> None:
    """Sort the ops of each queue by priority, using the heaps, which are empty before and after."""
    for op in range(len(runs.device)):
        push(ready, runs.queue[op], runs.priority[op], op)
    for queue in range(len(ready.size)):
        for at in range(runs.lineup_ptr[queue], runs.lineup_ptr[queue + 1]):
            runs.lineup[at] = pop(ready, queue)


@kernel
def run(state: EngineState, tables: Instructions, mode: int, strict: bool) -> None:
    """Simulate a step from its initial ``state``, which receives the times and the memory log.

    If a strict order has positions without an op, the simulation stops when a stream reaches the
    first of them; all events so far are independent of the missing ops. It also stops when the step
    is certain to exceed the limit. Ops that have not ended by then keep NaN as their end.
    """
    schedule = state.schedule
    runs, places, transfers, routes = tables
    _group_users(schedule, places)
    if schedule.limit_s[0] < np.inf and _is_hopeless(schedule, runs, transfers):
        return
    if strict:
        _line_up(runs, schedule.ready)
    for queue in range(len(schedule.is_free)):
        mark(schedule.touched, queue)
    for op in range(len(runs.device)):
        if runs.num_waits[op] == 0 and not strict:
            push(schedule.ready, runs.queue[op], runs.priority[op], op)
    for transfer in range(runs.send_ptr[0]):
        _offer(schedule, state.spans, transfers, transfer, mode, 0.0)
    now = 0.0
    while True:
        _start_transfers(state, places, transfers, routes, mode, now)
        if _start_ops(schedule, state.spans, state.memory, runs, strict, now):
            break
        share_channels(state.flow, routes, now)
        now = state.flow.next_s[1]
        if schedule.events.size[0] > 0:
            now = min(now, schedule.events.key[0])
        if now == np.inf:
            break
        _end_events(state, tables, mode, strict, now)
