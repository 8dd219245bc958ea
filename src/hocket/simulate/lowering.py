"""Lowering: from a problem and a plan to instructions.

Every tensor is placed on its owner device, and on each other device with an op that reads it. A
transfer fills these other places, except for the batch, which is on every device. A view shares the
storage of its base if both are on the device from the start or made there. Whatever is independent
of the plan is prepared once (`LoweringBuffers`), so that many plans of one problem can be lowered
into the same arrays. O(ops + reads + tensors + routes), compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.cost.costs import Costs
from hocket.cost.demand import BESIDE, FILL, ON_DEVICE, ON_HOST
from hocket.graph.graph import Graph, Role, Stream
from hocket.kernels import kernel
from hocket.kernels.containers import zeros
from hocket.plan.problem import TRANSFER_MODES, Problem
from hocket.simulate.instructions import (
    Given,
    Instructions,
    PlaceTable,
    RouteTable,
    RunTable,
    Scratch,
    TransferTable,
    constants,
    zeroed,
)


class LoweringBuffers(NamedTuple):
    """Constants of a problem, and the tables that each lowering fills.

    The tables are large enough for the placement with the most transfers: every tensor sent to
    every device that could read it.
    """

    given: Given
    tables: Instructions
    scratch: Scratch


def new_buffers(problem: Problem, devices: IntArray | None = None) -> LoweringBuffers:
    """Return buffers for plans of a problem that use only ``devices``, by default all."""
    graph, num_devices = problem.graph, problem.cluster.num_devices
    used = np.arange(num_devices) if devices is None else np.unique(devices)
    routes, route_of_pair = _routes(problem.costs, used.tolist(), num_devices)
    # At most one copy per reader and per other device.
    num_away = int(np.minimum(np.diff(graph.user_ptr), max(len(used) - 1, 0)).sum())
    given = _given(problem, route_of_pair)
    num_streams = int(given.num_streams[0])
    num_queues = num_devices * num_streams
    runs = zeroed(
        RunTable, graph.num_ops,
        workspace_bytes=graph.workspace_bytes.astype(np.int64),
        made_ptr=graph.made_ptr.astype(np.int64),
        read_ptr=graph.read_ptr.astype(np.int64),
        send_ptr=zeros(graph.num_ops + 1),
        lineup_ptr=zeros(num_queues + 1),
        beside=np.ones(graph.num_ops),
        other_stream=_other_streams(num_queues, num_streams),
    )  # fmt: skip
    places = zeroed(
        PlaceTable, graph.num_tensors + num_away,
        reader=graph.reader.astype(np.int64),
        read_place=zeros(len(graph.reads)),
        start_bytes=zeros(num_devices),
    )  # fmt: skip
    return LoweringBuffers(
        given=given,
        tables=Instructions(runs, places, zeroed(TransferTable, num_away), routes),
        scratch=Scratch(
            away_ptr=zeros(graph.num_tensors + 1),
            transfer_ptr=zeros(graph.num_tensors + 1),
            place_on=np.full(num_devices, -1, dtype=np.int64),
            num_found=zeros(2),
        ),
    )


def owner_devices(graph: Graph, device_of: IntArray) -> IntArray:
    """Return the first device of each tensor: that of its `Graph.owner_op`, or device 0."""
    return np.append(device_of, 0)[graph.owner_op].astype(np.int32)


def order_priority(order: tuple[IntArray, ...]) -> FloatArray:
    """Return priorities equivalent to strict orders: the position of each op on its device."""
    priority = np.zeros(sum(len(ops) for ops in order))
    for ops in order:
        priority[ops] = np.arange(len(ops))
    return priority


def trimmed(buffers: LoweringBuffers) -> Instructions:
    """Return the tables of the latest lowering, cut to the entries in use."""
    num_places, num_transfers = buffers.scratch.num_found.tolist()
    runs, places, transfers, routes = buffers.tables
    columns = ("tensor", "device", "is_copy", "storage", "num_bytes", "is_kept", "num_uses")
    return Instructions(
        runs=runs,
        places=places._replace(**{name: getattr(places, name)[:num_places] for name in columns}),
        transfers=TransferTable._make(column[:num_transfers] for column in transfers),
        routes=routes,
    )


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────


def _given(problem: Problem, route_of_pair: LongArray) -> Given:
    graph, costs = problem.graph, problem.costs
    routes = costs.routes
    is_stated = costs.tensor_s is not None
    return constants(
        Given,
        owner_op=graph.owner_op,
        is_made=graph.tensor_producer >= 0,
        is_input=graph.tensor_role == Role.INPUT,
        is_held=graph.is_held,
        alias_of=graph.alias_of,
        tensor_bytes=graph.tensor_bytes,
        work=costs.tensor_bytes if costs.tensor_s is None else costs.tensor_s,
        reads=graph.reads,
        user_ptr=graph.user_ptr,
        user_read=np.argsort(graph.reads, kind="stable"),
        op_stream=graph.op_stream,
        op_s=costs.op_s,
        demand=np.zeros((0, 0, 0)) if costs.demand is None else costs.demand,
        row=costs.device_row,
        memory_bytes=problem.memory_bytes,
        latency_s=routes.latency_s.ravel(),
        hops=routes.hops.ravel() if is_stated else np.ones(routes.hops.size),
        slowest=_slowest(costs),
        route=route_of_pair,
        send_queue=routes.send_queue,
        receive_queue=routes.receive_queue,
        mode=[TRANSFER_MODES.index(problem.transfers)],
        num_streams=[int(graph.op_stream.max(initial=0)) + 1],
    )


def _other_streams(num_queues: int, num_streams: int) -> LongArray:
    """Return, per queue, the queue of its device's other compute stream; -1 if there is none."""
    other = np.full(num_queues, -1, dtype=np.int64)
    if num_streams > Stream.SECOND:
        first = np.arange(0, num_queues, num_streams)
        other[first], other[first + Stream.SECOND] = first + Stream.SECOND, first
    return other


