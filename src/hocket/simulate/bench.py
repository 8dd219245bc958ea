"""The arrays on which many placements of one problem are evaluated, made once.

They have room for the placement with the most transfers: every tensor sent to every device on which
some op reads it. What the engine reads stands twice, as the writable arrays that each evaluation
fills and as read-only views of them, because the compiler tells the two apart.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray
from hocket.graph.graph import Graph, Role
from hocket.kernels.containers import table, zeros
from hocket.plan.problem import TRANSFER_MODES, Problem
from hocket.simulate.state import State, new_state
from hocket.simulate.tables import OpTable, PlaceTable, RouteTable, TransferTable

_Tuple = TypeVar("_Tuple", bound=tuple[NDArray[np.generic], ...])


class Fixed(NamedTuple):
    """What does not depend on the placement."""

    home_reader: ByteArray
    """Per tensor: the op at whose device it first is; -1 for none."""
    is_made: NDArray[np.bool_]
    is_input: NDArray[np.bool_]
    is_held: NDArray[np.bool_]
    alias_of: ByteArray
    tensor_bytes: ByteArray
    work: FloatArray
    """Per tensor: bytes, or stated seconds per link."""
    reads: ByteArray
    user_ptr: ByteArray
    user_read: ByteArray
    """Reads of tensor t: ``user_read[user_ptr[t]:user_ptr[t + 1]]`` are positions in ``reads``."""
    op_s: FloatArray
    """[kind, op]."""
    row: ByteArray
    """Row of ``op_s`` for each device."""
    memory_bytes: ByteArray
    latency_s: FloatArray
    """Per pair ``src * devices + dst``, as the following."""
    hops: ByteArray
    """Links on the way where seconds are stated per link, else 1."""
    slowest: FloatArray
    """Least capacity on the way."""
    route: ByteArray
    send_queue: ByteArray
    receive_queue: ByteArray
    mode: ByteArray
    """One number: how transfers affect each other."""


class Tables(NamedTuple):
    """What the engine reads."""

    ops: OpTable
    places: PlaceTable
    transfers: TransferTable
    routes: RouteTable


class Scratch(NamedTuple):
    """Passing results of one evaluation."""

    tensor: ByteArray
    """Tensor of each place."""
    away_ptr: ByteArray
    """Places of tensor t away from home: ``away_ptr[t]`` up to ``away_ptr[t + 1]``."""
    transfer_ptr: ByteArray
    """Transfers of tensor t, likewise."""
    is_copy: NDArray[np.bool_]
    place_on: ByteArray
    """Per device: the place there of the tensor at hand."""


class Changes(NamedTuple):
    """Things to try: change c is about ops ``op[ptr[c]:ptr[c + 1]]``, each at most once."""

    ptr: ByteArray
    op: ByteArray
    device: ByteArray
    """Where each op goes."""
    priority: FloatArray
    """The priority that it gets; not a number where it keeps its own."""
    partner: ByteArray
    """The op with which it exchanges priorities, and nothing else; -1 for none."""
    tolerance: FloatArray
    """Per change: good enough is a step shorter than the present one times this."""


class Walk(NamedTuple):
    """Where a row of changes has led to."""

    present: FloatArray
    """Score of what changes are compared with."""
    stops: NDArray[np.bool_]
    """One value: whether to stop at the first change that is good enough, or to go on from it."""
    best: FloatArray
    """Score of the best that was met."""
    best_device: ByteArray
    best_priority: FloatArray


class Bench(NamedTuple):
    """What is known of the problem, and the tables that each evaluation fills."""

    fixed: Fixed
    ops: OpTable
    places: PlaceTable
    transfers: TransferTable
    size_ptr: ByteArray
    """Transfers of each route, added up."""
    scratch: Scratch
    score: FloatArray
    """Of the latest evaluation: bytes too many, seconds of the step, bytes moved."""


def new_bench(problem: Problem) -> tuple[Bench, State, Tables]:
    """A bench for a problem, the state of the engine on it, and the tables that it reads."""
    graph, num_devices = problem.graph, problem.cluster.num_devices
    routes, route_of_pair = _routes(problem)
    num_users = np.diff(graph.user_ptr)
    num_away = int(np.minimum(num_users, num_devices - 1).sum())
    num_places = graph.num_tensors + num_away
    ops, places = _op_drafts(graph, num_devices), _place_drafts(graph, num_places, num_devices)
    transfers = _transfer_drafts(num_away)
    tables = Tables(_read_only(ops), _read_only(places), _read_only(transfers), _read_only(routes))
    state = new_state(tables.ops, tables.places, tables.transfers, tables.routes)
    bench = Bench(
        fixed=_fixed(problem, route_of_pair),
        ops=ops,
        places=places,
        transfers=transfers,
        size_ptr=routes.size_ptr,
        scratch=Scratch(
            tensor=zeros(num_places),
            away_ptr=zeros(graph.num_tensors + 1),
            transfer_ptr=zeros(graph.num_tensors + 1),
            is_copy=np.zeros(num_places, dtype=np.bool_),
            place_on=np.full(num_devices, -1, dtype=np.int64),
        ),
        score=np.zeros(3),
    )
    return bench, _with_room(state, num_away), tables


def _fixed(problem: Problem, route_of_pair: ByteArray) -> Fixed:
    graph, costs = problem.graph, problem.costs
    routes = costs.routes
    stated = costs.tensor_s is not None
    capacity = costs.channel_capacity()
    hops = routes.hops.ravel() if stated else np.ones(routes.hops.size)
    return Fixed(
        home_reader=table(graph.home_op, np.int64),
        is_made=table(graph.tensor_producer >= 0, np.bool_),
        is_input=table(graph.tensor_role == Role.INPUT, np.bool_),
        is_held=table(graph.is_held, np.bool_),
        alias_of=table(graph.alias_of, np.int64),
        tensor_bytes=table(graph.tensor_bytes, np.int64),
        work=table(costs.tensor_bytes if costs.tensor_s is None else costs.tensor_s, np.float64),
        reads=table(graph.reads, np.int64),
        user_ptr=table(graph.user_ptr, np.int64),
        user_read=table(np.argsort(graph.reads, kind="stable"), np.int64),
        op_s=table(costs.op_s, np.float64),
        row=table(costs.device_row, np.int64),
        memory_bytes=table(problem.memory_bytes, np.int64),
        latency_s=table(routes.latency_s.ravel(), np.float64),
        hops=table(hops, np.int64),
        slowest=table(_slowest(problem, capacity), np.float64),
        route=table(route_of_pair, np.int64),
        send_queue=table(routes.send_queue, np.int64),
        receive_queue=table(routes.receive_queue, np.int64),
        mode=table([TRANSFER_MODES.index(problem.transfers)], np.int64),
    )


def _slowest(problem: Problem, capacity: FloatArray) -> FloatArray:
    ptr, path = problem.costs.routes.path_ptr, problem.costs.routes.path_channels
    slowest = np.full(len(ptr) - 1, np.inf)
    pair = np.repeat(np.arange(len(slowest)), np.diff(ptr))
    np.minimum.at(slowest, pair, capacity[path])
    return slowest


def _routes(problem: Problem) -> tuple[RouteTable, ByteArray]:
    """The routes of all pairs, told apart by their channels, and which of them each pair takes."""
    costs, num = problem.costs, problem.cluster.num_devices
    number: dict[tuple[int, ...], int] = {}
    route_of_pair = zeros(num * num)
    for pair in range(num * num):
        src, dst = divmod(pair, num)
        if src != dst:
            path = tuple(costs.routes.path(src, dst).tolist())
            route_of_pair[pair] = number.setdefault(path, len(number))
    capacity = costs.channel_capacity()
    lengths = np.array([len(path) for path in number], dtype=np.int64)
    flat = np.array([channel for path in number for channel in path], dtype=np.int64)
    counts = np.bincount(flat, minlength=len(capacity))
    return RouteTable(
        size_ptr=zeros(len(number) + 1),
        path_ptr=_pointers(lengths),
        path=flat,
        hop_route=np.repeat(np.arange(len(number)), lengths),
        on_ptr=_pointers(counts),
        capacity=np.array(capacity, dtype=np.float64),
    ), route_of_pair


def _op_drafts(graph: Graph, num_devices: int) -> OpTable:
    num_ops = graph.num_ops
    return OpTable(
        device=zeros(num_ops),
        duration_s=np.zeros(num_ops),
        alloc_bytes=zeros(num_ops),
        workspace_bytes=graph.workspace_bytes.astype(np.int64),
        num_waits=zeros(num_ops),
        made_ptr=graph.made_ptr.astype(np.int64),
        read_ptr=graph.read_ptr.astype(np.int64),
        send_ptr=zeros(num_ops + 1),
        priority=np.arange(num_ops, dtype=np.float64),
        lineup_ptr=zeros(num_devices + 1),
        lineup=zeros(num_ops),
    )


def _place_drafts(graph: Graph, num_places: int, num_devices: int) -> PlaceTable:
    return PlaceTable(
        device=zeros(num_places),
        storage=zeros(num_places),
        num_bytes=zeros(num_places),
        is_kept=np.zeros(num_places, dtype=np.bool_),
        num_uses=zeros(num_places),
        reader=np.repeat(np.arange(graph.num_ops, dtype=np.int64), np.diff(graph.read_ptr)),
        read_place=zeros(len(graph.reads)),
        start_bytes=zeros(num_devices),
    )


def _transfer_drafts(count: int) -> TransferTable:
    return TransferTable(
        place=zeros(count),
        tensor=zeros(count),
        send_queue=zeros(count),
        receive_queue=zeros(count),
        latency_s=np.zeros(count),
        work=np.zeros(count),
        duration_s=np.zeros(count),
        route=zeros(count),
    )


def _with_room(state: State, num_transfers: int) -> State:
    """Heaps that hold whatever a placement asks for; their parts are set by each evaluation."""
    flow, schedule = state.flow, state.schedule
    heaps = flow.heaps._replace(key=np.zeros(num_transfers + 1), item=zeros(num_transfers + 1))
    num_ops = len(schedule.waits)
    ready = schedule.ready._replace(key=np.zeros(num_ops + 1), item=zeros(num_ops + 1))
    return state._replace(flow=flow._replace(heaps=heaps), schedule=schedule._replace(ready=ready))


def _read_only(part: _Tuple) -> _Tuple:
    make = type(part)._make  # type: ignore[attr-defined]
    return cast(_Tuple, make(table(array, array.dtype.type) for array in part))


def _pointers(sizes: NDArray[np.int64]) -> ByteArray:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
