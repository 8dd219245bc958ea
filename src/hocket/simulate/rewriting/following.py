"""Rewritten steps that follow each other: how long a step among many takes.

A step ends when all parameters are updated, those on the host included. Asynchronous updates run
into the next forward pass instead, and state that came to the device is written back meanwhile. So
steps are timed one after the other until each takes as long as the one before. Every stream runs
its ops in the order of the graph, as in the simulator; the host updates one parameter after the
other, of those whose gradients have come one that the next forward pass needs first, as the
executor does (`runtime/offload/host_optimizer.py`); what a step brings waits for what the last one
changed. O(steps · (ops + reads + updates²)), compiled.
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
"""Steps are as long as each other within this part."""
_COMPUTE = int(Stream.COMPUTE)


class HostOrder(NamedTuple):
    """Order of updates on the host, and the ops that wait for them."""

    by_need: bool
    """Of the updates that can be done, the one of the lowest block first; else as they come."""
    crosses: bool
    """True if a block waits for its own update alone. Otherwise a step waits for all updates of the
    step before, and for the write-back of state that was swapped in."""
    overlaps: bool = True
    """True if updates begin before the backward pass is over."""


FINISHED = HostOrder(by_need=True, crosses=False)
"""Updates are finished when a step ends: what the executor does."""
ASYNC = HostOrder(by_need=True, crosses=True)
"""Updates run into the next step (``async_update``)."""


class _Ops(NamedTuple):
    """Ops of a step in order."""

    stream: LongArray
    seconds: FloatArray
    job: LongArray
    """Of an update on the host: its number; -1 for other ops."""
    wait_ptr: LongArray
    wait: LongArray
    """Ops of the same step that each waits for."""
    late_ptr: LongArray
    late: LongArray
    """Ops of the step before."""


class _Jobs(NamedTuple):
    """Updates of the host."""

    block: LongArray
    seconds: FloatArray
    came_s: FloatArray
    end_s: FloatArray
    is_done: BoolArray


class _Clock(NamedTuple):
    """When things end."""

    end_s: FloatArray
    before_s: FloatArray
    """The same of the step before."""
    free_s: FloatArray
    """By stream."""


def period_s(step: BudgetedStep, uses: Uses, how: HostOrder = FINISHED) -> float:
    """Seconds of a step among many."""
    ops, jobs = _tables(step, uses)
    clock = _Clock(np.zeros(len(ops.stream)), np.zeros(len(ops.stream)), np.zeros(len(Stream)))
    return max(float(_repeated_s(ops, jobs, clock, how, _MOST_STEPS)), busiest_s(step))


def busiest_s(step: BudgetedStep) -> float:
    """Seconds that the busiest stream works in a step: none among many is shorter."""
    seconds, stream = _seconds(step), step.rewritten.graph.op_stream
    return float(np.bincount(stream, weights=seconds).max(initial=0.0))


def has_host_updates(graph: Graph) -> bool:
    """True if part of a rewritten step can overlap with the next one."""
    return bool((_on_host(graph) | _swapped_updates(graph)).any())


def _seconds(step: BudgetedStep) -> FloatArray:
    device_of, costs = step.plan.device_of, step.problem.costs
    assert device_of is not None
    return np.asarray(costs.op_s[costs.device_row[device_of], np.arange(len(device_of))])


# ── what waits for what ──────────────────────────────────────────────────────────────────────────


def _tables(step: BudgetedStep, uses: Uses) -> tuple[_Ops, _Jobs]:
    graph, seconds = step.rewritten.graph, _seconds(step)
    reader, maker = _dependences(graph)
    job, jobs = _jobs(step, seconds, uses)
    later, earlier = _between_steps(step, uses)
    ops = _Ops(
        graph.op_stream.astype(np.int64), seconds, job, *_grouped(reader, maker, graph.num_ops),
        *_grouped(later, earlier, graph.num_ops),
    )  # fmt: skip
    return ops, jobs


def _grouped(key: LongArray, value: LongArray, count: int) -> tuple[LongArray, LongArray]:
    order = np.argsort(key, kind="stable")
    return pointers(np.bincount(key, minlength=count)).astype(np.int64), value[order]


def _dependences(graph: Graph) -> tuple[LongArray, LongArray]:
    """Pairs of ops, of which one reads what the other makes."""
    reader = graph.reader
    maker = graph.tensor_producer[graph.reads].astype(np.int64)
    return reader[maker >= 0], maker[maker >= 0]


def _on_host(graph: Graph) -> BoolArray:
    return np.asarray(graph.op_stream == Stream.HOST)


def _swapped_updates(graph: Graph) -> BoolArray:
    """Updates on the device of state that came for them, in turn with what is sent."""
    is_update = graph.op_phase == Phase.OPTIMIZER
    return np.asarray(is_update & (graph.op_stream == Stream.COPY_OUT))


def written_back(graph: Graph) -> BoolArray:
    """Copies to the host that updates there wait for: gradients."""
    reader, maker = _dependences(graph)
    before = np.zeros(graph.num_ops, dtype=np.bool_)
    before[maker[_on_host(graph)[reader]]] = True
    return np.asarray(before & (graph.op_stream == Stream.COPY_OUT))


def _after(graph: Graph, chosen: BoolArray) -> BoolArray:
    """Ops that read what the chosen ones make."""
    reader, maker = _dependences(graph)
    after = np.zeros(graph.num_ops, dtype=np.bool_)
    after[reader[chosen[maker]]] = True
    return after


def _jobs(step: BudgetedStep, seconds: FloatArray, uses: Uses) -> tuple[LongArray, _Jobs]:
    """Updates on the host, each of which is ended before another begins."""
    chosen = np.flatnonzero(_on_host(step.rewritten.graph))
    job = np.full(len(seconds), -1, dtype=np.int64)
    job[chosen] = np.arange(len(chosen))
    blank = np.zeros(len(chosen))
    is_done = np.zeros(len(chosen), dtype=np.bool_)
    block = uses.first_block[step.rewritten.beside]
    jobs = _Jobs(block[chosen], seconds[chosen], blank, blank.copy(), is_done)
    return job, jobs


def _between_steps(step: BudgetedStep, uses: Uses) -> tuple[LongArray, LongArray]:
    """Pairs of ops, of which one waits for the other in the step before: what brings a block's
    parameters for what changed them."""
    graph, block = step.rewritten.graph, uses.first_block[step.rewritten.beside]
    is_forward = graph.op_phase == Phase.FORWARD
    swapped = _swapped_updates(graph)
    changes = _on_host(graph) | (_after(graph, swapped) & (graph.op_stream == Stream.COPY_OUT))
    later, earlier = list[int](), list[int]()
    by_block: dict[int, list[int]] = {}
    for op in np.flatnonzero(changes).tolist():
        by_block.setdefault(int(block[op]), []).append(op)
    for op in np.flatnonzero(is_forward & (graph.op_stream == Stream.COPY_IN)).tolist():
        found = by_block.get(int(block[op]), [])
        later += [op] * len(found)
        earlier += found
    # Gradients are given up when the step ends: all of them were used or sent by then.
    used = np.flatnonzero(swapped | written_back(graph))
    computes = np.flatnonzero(graph.op_stream == Stream.COMPUTE)
    if len(computes) and len(used):
        later.append(int(computes[0]))
        earlier.append(int(used[-1]))
    return np.array(later, dtype=np.int64), np.array(earlier, dtype=np.int64)


# ── compiled ─────────────────────────────────────────────────────────────────────────────────────


@kernel
def _next_job(jobs: _Jobs, now_s: float, by_need: bool) -> int:
    """Of the jobs that have come the lowest block's, or the first; else the next that comes."""
    found, is_there = -1, False
    for job in range(len(jobs.block)):
        if jobs.is_done[job]:
            continue
        has_come = jobs.came_s[job] <= now_s
        if found < 0 or (has_come and not is_there):
            found, is_there = job, has_come
        elif has_come == is_there:
            if by_need and has_come:
                is_better = jobs.block[job] < jobs.block[found]
            else:
                is_better = jobs.came_s[job] < jobs.came_s[found]
            if is_better:
                found = job
    return found


