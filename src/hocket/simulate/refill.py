"""Evaluate a placement, compiled: fill the engine's tables from it, run the engine, take the score.

Says what `hocket.simulate.places` and `hocket.simulate.engine` say, bit for bit, without making an
array. The caller writes device and priority of each op into the bench. O(ops + reads + tensors +
routes), then the engine; a strict order is sorted first.
"""

from __future__ import annotations

import numpy as np

from hocket.arrays import ByteArray, FloatArray
from hocket.kernels import kernel
from hocket.kernels.containers import Heaps
from hocket.kernels.heaps import pop, push
from hocket.simulate.bench import Bench, Changes, Fixed, Scratch, Tables, Walk
from hocket.simulate.kernel import run
from hocket.simulate.state import Flow, Memory, Schedule, Spans, State
from hocket.simulate.tables import OpTable, PlaceTable, TransferTable

_NOISE = 1e-9


@kernel
def _find_places(fixed: Fixed, device_of: ByteArray, places: PlaceTable, scratch: Scratch) -> int:
    """Places of every tensor: its home, then the others by (tensor, device); how many there are."""
    here, num_tensors = scratch.place_on, len(fixed.alias_of)
    end = num_tensors
    scratch.away_ptr[0] = end
    for tensor in range(num_tensors):
        keeper, first = fixed.home_reader[tensor], end
        home = device_of[keeper] if keeper >= 0 else 0
        places.device[tensor] = home
        scratch.tensor[tensor] = tensor
        scratch.is_copy[tensor] = False
        for index in range(fixed.user_ptr[tensor], fixed.user_ptr[tensor + 1]):
            read = fixed.user_read[index]
            device = device_of[places.reader[read]]
            if device != home and here[device] < 0:
                # Few devices read one tensor, so sorting by insertion is the quickest.
                at = end
                while at > first and places.device[at - 1] > device:
                    places.device[at] = places.device[at - 1]
                    at -= 1
                places.device[at] = device
                here[device] = 0
                end += 1
        here[home] = tensor
        for place in range(first, end):
            here[places.device[place]] = place
            scratch.tensor[place] = tensor
            scratch.is_copy[place] = fixed.is_made[tensor] or not fixed.is_input[tensor]
        for index in range(fixed.user_ptr[tensor], fixed.user_ptr[tensor + 1]):
            read = fixed.user_read[index]
            places.read_place[read] = here[device_of[places.reader[read]]]
        here[home] = -1
        for place in range(first, end):
            here[places.device[place]] = -1
        scratch.away_ptr[tensor + 1] = end
    return end


@kernel
def _find_base(fixed: Fixed, places: PlaceTable, scratch: Scratch, place: int) -> int:
    """The place next in line in whose bytes an alias lives; itself where it has own bytes."""
    tensor, device = scratch.tensor[place], places.device[place]
    base: int = fixed.alias_of[tensor]
    if base < 0 or scratch.is_copy[place]:
        return place
    if places.device[base] == device:
        return base
    for away in range(scratch.away_ptr[base], scratch.away_ptr[base + 1]):
        if places.device[away] == device:
            # Before the step a copy has not come yet, so nothing can live in it: own bytes then.
            return place if scratch.is_copy[away] and not fixed.is_made[tensor] else away
    return place


@kernel
def _find_storages(fixed: Fixed, places: PlaceTable, scratch: Scratch, num_places: int) -> None:
    for place in range(num_places):
        places.storage[place] = _find_base(fixed, places, scratch, place)
        places.num_uses[place] = 0
        places.is_kept[place] = False
    for device in range(len(places.start_bytes)):
        places.start_bytes[device] = 0
    for place in range(num_places):
        root = place
        while places.storage[root] != root:
            root = places.storage[root]
        places.storage[place] = root
        tensor, is_copy = scratch.tensor[place], scratch.is_copy[place]
        owns = root == place
        places.num_bytes[place] = fixed.tensor_bytes[tensor] if owns else 0
        if fixed.is_input[tensor] if is_copy else fixed.is_held[tensor]:
            places.is_kept[root] = True
        if owns and fixed.is_made[tensor] and not is_copy:
            places.num_uses[place] += 1
        if not fixed.is_made[tensor] and not is_copy:
            places.start_bytes[places.device[place]] += places.num_bytes[place]


