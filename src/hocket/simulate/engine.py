"""Simulate a plan: prepare tables from the problem and the plan, run the compiled engine on them.

What is simulated exactly stands in ``docs/simulator.md``. Preparation is numpy; the compiler is
imported by the first simulation, never before.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray, IntArray
from hocket.cost.costs import Costs
from hocket.errors import CheckError, UsageError
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import TRANSFER_MODES, Problem
from hocket.simulate.places import Places, find_places, home_devices
from hocket.simulate.state import Memory, Spans, new_state
from hocket.simulate.tables import OpTable, PlaceTable, RouteTable, TransferTable
from hocket.simulate.timeline import Timeline

__all__ = ["home_devices", "kernels_are_compiled", "simulate"]

_T = TypeVar("_T", bound=np.generic)


def simulate(problem: Problem, plan: Plan) -> Timeline:
    """What carrying out ``plan`` would be like: every span, and memory over time.

    Devices that need more memory than they have are no error here: the peaks tell. Raises
    `UsageError` for a plan without a placement, `CheckError` for one that cannot be carried out.
    """
    device_of = _placement(problem, plan)
    places = find_places(problem.graph, device_of, problem.cluster.num_devices)
    ops = _op_table(problem, plan, places, device_of)
    transfers, routes = _transfer_tables(problem.costs, places)

    place_table = _place_table(places, problem.cluster.num_devices)
    state = new_state(ops, place_table, transfers, routes)
    mode, is_strict = TRANSFER_MODES.index(problem.transfers), plan.order is not None

    from hocket.simulate.kernel import run

    run(state, ops, place_table, transfers, routes, mode, is_strict)
    spans = state.spans
    if np.isnan(spans.op_end_s).any():
        raise _deadlock(problem, plan, device_of, spans)
    order = np.argsort(spans.transfer_start_s, kind="stable")
    memory_ptr, memory_time_s, memory_bytes = _curves(state.memory)
    return Timeline(
        makespan_s=_last(spans),
        op_device=device_of,
        op_start_s=spans.op_start_s,
        op_end_s=spans.op_end_s,
        transfer_tensor=places.tensor[places.transfer_place][order],
        transfer_src=places.device[transfers.tensor][order],
        transfer_dst=places.device[places.transfer_place][order],
        transfer_ready_s=spans.transfer_ready_s[order],
        transfer_start_s=spans.transfer_start_s[order],
        transfer_end_s=spans.transfer_end_s[order],
        memory_ptr=memory_ptr,
        memory_time_s=memory_time_s,
        memory_bytes=memory_bytes,
        peak_bytes=state.memory.peak,
    )


def kernels_are_compiled() -> bool:
    """Whether the next simulation starts at once instead of compiling first."""
    from hocket.kernels import is_compiled
    from hocket.simulate.kernel import run

    return is_compiled(run)


# ── what the plan says, checked ──────────────────────────────────────────────────────────────────


def _placement(problem: Problem, plan: Plan) -> IntArray:
    graph, names = problem.graph, problem.cluster.device_names
    if plan.device_of is None:
        raise UsageError(
            "the plan does not say where ops run",
            hint="run a placement planner first",
            where=plan.planner,
        )
    device_of = np.array(plan.device_of, dtype=np.int32)
    if device_of.shape != (graph.num_ops,):
        raise _mismatch(
            plan, f"the plan places {device_of.size} ops, the graph has {graph.num_ops}"
        )
    wrong = np.flatnonzero((device_of < 0) | (device_of >= len(names)))
    if len(wrong):
        op = int(wrong[0])
        raise _mismatch(
            plan,
            f"op {graph.op_names[op]!r} is on device {device_of[op]}, there are {len(names)}",
        )
    row = problem.costs.device_row[device_of]
    never = np.flatnonzero(~np.isfinite(problem.costs.op_s[row, np.arange(graph.num_ops)]))
    if len(never):
        op = int(never[0])
        raise CheckError(
            f"op {graph.op_names[op]!r} cannot run on {names[device_of[op]]!r}",
            hint="place it on a device of another kind",
            where=plan.planner,
        )
    return device_of


def _line_up(problem: Problem, plan: Plan, device_of: IntArray) -> IntArray:
    """The strict order of all devices joined; each device must list its own ops once."""
    order = plan.order or ()
    if len(order) != problem.cluster.num_devices:
        raise _mismatch(
            plan,
            f"the plan orders {len(order)} devices, the cluster has {problem.cluster.num_devices}",
        )
    names = problem.graph.op_names
    line_up = np.concatenate([np.asarray(ops, dtype=np.int32).ravel() for ops in order])
    listed_on = np.repeat(np.arange(len(order)), [len(ops) for ops in order])
    if np.any((line_up < 0) | (line_up >= len(names))):
        raise _mismatch(plan, "the order names an op that does not exist")
    elsewhere = np.flatnonzero(device_of[line_up] != listed_on)
    if len(elsewhere):
        at = int(elsewhere[0])
        device = problem.cluster.device_names[int(listed_on[at])]
        raise _mismatch(plan, f"op {names[line_up[at]]!r} is in the order of {device!r}, not on it")
    times = np.bincount(line_up, minlength=len(names))
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        op = int(wrong[0])
        raise _mismatch(plan, f"op {names[op]!r} is in the order {times[op]} times, not once")
    return line_up


def _mismatch(plan: Plan, message: str) -> CheckError:
    hint = "plan this graph on this cluster again; the plan seems made for another"
    return CheckError(message, hint=hint, where=plan.planner)


def _deadlock(problem: Problem, plan: Plan, device_of: IntArray, spans: Spans) -> CheckError:
    """The first device's op that cannot start, and the op that it waits for."""
    graph, names = problem.graph, problem.cluster.device_names
    missing = np.isnan(spans.op_end_s)
    for ops in plan.order or ():
        op = next((int(op) for op in ops if missing[op]), None)
        if op is None:
            continue
        producers = graph.tensor_producer[graph.reads_of(op)]
        tensor = next(
            (int(t) for t, p in zip(graph.reads_of(op), producers, strict=True)
             if p >= 0 and missing[p]),
            None,
        )  # fmt: skip
        if tensor is None:
            continue
        producer = int(graph.tensor_producer[tensor])
        return CheckError(
            f"op {graph.op_names[op]!r} can never start on {names[device_of[op]]!r}: it waits for "
            f"{graph.tensor_names[tensor]!r} of op {graph.op_names[producer]!r} on "
            f"{names[device_of[producer]]!r}, which in turn waits for it",
            hint="order the ops of each device so that producers come before their readers",
            where=plan.planner,
        )
    raise AssertionError("ops are missing though none waits for another")


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def _op_table(problem: Problem, plan: Plan, places: Places, device_of: IntArray) -> OpTable:
    graph, num_ops = problem.graph, problem.graph.num_ops
    row = problem.costs.device_row[device_of]
    made_bytes = np.concatenate(([0], np.cumsum(places.num_bytes[: graph.num_tensors])))
    late = ~places.is_before[places.read_place]
    sizes = np.bincount(device_of, minlength=problem.cluster.num_devices)
    priority = np.arange(num_ops) if plan.priority is None else plan.priority
    if np.shape(priority) != (num_ops,):
        raise _mismatch(plan, f"the plan has {np.size(priority)} priorities for {num_ops} ops")
    is_strict = plan.order is not None
    return OpTable(
        device=table(device_of, np.int64),
        duration_s=table(problem.costs.op_s[row, np.arange(num_ops)], np.float64),
        alloc_bytes=table(np.diff(made_bytes[graph.made_ptr]) + graph.workspace_bytes, np.int64),
        workspace_bytes=table(graph.workspace_bytes, np.int64),
        num_waits=table(np.bincount(places.reader[late], minlength=num_ops), np.int64),
        made_ptr=table(graph.made_ptr, np.int64),
        read_ptr=table(graph.read_ptr, np.int64),
        send_ptr=table(places.send_ptr, np.int64),
        priority=table(priority, np.float64),
        lineup_ptr=table(_pointers(sizes), np.int64),
        lineup=table(_line_up(problem, plan, device_of) if is_strict else (), np.int64),
    )