@kernel
def _run_jobs(jobs: _Jobs, free_s: float, by_need: bool) -> float:
    """The host does all that a step asks of it; when it is free again."""
    for job in range(len(jobs.block)):
        jobs.is_done[job] = False
    for _ in range(len(jobs.block)):
        job = _next_job(jobs, free_s, by_need)
        free_s = max(free_s, jobs.came_s[job]) + jobs.seconds[job]
        jobs.end_s[job] = free_s
        jobs.is_done[job] = True
    return free_s


@kernel
def _ready_s(ops: _Ops, clock: _Clock, op: int) -> float:
    """When all has ended that an op waits for in its own step."""
    ready_s = 0.0
    for at in range(ops.wait_ptr[op], ops.wait_ptr[op + 1]):
        ready_s = max(ready_s, clock.end_s[ops.wait[at]])
    return ready_s


@kernel
def _compute_end_s(ops: _Ops, clock: _Clock) -> float:
    end_s = 0.0
    for op in range(len(ops.stream)):
        if ops.stream[op] == _COMPUTE:
            end_s = max(end_s, clock.end_s[op])
    return end_s


@kernel
def _end_jobs(ops: _Ops, clock: _Clock, jobs: _Jobs, how: HostOrder, free_s: float) -> float:
    """The host's part of a step whose gradients have all been sent."""
    if not how.overlaps:
        after_s = _compute_end_s(ops, clock)
        for job in range(len(jobs.block)):
            jobs.came_s[job] = max(jobs.came_s[job], after_s)
    free_s = _run_jobs(jobs, free_s, how.by_need)
    for op in range(len(ops.stream)):
        if ops.job[op] >= 0:
            clock.end_s[op] = jobs.end_s[ops.job[op]]
    return free_s