@kernel
def _list_transfers(
    fixed: Fixed,
    places: PlaceTable,
    transfers: TransferTable,
    size_ptr: ByteArray,
    scratch: Scratch,
) -> int:
    """One transfer for each place that is a copy; returns how many there are."""
    num_devices = len(places.start_bytes)
    for route in range(len(size_ptr)):
        size_ptr[route] = 0
    count = 0
    for tensor in range(len(fixed.alias_of)):
        scratch.transfer_ptr[tensor] = count
        src = places.device[tensor]
        for place in range(scratch.away_ptr[tensor], scratch.away_ptr[tensor + 1]):
            if not scratch.is_copy[place]:
                continue
            places.num_uses[places.storage[tensor]] += 1
            dst = places.device[place]
            pair = src * num_devices + dst
            work = fixed.work[tensor] * fixed.hops[pair]
            slowest = fixed.slowest[pair]
            transfers.place[count] = place
            transfers.tensor[count] = tensor
            transfers.send_queue[count] = fixed.send_queue[src]
            transfers.receive_queue[count] = fixed.receive_queue[dst]
            transfers.latency_s[count] = fixed.latency_s[pair]
            transfers.work[count] = 0.0 if slowest == np.inf else work
            transfers.duration_s[count] = fixed.latency_s[pair] + transfers.work[count] / slowest
            transfers.route[count] = fixed.route[pair]
            size_ptr[fixed.route[pair] + 1] += 1
            count += 1
    scratch.transfer_ptr[len(fixed.alias_of)] = count
    for route in range(1, len(size_ptr)):
        size_ptr[route] += size_ptr[route - 1]
    return count


@kernel
def _list_ops(fixed: Fixed, ops: OpTable, places: PlaceTable, scratch: Scratch) -> None:
    ptr = ops.lineup_ptr
    for device in range(len(ptr)):
        ptr[device] = 0
    for op in range(len(ops.device)):
        device = ops.device[op]
        ptr[device + 1] += 1
        ops.duration_s[op] = fixed.op_s[fixed.row[device], op]
        num_bytes = ops.workspace_bytes[op]
        for tensor in range(ops.made_ptr[op], ops.made_ptr[op + 1]):
            num_bytes += places.num_bytes[tensor]
        ops.alloc_bytes[op] = num_bytes
        num_waits = 0
        for index in range(ops.read_ptr[op], ops.read_ptr[op + 1]):
            place = places.read_place[index]
            places.num_uses[places.storage[place]] += 1
            if fixed.is_made[fixed.reads[index]] or scratch.is_copy[place]:
                num_waits += 1
        ops.num_waits[op] = num_waits
        ops.send_ptr[op] = scratch.transfer_ptr[ops.made_ptr[op]]
    ops.send_ptr[len(ops.device)] = scratch.transfer_ptr[ops.made_ptr[len(ops.device)]]
    for device in range(1, len(ptr)):
        ptr[device] += ptr[device - 1]


@kernel
def _line_up(ops: OpTable, ready: Heaps) -> None:
    """The ops of each device by priority; the heaps of the engine are empty before and after."""
    for op in range(len(ops.device)):
        push(ready, ops.device[op], ops.priority[op], op)
    for device in range(len(ready.size)):
        for at in range(ops.lineup_ptr[device], ops.lineup_ptr[device + 1]):
            ops.lineup[at] = pop(ready, device)


@kernel
def _reset_memory(memory: Memory, start_bytes: ByteArray, num_uses: ByteArray, count: int) -> None:
    for device in range(len(start_bytes)):
        memory.now[device] = start_bytes[device]
        memory.peak[device] = start_bytes[device]
        memory.last[device] = device
        memory.log_bytes[device] = start_bytes[device]
        memory.log_device[device] = device
        memory.log_time_s[device] = 0.0
    memory.size[0] = len(start_bytes)
    for place in range(count):
        memory.num_left[place] = num_uses[place]


@kernel
def _reset_flow(flow: Flow, size_ptr: ByteArray) -> None:
    for route in range(len(flow.rate)):
        flow.heaps.ptr[route] = size_ptr[route]
        flow.heaps.size[route] = 0
        flow.is_stale[route] = False
    for node in range(len(flow.next_s)):
        flow.next_s[node] = np.inf
    for channel in range(len(flow.num_on)):
        flow.num_on[channel] = 0
        flow.num_active[channel] = 0
        flow.changed.has[channel] = False
    flow.changed.size[0] = 0


@kernel
def _reset_schedule(schedule: Schedule, waits: ByteArray, lineup_ptr: ByteArray) -> None:
    for op in range(len(waits)):
        schedule.waits[op] = waits[op]
    for place in range(len(schedule.user_ptr)):
        schedule.user_ptr[place] = 0
    schedule.events.size[0] = 0
    for device in range(len(lineup_ptr) - 1):
        schedule.ready.ptr[device] = lineup_ptr[device]
        schedule.ready.size[device] = 0
        schedule.cursor[device] = lineup_ptr[device]
        schedule.touched.has[device] = False
        schedule.is_free[device] = True
    schedule.touched.size[0] = 0
    for queue in range(len(schedule.queue_free_s)):
        schedule.queue_free_s[queue] = 0.0
    schedule.num_starting[0] = 0


