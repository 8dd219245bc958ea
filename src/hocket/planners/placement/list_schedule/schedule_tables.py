"""Build the event loop's tables from a problem, with ops numbered by rank.

O(reads log reads) in numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers, spans
from hocket.graph.graph import Graph, distinct
from hocket.kernels import kernel
from hocket.kernels.containers import ZERO, Heaps, new_heaps, table, zeros
from hocket.kernels.heaps import pop, push
from hocket.plan.problem import Problem
from hocket.planners.devices import op_s_of_units
from hocket.planners.placement.list_schedule import schedule_state as state
from hocket.planners.placement.list_schedule.schedule_state import Net, Queues, Rows, ScheduleState
from hocket.planners.tables import TaskTable

# Kahn's topological order with a first-in first-out queue, compiled. O(reads log ops).


@kernel
def _drain(freed: Heaps, order: LongArray, size: int) -> int:
    while freed.size[0] > 0:
        order[size] = pop(freed, ZERO)
        size += 1
    return size


@kernel
def walk(
    made_ptr: LongArray,
    user_ptr: LongArray,
    users: LongArray,
    waits: LongArray,
    freed: Heaps,
    order: LongArray,
) -> None:
    """Fill ``order``; ``waits`` counts produced inputs per op, ``freed`` is an empty heap.

    Ops that become ready together, after the same op, are listed in graph order, independently of
    which of its results they read.
    """
    for op in range(len(waits)):
        if waits[op] == 0:
            push(freed, ZERO, float(op), op)
    at, size = ZERO, _drain(freed, order, ZERO)
    while at < size:
        op = order[at]
        at += 1
        for tensor in range(made_ptr[op], made_ptr[op + 1]):
            for index in range(user_ptr[tensor], user_ptr[tensor + 1]):
                user = users[index]
                waits[user] -= 1
                if waits[user] == 0:
                    push(freed, ZERO, float(user), user)
        size = _drain(freed, order, size)


def breadth_first(graph: Graph) -> LongArray:
    """Return the ops in Kahn's topological order with a first-in first-out queue."""

    order = zeros(graph.num_ops)
    walk(
        table(graph.made_ptr, np.int64),
        table(graph.user_ptr, np.int64),
        table(graph.users, np.int64),
        _sums(graph.read_ptr, graph.tensor_producer[graph.reads] >= 0),
        new_heaps(np.array([0, graph.num_ops])),
        order,
    )
    return order