@kernel
def _one_step(
    ops: _Ops, jobs: _Jobs, clock: _Clock, how: HostOrder, barrier_s: float, host_s: float
) -> float:
    """A step after another, nothing of it before the barrier; when the host is free again."""
    for op in range(len(ops.stream)):
        ready_s = _ready_s(ops, clock, op)
        if ops.job[op] >= 0:
            # Nothing of its own step waits for the host.
            jobs.came_s[ops.job[op]] = ready_s
            continue
        start_s = max(barrier_s, clock.free_s[ops.stream[op]], ready_s)
        for at in range(ops.late_ptr[op], ops.late_ptr[op + 1]):
            start_s = max(start_s, clock.before_s[ops.late[at]])
        clock.end_s[op] = start_s + ops.seconds[op]
        clock.free_s[ops.stream[op]] = clock.end_s[op]
    return _end_jobs(ops, clock, jobs, how, host_s)


@kernel
def _repeated_s(ops: _Ops, jobs: _Jobs, clock: _Clock, how: HostOrder, num_steps: int) -> float:
    ended_s, took_s, host_s, barrier_s = 0.0, 0.0, 0.0, 0.0
    for _ in range(num_steps):
        for op in range(len(ops.stream)):
            clock.before_s[op] = clock.end_s[op]
        host_s = _one_step(ops, jobs, clock, how, barrier_s, host_s)
        if not how.crosses:
            barrier_s = host_s
            for op in range(len(ops.stream)):
                barrier_s = max(barrier_s, clock.end_s[op])
        now_s = _compute_end_s(ops, clock)
        is_same = abs(now_s - ended_s - took_s) <= _SAME * took_s
        took_s, ended_s = now_s - ended_s, now_s
        if is_same:
            break
    return took_s