def _place_table(places: Places, num_devices: int) -> PlaceTable:
    start_bytes = np.zeros(num_devices, dtype=np.int64)
    before = places.is_before
    np.add.at(start_bytes, places.device[before], places.num_bytes[before])
    return PlaceTable(
        device=table(places.device, np.int64),
        storage=table(places.storage, np.int64),
        num_bytes=table(places.num_bytes, np.int64),
        is_kept=table(places.is_kept, np.bool_),
        num_uses=table(places.num_uses, np.int64),
        reader=table(places.reader, np.int64),
        read_place=table(places.read_place, np.int64),
        start_bytes=table(start_bytes, np.int64),
    )


def _transfer_tables(costs: Costs, places: Places) -> tuple[TransferTable, RouteTable]:
    tensor = places.tensor[places.transfer_place]
    src, dst = places.device[tensor], places.device[places.transfer_place]
    num_devices = len(costs.routes.send_queue)
    pair = src.astype(np.int64) * num_devices + dst
    paths: dict[tuple[int, ...], int] = {}
    route_of_pair = np.zeros(num_devices**2, dtype=np.int64)
    for used in np.flatnonzero(np.bincount(pair, minlength=num_devices**2)).tolist():
        path = tuple(costs.routes.path(*divmod(used, num_devices)).tolist())
        route_of_pair[used] = paths.setdefault(path, len(paths))
    route = route_of_pair[pair]
    routes = _route_table(list(paths), np.bincount(route, minlength=len(paths)), costs)
    slowest = np.array([routes.capacity[list(path)].min() for path in paths])[route]
    work = np.where(np.isinf(slowest), 0.0, costs.transfer_work(tensor, src, dst))
    latency_s = costs.routes.latency_s[src, dst]
    transfers = TransferTable(
        place=table(places.transfer_place, np.int64),
        tensor=table(tensor, np.int64),
        send_queue=table(costs.routes.send_queue[src], np.int64),
        receive_queue=table(costs.routes.receive_queue[dst], np.int64),
        latency_s=table(latency_s, np.float64),
        work=table(work, np.float64),
        duration_s=table(latency_s + work / slowest, np.float64),
        route=table(route, np.int64),
    )
    return transfers, routes


