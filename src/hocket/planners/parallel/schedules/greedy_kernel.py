"""List scheduling of a pipeline, compiled.

The device that is free first chooses among the next forward and backward of each of its chunks and
the gradients of weights that wait, until all is done. A forward is taken only where everything in
flight could still be finished, one microbatch after another, in the memory that there is (the rule
of Dijkstra's banker), so the limit holds and devices never block each other for good.
O(actions * (devices + chunks * microbatches in flight)).
"""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.planners.parallel.schedules.greedy_tables import (
    GreedyState,
    PipelineTable,
    PolicyTable,
)

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = 0, 1, 2, 3
_BY_TURNS = 2
_NONE = -1


@kernel
def _could_finish(table: PipelineTable, state: GreedyState, device: int, stage: int) -> bool:
    """True if another forward of ``stage`` leaves enough memory to finish all microbatches."""
    free = table.free_bytes[device] - state.used_bytes[device] - table.held_bytes[stage]
    if free < 0:
        return False
    # Where one whole microbatch more would fit, any one in flight can be finished at once.
    if free >= table.total_bytes[device]:
        return True
    chunks = table.stage_of.shape[1]
    if chunks == 1:
        return True
    first, stop = table.num_microbatches, 0
    for chunk in range(chunks):
        other = table.stage_of[device, chunk]
        first = min(first, state.num_done[2, other])
        stop = max(stop, state.num_done[0, other] + (other == stage))
    for microbatch in range(first, stop):
        need = 0
        held = 0
        for chunk in range(chunks):
            other = table.stage_of[device, chunk]
            if microbatch >= state.num_done[0, other] + (other == stage):
                need += table.held_bytes[other]
            elif microbatch >= state.num_done[1, other]:
                held += table.held_bytes[other]
            elif microbatch >= state.num_done[2, other]:
                held += table.late_bytes[other]
        if need > free:
            return False
        free += held
    return True


@kernel
def _forward_arrival_s(table: PipelineTable, state: GreedyState, stage: int) -> float:
    """When a stage's next forward can begin at the earliest; infinite if not known yet."""
    microbatch = state.num_done[0, stage]
    if microbatch == table.num_microbatches:
        return np.inf
    if stage == 0:
        return 0.0
    if microbatch >= state.num_done[0, stage - 1]:
        return np.inf
    arrival_s: float = state.end_s[0, stage - 1, microbatch] + table.send_s[stage - 1]
    return arrival_s


@kernel
def _backward_arrival_s(table: PipelineTable, state: GreedyState, stage: int) -> float:
    microbatch = state.num_done[1, stage]
    if microbatch >= state.num_done[0, stage]:
        return np.inf
    if stage == len(table.device_of_stage) - 1:
        own_s: float = state.end_s[0, stage, microbatch]
        return own_s
    if microbatch >= state.num_done[1, stage + 1]:
        return np.inf
    arrival_s: float = state.end_s[1, stage + 1, microbatch] + table.send_s[stage]
    return arrival_s