def new_state(
    problem: Problem,
    tasks: TaskTable,
    order: LongArray,
    group: IntArray,
    favourite: IntArray,
    spared_s: FloatArray,
) -> ScheduleState:
    """Build the state before the step; ``order`` lists the ops by rank, the others are per op."""
    rank = np.empty(len(order) + 1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1
    group_of = group[order].astype(np.int64)
    read_ptr, reads = _rows(tasks.read_ptr, tasks.reads, order)
    owner, family = _group_families(tasks, problem.graph, group_of, read_ptr, reads)
    groups = _groups(tasks, order, group_of, owner)
    ops = _ops(tasks, order, group_of, read_ptr, reads)
    most_bytes = groups["reserve_bytes"].copy()
    np.add.at(most_bytes, owner, tasks.copy_bytes[family])
    ops["most_bytes"] += most_bytes[group_of]
    ops["favourite"], ops["spared_s"] = rank[favourite[order]], spared_s[order]
    num_tensors, num_reads = problem.graph.num_tensors, len(reads)
    tensors = _tensors(problem.graph, tasks, rank)
    num_listed = int(tensors["directory"].max(initial=-1)) + 1
    return ScheduleState(
        net=Net(
            ops=ops,
            reads=table(reads, np.int64),
            tensors=tensors,
            copies=_filled(state.COPY_ROW, num_reads),
            directory=np.full((num_listed, problem.cluster.num_devices), -1, dtype=np.int64),
            routes=_routes(problem, tasks),
            queue_free_s=np.zeros(2 * problem.cluster.num_devices),
        ),
        queues=_queues(len(order), problem.cluster.num_devices),
        devices=_devices(problem),
        kind_s=table(op_s_of_units(problem, group)[:, order], np.float64),
        groups=groups,
        members=table(np.argsort(group_of, kind="stable"), np.int64),
        families=table(family, np.int64),
        family_ptr=table(pointers(np.bincount(family, minlength=num_tensors)), np.int64),
        readers=table(owner[np.argsort(family, kind="stable")], np.int64),
        users=table(rank[tasks.users], np.int64),
        storages=_filled(state.STORAGE_ROW, num_tensors + num_reads),
        remote=new_heaps(np.array([0, len(order)])),
        running=new_heaps(np.array([0, len(order)])),
        counts=_filled(
            state.COUNT_ROW, 1, most_bytes=ops["most_bytes"].max(initial=0), stuck_op=-1
        ),
    )


def _filled(dtype: np.dtype[np.void], count: int, **columns: Any) -> Rows:
    rows = np.zeros(count, dtype=dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


def _ops(
    tasks: TaskTable, order: LongArray, group: LongArray, read_ptr: LongArray, reads: LongArray
) -> Rows:
    freed_bytes = _sums(tasks.made_ptr, np.where(tasks.is_held, 0, tasks.held_bytes))
    taken_bytes = (tasks.workspace_bytes + freed_bytes)[order]
    return _filled(
        state.OP_ROW,
        len(order),
        group=group,
        read_start=read_ptr[:-1],
        read_stop=read_ptr[1:],
        made_start=tasks.made_ptr[order],
        made_stop=tasks.made_ptr[order + 1],
        taken_bytes=taken_bytes,
        workspace_bytes=tasks.workspace_bytes[order],
        most_bytes=taken_bytes + _sums(read_ptr, tasks.copy_bytes[reads]),
        waits=_sums(read_ptr, tasks.producer[reads] >= 0),
        device=-1,
    )


def _tensors(graph: Graph, tasks: TaskTable, rank: LongArray) -> Rows:
    num_readers = np.diff(tasks.user_ptr)
    is_popular = num_readers > state.MAX_LISTED
    return _filled(
        state.TENSOR_ROW,
        graph.num_tensors,
        producer=rank[tasks.producer],
        family=graph.root_of,
        alias_of=graph.alias_of,
        user_start=tasks.user_ptr[:-1],
        user_stop=tasks.user_ptr[1:],
        num_bytes=tasks.copy_bytes,
        work=tasks.work,
        is_held=tasks.is_held,
        is_everywhere=tasks.is_everywhere,
        owner=-1,
        last_copy=-1,
        storage=-1,
        directory=np.where(is_popular, np.cumsum(is_popular) - 1, -1),
        num_left=num_readers,
    )


def _group_families(
    tasks: TaskTable, graph: Graph, group: LongArray, read_ptr: LongArray, reads: LongArray
) -> tuple[LongArray, LongArray]:
    """Pairs of a group and a storage that exists before the step and is read by it, ascending."""
    early = np.flatnonzero(tasks.producer[reads] < 0)
    reader = np.searchsorted(read_ptr, early, side="right") - 1
    width = max(graph.num_tensors, 1)
    pairs = distinct(group[reader] * width + graph.root_of[reads[early]])
    return pairs // width, pairs % width


def _groups(tasks: TaskTable, order: LongArray, group: LongArray, owner: LongArray) -> Rows:
    num_groups = int(group.max(initial=-1)) + 1
    held_bytes = _sums(tasks.made_ptr, np.where(tasks.is_held, tasks.held_bytes, 0))
    reserve_bytes = zeros(num_groups)
    np.add.at(reserve_bytes, group, held_bytes[order])
    member_ptr = pointers(np.bincount(group, minlength=num_groups))
    family_ptr = pointers(np.bincount(owner, minlength=num_groups))
    return _filled(
        state.GROUP_ROW,
        num_groups,
        member_start=member_ptr[:-1],
        member_stop=member_ptr[1:],
        family_start=family_ptr[:-1],
        family_stop=family_ptr[1:],
        reserve_bytes=reserve_bytes,
        bound=-1,
    )


def _devices(problem: Problem) -> Rows:
    # Tensors that exist before the step and that no op reads are all on the first device.
    unread_bytes = zeros(problem.cluster.num_devices)
    unread_bytes[0] = problem.graph.held_bytes[problem.graph.owner_op < 0].sum()
    return _filled(
        state.DEVICE_ROW,
        problem.cluster.num_devices,
        kind=problem.costs.device_row,
        memory_bytes=problem.memory_bytes,
        used_bytes=unread_bytes,
        peak_bytes=unread_bytes,
        last_op=-1,
        wake_s=np.inf,
        runs_all=np.isfinite(problem.costs.op_s.max(axis=1, initial=0.0))[problem.costs.device_row],
    )


def _routes(problem: Problem, tasks: TaskTable) -> Rows:
    num, waits = problem.cluster.num_devices, problem.transfers != "parallel"
    routes = np.zeros((num, num), dtype=state.ROUTE_ROW)
    routes["latency_s"], routes["unit_s"] = tasks.latency_s, tasks.unit_s
    other = ~np.eye(num, dtype=np.bool_)
    for column in ("latency_s", "unit_s"):
        least = routes[column].min(axis=1, initial=np.inf, where=other)
        routes[f"least_{column}"] = least[:, None]
    routes["send_queue"] = tasks.send_queue[:, None] if waits else -1
    routes["receive_queue"] = tasks.receive_queue[None, :] if waits else -1
    return routes


def _queues(num_ops: int, num_devices: int) -> Queues:
    # Heaps are sized for every op: untouched pages of the array take no physical memory.
    return Queues(
        entries=_filled(state.ENTRY_ROW, state.NUM_HEAPS * num_devices * num_ops),
        size=zeros(state.NUM_HEAPS * num_devices),
        where=np.full((num_ops, num_devices), -1, dtype=np.int32),
    )


def _rows(ptr: LongArray, values: LongArray, order: LongArray) -> tuple[LongArray, LongArray]:
    """Return the rows of a ragged table in another order."""
    index, _ = spans(ptr, order)
    return pointers(np.diff(ptr)[order]), values[index]


def _sums(ptr: LongArray, values: NDArray[Any]) -> LongArray:
    """Sum the values of each row of a ragged table."""
    total = pointers(values)
    sums: LongArray = total[ptr[1:]] - total[ptr[:-1]]
    return sums