@kernel
def _take_score(
    fixed: Fixed, spans: Spans, peak: ByteArray, tensors: ByteArray, num: int, score: FloatArray
) -> None:
    step_s, moved, over = 0.0, 0.0, 0.0
    for op in range(len(spans.op_end_s)):
        step_s = max(step_s, spans.op_end_s[op])
        # Not a number where an order makes ops wait for each other: then there is no end.
        if np.isnan(spans.op_end_s[op]):
            step_s = np.inf
    for transfer in range(num):
        if step_s < np.inf:
            step_s = max(step_s, spans.transfer_end_s[transfer])
        moved += fixed.tensor_bytes[tensors[transfer]]
    for device in range(len(peak)):
        over += max(peak[device] - fixed.memory_bytes[device], 0)
    # What never ends never needs all its memory either, so that must not count in its favour.
    score[0], score[1], score[2] = over if step_s < np.inf else np.inf, step_s, moved


@kernel
def evaluate(bench: Bench, state: State, tables: Tables, is_strict: bool) -> None:
    """Simulate what the draft says; the score, the spans and the peaks are there afterwards."""
    fixed, scratch = bench.fixed, bench.scratch
    ops, places, transfers = bench.ops, bench.places, bench.transfers
    num_places = _find_places(fixed, ops.device, places, scratch)
    _find_storages(fixed, places, scratch, num_places)
    num_transfers = _list_transfers(fixed, places, transfers, bench.size_ptr, scratch)
    _list_ops(fixed, ops, places, scratch)
    for op in range(len(ops.device)):
        state.spans.op_end_s[op] = np.nan
    _reset_memory(state.memory, places.start_bytes, places.num_uses, num_places)
    _reset_flow(state.flow, bench.size_ptr)
    _reset_schedule(state.schedule, ops.num_waits, ops.lineup_ptr)
    if is_strict:
        _line_up(ops, state.schedule.ready)
    mode = fixed.mode[0]
    run(state, tables.ops, tables.places, tables.transfers, tables.routes, mode, is_strict)
    peak, tensors = state.memory.peak, transfers.tensor
    _take_score(fixed, state.spans, peak, tensors, num_transfers, bench.score)


@kernel
def _exchange(changes: Changes, device: ByteArray, priority: FloatArray, which: int) -> None:
    """Make a change, keeping what was before in its place; a second time, take it back."""
    for index in range(changes.ptr[which], changes.ptr[which + 1]):
        op, partner = changes.op[index], changes.partner[index]
        if partner >= 0:
            priority[op], priority[partner] = priority[partner], priority[op]
            continue
        device[op], changes.device[index] = changes.device[index], device[op]
        if not np.isnan(changes.priority[index]):
            priority[op], changes.priority[index] = changes.priority[index], priority[op]


@kernel
def _is_better(score: FloatArray, other: FloatArray, tolerance: float) -> bool:
    if score[0] != other[0]:
        return bool(score[0] < other[0])
    # A step that is shorter by a rounding error is no reason to change anything.
    limit_s = other[1] * (tolerance - _NOISE)
    return bool(score[1] < limit_s or (score[1] <= other[1] and score[2] < other[2]))


@kernel
def _remember(walk: Walk, score: FloatArray, device: ByteArray, priority: FloatArray) -> None:
    for index in range(len(score)):
        walk.best[index] = score[index]
    for op in range(len(device)):
        walk.best_device[op] = device[op]
        walk.best_priority[op] = priority[op]


@kernel
def try_changes(
    bench: Bench, state: State, tables: Tables, changes: Changes, walk: Walk, is_strict: bool
) -> int:
    """Make the changes one by one and take back those that are not good enough.

    Stops at the first that is if the walk does; returns its number, or -1.
    """
    device, priority, score = bench.ops.device, bench.ops.priority, bench.score
    for which in range(len(changes.ptr) - 1):
        _exchange(changes, device, priority, which)
        evaluate(bench, state, tables, is_strict)
        if not _is_better(score, walk.present, changes.tolerance[which]):
            _exchange(changes, device, priority, which)
            continue
        if walk.stops[0]:
            return which
        for index in range(len(score)):
            walk.present[index] = score[index]
        if _is_better(score, walk.best, 1.0):
            _remember(walk, score, device, priority)
    return -1