def _route_table(
    paths: list[tuple[int, ...]], num_transfers: NDArray[np.int64], costs: Costs
) -> RouteTable:
    capacity = costs.channel_capacity()
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    flat = np.array([channel for path in paths for channel in path], dtype=np.int64)
    return RouteTable(
        size_ptr=table(_pointers(num_transfers), np.int64),
        path_ptr=table(_pointers(lengths), np.int64),
        path=table(flat, np.int64),
        hop_route=table(np.repeat(np.arange(len(paths)), lengths), np.int64),
        on_ptr=table(_pointers(np.bincount(flat, minlength=len(capacity))), np.int64),
        capacity=table(capacity, np.float64),
    )


def _pointers(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def _curves(memory: Memory) -> tuple[ByteArray, FloatArray, ByteArray]:
    """The log by device, without entries that repeat the value before."""
    size = int(memory.size[0])
    device = memory.log_device[:size].astype(np.int16)
    order = np.argsort(device, kind="stable")
    device, num_bytes = device[order], memory.log_bytes[order]
    changes = np.ones(size, dtype=np.bool_)
    changes[1:] = (device[1:] != device[:-1]) | (num_bytes[1:] != num_bytes[:-1])
    counts = np.bincount(device[changes], minlength=len(memory.now))
    return _pointers(counts), memory.log_time_s[order][changes], num_bytes[changes]


def _last(spans: Spans) -> float:
    return float(max(spans.op_end_s.max(initial=0.0), spans.transfer_end_s.max(initial=0.0)))