@kernel
def _rank(
    table: PipelineTable, policy: PolicyTable, state: GreedyState, kind: int, stage: int
) -> int:
    """Of a stage's next action of a kind (see `GreedyState.num_done`): smaller goes first."""
    microbatch: int = state.num_done[kind, stage]
    if policy.follows:
        position: int = policy.position[kind, stage, microbatch]
        return position
    num_stages = len(table.device_of_stage)
    is_deepest_first = policy.deepest_first if kind == 0 else 1
    along = num_stages - 1 - stage if is_deepest_first else stage
    return (microbatch // policy.group) * num_stages + along


@kernel
def _ready_backward(
    table: PipelineTable, policy: PolicyTable, state: GreedyState, device: int, now: float
) -> int:
    """The stage whose backward goes first of those that are ready; -1 if none is."""
    found, least = _NONE, 0
    for chunk in range(table.stage_of.shape[1]):
        stage = table.stage_of[device, chunk]
        if _backward_arrival_s(table, state, stage) <= now:
            rank = _rank(table, policy, state, 1, stage)
            if found < 0 or rank < least:
                found, least = stage, rank
    return found


@kernel
def _ready_forward(
    table: PipelineTable, policy: PolicyTable, state: GreedyState, device: int, now: float
) -> int:
    """As `_ready_backward`, of forwards that may be taken."""
    found, least = _NONE, 0
    for chunk in range(table.stage_of.shape[1]):
        stage = table.stage_of[device, chunk]
        if _is_full(policy, state, stage) or _forward_arrival_s(table, state, stage) > now:
            continue
        rank = _rank(table, policy, state, 0, stage)
        if (found < 0 or rank < least) and _could_finish(table, state, device, stage):
            found, least = stage, rank
    return found


@kernel
def _is_full(policy: PolicyTable, state: GreedyState, stage: int) -> bool:
    in_flight = state.num_done[0, stage] - state.num_done[1, stage]
    return bool(in_flight >= policy.max_in_flight[stage])


@kernel
def _next_arrival_s(
    table: PipelineTable, policy: PolicyTable, state: GreedyState, device: int, now: float
) -> float:
    """When something that a device waits for is there; infinite if that is not known yet."""
    next_s = np.inf
    for chunk in range(table.stage_of.shape[1]):
        stage = table.stage_of[device, chunk]
        next_s = min(next_s, _backward_arrival_s(table, state, stage))
        arrival_s = _forward_arrival_s(table, state, stage)
        # A forward that has come but may not be taken is not waited for.
        if arrival_s > now and not _is_full(policy, state, stage):
            next_s = min(next_s, arrival_s)
    return next_s


@kernel
def _late_stage(table: PipelineTable, state: GreedyState, device: int) -> int:
    """The stage whose gradient of weights has waited longest; -1 if none waits."""
    found, oldest_s = _NONE, np.inf
    for chunk in range(table.stage_of.shape[1]):
        stage = table.stage_of[device, chunk]
        microbatch = state.num_done[2, stage]
        if microbatch < state.num_done[1, stage]:
            end_s = state.end_s[1, stage, microbatch]
            if end_s < oldest_s:
                found, oldest_s = stage, end_s
    return found


@kernel
def _num_late(table: PipelineTable, state: GreedyState, device: int) -> int:
    waiting = 0
    for chunk in range(table.stage_of.shape[1]):
        stage = table.stage_of[device, chunk]
        waiting += state.num_done[1, stage] - state.num_done[2, stage]
    return waiting


@kernel
def _perform(
    table: PipelineTable, state: GreedyState, device: int, work: int, stage: int, now: float
) -> None:
    """Put an action at the end of a device's row."""
    kind = 0 if work == _FORWARD else 2 if work == _WEIGHT else 1
    microbatch = state.num_done[kind, stage]
    state.num_done[kind, stage] += 1
    at = state.row_size[device]
    state.rows[0, device, at] = work
    state.rows[1, device, at] = stage
    state.rows[2, device, at] = microbatch
    state.row_size[device] += 1
    end_s = now + table.duration_s[work, stage]
    state.free_s[device] = end_s
    state.try_s[device] = end_s
    neighbour = _NONE
    if work == _FORWARD:
        state.used_bytes[device] += table.held_bytes[stage]
        state.end_s[0, stage, microbatch] = end_s
        neighbour = stage + 1 if stage + 1 < len(table.device_of_stage) else _NONE
    elif work == _WEIGHT:
        state.used_bytes[device] -= table.late_bytes[stage]
    else:
        state.used_bytes[device] -= table.held_bytes[stage] - table.late_bytes[stage]
        state.end_s[1, stage, microbatch] = end_s
        neighbour = stage - 1
    if work == _BACKWARD:
        state.num_done[2, stage] += 1
        state.used_bytes[device] -= table.late_bytes[stage]
    if work != _WEIGHT:
        state.last_work[device] = work
    if neighbour >= 0:
        other = table.device_of_stage[neighbour]
        arrival_s = end_s + table.send_s[min(stage, neighbour)]
        state.try_s[other] = min(state.try_s[other], max(arrival_s, state.free_s[other]))


@kernel
def _wants_forward(
    table: PipelineTable, policy: PolicyTable, state: GreedyState, device: int, forward: int,
    backward: int,
) -> bool:  # fmt: skip
    """True if the ready forward goes before the ready backward."""
    if policy.follows:
        forward_rank = _rank(table, policy, state, 0, forward)
        return bool(forward_rank < _rank(table, policy, state, 1, backward))
    if policy.preference == _BY_TURNS:
        return bool(state.last_work[device] != _FORWARD)
    return bool(policy.preference == 0)


@kernel
def _choose(
    table: PipelineTable, policy: PolicyTable, state: GreedyState, device: int, backward: int,
    now: float,
) -> int:  # fmt: skip
    """The next action of a free device as ``work * stages + stage``.

    -1 if there is none; the device then looks again when something arrives.
    """
    num_stages = len(table.device_of_stage)
    late = _late_stage(table, state, device)
    if late >= 0 and _num_late(table, state, device) > policy.max_late[device]:
        return _WEIGHT * num_stages + late
    forward_stage = _ready_forward(table, policy, state, device, now)
    backward_stage = _ready_backward(table, policy, state, device, now)
    if forward_stage < 0 and backward_stage < 0:
        next_s = _next_arrival_s(table, policy, state, device, now)
        if late >= 0 and next_s - now >= policy.patience * table.duration_s[_WEIGHT, late]:
            return _WEIGHT * num_stages + late
        state.try_s[device] = next_s
        return _NONE
    kind, stage = 1, backward_stage
    if backward_stage < 0 or (
        forward_stage >= 0
        and _wants_forward(table, policy, state, device, forward_stage, backward_stage)
    ):
        kind, stage = 0, forward_stage
    if late >= 0 and policy.follows:
        rank = _rank(table, policy, state, kind, stage)
        if _rank(table, policy, state, 2, late) < rank:
            return _WEIGHT * num_stages + late
    return (backward if kind else _FORWARD) * num_stages + stage


@kernel
def _reset(state: GreedyState) -> None:
    state.num_done[:] = 0
    state.free_s[:] = 0.0
    state.try_s[:] = 0.0
    state.used_bytes[:] = 0
    state.row_size[:] = 0
    state.last_work[:] = _BACKWARD


@kernel
def list_schedule(
    table: PipelineTable, policy: PolicyTable, state: GreedyState, backward: int
) -> float:
    """Schedule everything; return the time until all devices are done.

    ``backward`` is the work that follows a forward: whole, or the gradient of the inputs.
    """
    _reset(state)
    num_devices = len(state.free_s)
    while True:
        device, now = 0, state.try_s[0]
        for other in range(1, num_devices):
            if state.try_s[other] < now:
                device, now = other, state.try_s[other]
        if now == np.inf:
            break
        action = _choose(table, policy, state, device, backward, now)
        if action >= 0:
            num_stages = len(table.device_of_stage)
            _perform(table, state, device, action // num_stages, action % num_stages, now)
    last_s = 0.0
    for device in range(num_devices):
        last_s = max(last_s, state.free_s[device] + table.after_s[device])
    return last_s