def _slowest(costs: Costs) -> FloatArray:
    ptr, path = costs.routes.path_ptr, costs.routes.path_channels
    slowest = np.full(len(ptr) - 1, np.inf)
    pair = np.repeat(np.arange(len(slowest)), np.diff(ptr))
    np.minimum.at(slowest, pair, costs.channel_capacity()[path])
    return slowest


def _routes(costs: Costs, devices: list[int], num_devices: int) -> tuple[RouteTable, LongArray]:
    """Return the distinct routes between the devices, and the route of each pair of devices."""
    number: dict[tuple[int, ...], int] = {}
    # Pairs of devices with the same channels share one route, and so one heap of transfers.
    route_of_pair = zeros(num_devices * num_devices)
    for src in devices:
        for dst in devices:
            if src != dst:
                path = tuple(costs.routes.path(src, dst).tolist())
                route_of_pair[src * num_devices + dst] = number.setdefault(path, len(number))
    capacity = np.array(costs.channel_capacity(), dtype=np.float64)
    lengths = np.array([len(path) for path in number], dtype=np.int64)
    flat = np.array([channel for path in number for channel in path], dtype=np.int64)
    return RouteTable(
        size_ptr=zeros(len(number) + 1),
        path_ptr=pointers(lengths),
        path=flat,
        hop_route=np.repeat(np.arange(len(number)), lengths),
        on_ptr=pointers(np.bincount(flat, minlength=len(capacity))),
        capacity=capacity,
    ), route_of_pair


# ── lowering ─────────────────────────────────────────────────────────────────────────────────────


@kernel
def _find_places(given: Given, device_of: LongArray, places: PlaceTable, scratch: Scratch) -> int:
    """List the places of every tensor, its owner device first; return their number."""
    here, num_tensors = scratch.place_on, len(given.alias_of)
    end = num_tensors
    scratch.away_ptr[0] = end
    # `here` maps devices to places of the current tensor; it is all -1 between tensors.
    for tensor in range(num_tensors):
        owner_op, first = given.owner_op[tensor], end
        owner = device_of[owner_op] if owner_op >= 0 else 0
        places.device[tensor] = owner
        places.tensor[tensor] = tensor
        places.is_copy[tensor] = False
        for index in range(given.user_ptr[tensor], given.user_ptr[tensor + 1]):
            read = given.user_read[index]
            device = device_of[places.reader[read]]
            if device != owner and here[device] < 0:
                # Few devices read one tensor, so sorting by insertion is the quickest.
                at = end
                while at > first and places.device[at - 1] > device:
                    places.device[at] = places.device[at - 1]
                    at -= 1
                places.device[at] = device
                here[device] = 0
                end += 1
        here[owner] = tensor
        for place in range(first, end):
            here[places.device[place]] = place
            places.tensor[place] = tensor
            places.is_copy[place] = given.is_made[tensor] or not given.is_input[tensor]
        for index in range(given.user_ptr[tensor], given.user_ptr[tensor + 1]):
            read = given.user_read[index]
            places.read_place[read] = here[device_of[places.reader[read]]]
        here[owner] = -1
        for place in range(first, end):
            here[places.device[place]] = -1
        scratch.away_ptr[tensor + 1] = end
    return end


@kernel
def _find_base(given: Given, places: PlaceTable, scratch: Scratch, place: int) -> int:
    """Return the place of a view's base, or the place itself if it has its own bytes."""
    tensor, device = places.tensor[place], places.device[place]
    base: int = given.alias_of[tensor]
    if base < 0 or places.is_copy[place]:
        return place
    if places.device[base] == device:
        return base
    for away in range(scratch.away_ptr[base], scratch.away_ptr[base + 1]):
        if places.device[away] == device:
            # Before the step a copy has not arrived yet, so a view cannot be stored in it: it gets
            # own bytes.
            return place if places.is_copy[away] and not given.is_made[tensor] else away
    return place


