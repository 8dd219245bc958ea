"""Time per step when many steps follow each other and host updates overlap with the next step.

By default a step ends when all parameters are updated, so its simulated time holds for every step.
With asynchronous updates, steps overlap: the next forward pass waits block by block for parameters
that are updated on the host or written back to it. So steps are timed one after another until two
take equally long. Every stream runs its ops in graph order, as in the simulator, except the host:
among updates whose gradients have arrived it runs the one of the lowest block, which the next
forward pass needs first (`runtime/offload/host_optimizer.py`). O(steps · (ops + reads + updates²)),
compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray, pointers
from hocket.graph.graph import Graph, Phase, Stream
from hocket.kernels import kernel
from hocket.simulate.rewriting.step import BudgetedStep
from hocket.simulate.rewriting.uses import Uses

_MOST_STEPS = 8
_SAME = 1e-9
"""Largest relative difference of two step times that count as equal."""
_COMPUTE, _HOST = int(Stream.COMPUTE), int(Stream.HOST)


class _Ops(NamedTuple):
    """Ops of a rewritten step in order, with their streams, times, blocks and dependencies."""

    stream: LongArray
    seconds: FloatArray
    block: LongArray
    wait_ptr: LongArray
    wait: LongArray
    """Per op, between pointers ``wait_ptr``: ops of the same step that it waits for."""
    late_ptr: LongArray
    late: LongArray
    """Per op, between pointers ``late_ptr``: ops of the previous step that it waits for."""
    updates: LongArray
    """Ops that run on the host."""


class _Clock(NamedTuple):
    """Times of the current step's ops, and of the previous step's."""

    end_s: FloatArray
    before_s: FloatArray
    """End of each op in the previous step."""
    ready_s: FloatArray
    is_done: BoolArray
    free_s: FloatArray
    """Time at which each stream is free."""


def async_step_s(step: BudgetedStep, uses: Uses) -> float:
    """Return the time per step of many steps with asynchronous updates."""
    graph, seconds, num_ops = step.rewritten.graph, _seconds(step), step.rewritten.graph.num_ops
    reader, maker = _dependences(graph)
    block = uses.first_block[step.rewritten.beside]
    ops = _Ops(
        graph.op_stream.astype(np.int64), seconds, block, *_grouped(reader, maker, num_ops),
        *_grouped(*_between_steps(graph, block), num_ops), np.flatnonzero(_on_host(graph)),
    )  # fmt: skip
    clock = _Clock(
        np.zeros(num_ops), np.zeros(num_ops), np.zeros(num_ops), np.zeros(num_ops, dtype=np.bool_),
        np.zeros(len(Stream)),
    )  # fmt: skip
    # No step is shorter than the work of its busiest stream.
    busiest_s = np.bincount(graph.op_stream, weights=seconds).max(initial=0.0)
    return max(float(_repeated_s(ops, clock, _MOST_STEPS)), float(busiest_s))


def has_host_updates(graph: Graph) -> bool:
    """Return True if part of a rewritten step can overlap with the next step."""
    return bool((_on_host(graph) | _swapped_updates(graph)).any())


def _seconds(step: BudgetedStep) -> FloatArray:
    device_of, costs = step.plan.device_of, step.problem.costs
    assert device_of is not None
    return np.asarray(costs.op_s[costs.device_row[device_of], np.arange(len(device_of))])


# ── dependencies ─────────────────────────────────────────────────────────────────────────────────


def _grouped(key: LongArray, value: LongArray, count: int) -> tuple[LongArray, LongArray]:
    order = np.argsort(key, kind="stable")
    return pointers(np.bincount(key, minlength=count)).astype(np.int64), value[order]


def _dependences(graph: Graph) -> tuple[LongArray, LongArray]:
    """Return pairs of an op and an op whose result it reads."""
    reader = graph.reader
    maker = graph.tensor_producer[graph.reads].astype(np.int64)
    return reader[maker >= 0], maker[maker >= 0]


def _on_host(graph: Graph) -> BoolArray:
    return np.asarray(graph.op_stream == Stream.HOST)


def _swapped_updates(graph: Graph) -> BoolArray:
    """Per op: True for device updates with swapped-in state, on the copy-out stream."""
    is_update = graph.op_phase == Phase.OPTIMIZER
    return np.asarray(is_update & (graph.op_stream == Stream.COPY_OUT))


def sent_gradients(graph: Graph) -> BoolArray:
    """Per op: True for copies of gradients to the host that host updates wait for."""
    reader, maker = _dependences(graph)
    before = np.zeros(graph.num_ops, dtype=np.bool_)
    before[maker[_on_host(graph)[reader]]] = True
    return np.asarray(before & (graph.op_stream == Stream.COPY_OUT))


def _between_steps(graph: Graph, block: LongArray) -> tuple[LongArray, LongArray]:
    """Return pairs of an op and an op of the previous step that it waits for.

    Fetches for the forward pass wait for updates and write-backs of the same block. The first
    compute op waits until the last gradient is used or sent.
    """
    reader, maker = _dependences(graph)
    swapped = _swapped_updates(graph)
    is_written_back = np.zeros(graph.num_ops, dtype=np.bool_)
    is_written_back[reader[swapped[maker]]] = True
    changes = _on_host(graph) | (is_written_back & (graph.op_stream == Stream.COPY_OUT))
    is_fetch = (graph.op_phase == Phase.FORWARD) & (graph.op_stream == Stream.COPY_IN)
    changing, fetching = np.flatnonzero(changes), np.flatnonzero(is_fetch)
    fetch, change = np.nonzero(block[fetching][:, None] == block[changing])
    later, earlier = fetching[fetch], changing[change]
    # The first op frees the gradients of the step before: all of them were used or sent by then.
    used = np.flatnonzero(swapped | sent_gradients(graph))
    computes = np.flatnonzero(graph.op_stream == Stream.COMPUTE)
    if len(computes) and len(used):
        later, earlier = np.append(later, computes[0]), np.append(earlier, used[-1])
    return later, earlier


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────


@kernel
def _next_update(ops: _Ops, clock: _Clock) -> int:
    """Return the host update that can start first, the one of the lowest block among equals."""
    found, found_s = -1, np.inf
    for op in ops.updates:
        if clock.is_done[op]:
            continue
        start_s = max(clock.free_s[_HOST], clock.ready_s[op])
        if start_s < found_s or (start_s == found_s and ops.block[op] < ops.block[found]):
            found, found_s = op, start_s
    return found


@kernel
def _run_step(ops: _Ops, clock: _Clock) -> None:
    """Time one more step; none of its ops waits for host updates of the same step."""
    for op in range(len(ops.stream)):
        ready_s = 0.0
        for at in range(ops.wait_ptr[op], ops.wait_ptr[op + 1]):
            ready_s = max(ready_s, clock.end_s[ops.wait[at]])
        clock.ready_s[op] = ready_s
        clock.is_done[op] = ops.stream[op] != _HOST
        if clock.is_done[op]:
            start_s = max(clock.free_s[ops.stream[op]], ready_s)
            for at in range(ops.late_ptr[op], ops.late_ptr[op + 1]):
                start_s = max(start_s, clock.before_s[ops.late[at]])
            clock.end_s[op] = start_s + ops.seconds[op]
            clock.free_s[ops.stream[op]] = clock.end_s[op]
    for _ in range(len(ops.updates)):
        op = _next_update(ops, clock)
        clock.end_s[op] = max(clock.free_s[_HOST], clock.ready_s[op]) + ops.seconds[op]
        clock.free_s[_HOST] = clock.end_s[op]
        clock.is_done[op] = True


@kernel
def _repeated_s(ops: _Ops, clock: _Clock, num_steps: int) -> float:
    """Return the time between ends of compute of two steps, once it no longer changes."""
    ended_s, took_s = 0.0, 0.0
    for _ in range(num_steps):
        for op in range(len(ops.stream)):
            clock.before_s[op] = clock.end_s[op]
        _run_step(ops, clock)
        now_s = clock.free_s[_COMPUTE]
        is_same = abs(now_s - ended_s - took_s) <= _SAME * took_s
        took_s, ended_s = now_s - ended_s, now_s
        if is_same:
            break
    return took_s