@kernel
def _find_storages(given: Given, places: PlaceTable, scratch: Scratch, num_places: int) -> None:
    for place in range(num_places):
        places.storage[place] = _find_base(given, places, scratch, place)
        places.num_uses[place] = 0
        places.is_kept[place] = False
    for device in range(len(places.start_bytes)):
        places.start_bytes[device] = 0
    for place in range(num_places):
        root = place
        while places.storage[root] != root:
            root = places.storage[root]
        places.storage[place] = root
        tensor, is_copy = places.tensor[place], places.is_copy[place]
        owns = root == place
        places.num_bytes[place] = given.tensor_bytes[tensor] if owns else 0
        if given.is_input[tensor] if is_copy else given.is_held[tensor]:
            places.is_kept[root] = True
        # The producer is a use as well, so that a result without readers is freed when it ends.
        if owns and given.is_made[tensor] and not is_copy:
            places.num_uses[place] += 1
        if not given.is_made[tensor] and not is_copy:
            places.start_bytes[places.device[place]] += places.num_bytes[place]


@kernel
def _list_transfers(
    given: Given,
    places: PlaceTable,
    transfers: TransferTable,
    size_ptr: LongArray,
    scratch: Scratch,
) -> int:
    """List one transfer for each place that is a copy; return their number."""
    num_devices = len(places.start_bytes)
    for route in range(len(size_ptr)):
        size_ptr[route] = 0
    count = 0
    for tensor in range(len(given.alias_of)):
        scratch.transfer_ptr[tensor] = count
        src = places.device[tensor]
        for place in range(scratch.away_ptr[tensor], scratch.away_ptr[tensor + 1]):
            if not places.is_copy[place]:
                continue
            places.num_uses[places.storage[tensor]] += 1
            dst = places.device[place]
            pair = src * num_devices + dst
            work = given.work[tensor] * given.hops[pair]
            slowest = given.slowest[pair]
            transfers.place[count] = place
            transfers.tensor[count] = tensor
            transfers.send_queue[count] = given.send_queue[src]
            transfers.receive_queue[count] = given.receive_queue[dst]
            transfers.latency_s[count] = given.latency_s[pair]
            # Infinite capacity: the transfer takes its latency alone.
            transfers.work[count] = 0.0 if slowest == np.inf else work
            transfers.duration_s[count] = given.latency_s[pair] + transfers.work[count] / slowest
            transfers.route[count] = given.route[pair]
            size_ptr[given.route[pair] + 1] += 1
            count += 1
    scratch.transfer_ptr[len(given.alias_of)] = count
    for route in range(1, len(size_ptr)):
        size_ptr[route] += size_ptr[route - 1]
    return count


@kernel
def _list_runs(given: Given, runs: RunTable, places: PlaceTable, scratch: Scratch) -> None:
    ptr, num_streams = runs.lineup_ptr, given.num_streams[0]
    for queue in range(len(ptr)):
        ptr[queue] = 0
    for op in range(len(runs.device)):
        device = runs.device[op]
        runs.queue[op] = device * num_streams + given.op_stream[op]
        ptr[runs.queue[op] + 1] += 1
        runs.duration_s[op] = given.op_s[given.row[device], op]
        if len(given.demand) > 0:
            row = given.row[device]
            runs.kernel_s[op] = given.demand[ON_DEVICE, row, op] * runs.duration_s[op]
            runs.issue_s[op] = given.demand[ON_HOST, row, op] * runs.duration_s[op]
            runs.fill[op] = given.demand[FILL, row, op]
            runs.beside[op] = given.demand[BESIDE, row, op]
        num_bytes = runs.workspace_bytes[op]
        for tensor in range(runs.made_ptr[op], runs.made_ptr[op + 1]):
            num_bytes += places.num_bytes[tensor]
        runs.alloc_bytes[op] = num_bytes
        num_waits = 0
        for index in range(runs.read_ptr[op], runs.read_ptr[op + 1]):
            place = places.read_place[index]
            places.num_uses[places.storage[place]] += 1
            # Tensors that exist on the device from the start need no waiting.
            if given.is_made[given.reads[index]] or places.is_copy[place]:
                num_waits += 1
        runs.num_waits[op] = num_waits
        runs.send_ptr[op] = scratch.transfer_ptr[runs.made_ptr[op]]
    runs.send_ptr[len(runs.device)] = scratch.transfer_ptr[runs.made_ptr[len(runs.device)]]
    for queue in range(1, len(ptr)):
        ptr[queue] += ptr[queue - 1]


@kernel
def lower_into(given: Given, tables: Instructions, scratch: Scratch) -> None:
    """Fill the tables for the devices and priorities in ``tables.runs``."""
    runs, places, transfers = tables.runs, tables.places, tables.transfers
    num_places = _find_places(given, runs.device, places, scratch)
    _find_storages(given, places, scratch, num_places)
    size_ptr = tables.routes.size_ptr
    scratch.num_found[0] = num_places
    scratch.num_found[1] = _list_transfers(given, places, transfers, size_ptr, scratch)
    _list_runs(given, runs, places, scratch)
