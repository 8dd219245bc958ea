"""The pipeline simulator, compiled: every device goes on until it waits for another. O(actions)."""

from __future__ import annotations

from hocket.kernels import kernel
from hocket.simulate.pipeline_tables import ActionTable, PipelineProgress, StageTable

_FORWARD, _BACKWARD, _WEIGHT_GRADIENT = 0, 1, 3
_NEVER = -1.0


@kernel
def _arrival_s(actions: ActionTable, stages: StageTable, end_s: float, src: int, dst: int) -> float:
    """When what stage ``src`` made at ``end_s`` is at its neighbour; negative if not made yet."""
    if end_s < 0.0 or actions.device_of_stage[src] == actions.device_of_stage[dst]:
        return end_s
    arrival_s: float = end_s + stages.send_s[min(src, dst)]
    return arrival_s


@kernel
def _ready_s(
    actions: ActionTable, stages: StageTable, progress: PipelineProgress, action: int, count: int
) -> float:
    """When what an action needs is there; negative if that is not known yet."""
    work, stage = actions.work[action], actions.stage[action]
    cell = stage * count + actions.microbatch[action]
    if work == _WEIGHT_GRADIENT:
        halved_s: float = progress.backward_end_s[cell]
        return halved_s
    if work == _FORWARD:
        if stage == 0:
            return 0.0
        return _arrival_s(actions, stages, progress.forward_end_s[cell - count], stage - 1, stage)
    own_s: float = progress.forward_end_s[cell]
    if own_s < 0.0 or stage == len(actions.device_of_stage) - 1:
        return own_s
    next_s = _arrival_s(actions, stages, progress.backward_end_s[cell + count], stage + 1, stage)
    return max(own_s, next_s) if next_s >= 0.0 else _NEVER


@kernel
def _wake(progress: PipelineProgress, device: int) -> None:
    if progress.is_pending[device] == 0:
        progress.is_pending[device] = 1
        size = progress.pending[-1]
        progress.pending[size] = device
        progress.pending[-1] = size + 1


@kernel
def _perform(
    actions: ActionTable,
    stages: StageTable,
    progress: PipelineProgress,
    device: int,
    action: int,
    ready_s: float,
    count: int,
) -> None:
    work, stage = actions.work[action], actions.stage[action]
    cell = stage * count + actions.microbatch[action]
    start_s = max(progress.free_s[device], ready_s)
    duration_s = stages.duration_s[work, stage]
    end_s = start_s + duration_s
    progress.start_s[action] = start_s
    progress.end_s[action] = end_s
    progress.free_s[device] = end_s
    progress.busy_s[device] += duration_s
    progress.held_bytes[device] += stages.change_bytes[work, stage]
    if progress.held_bytes[device] > progress.peak_bytes[device]:
        progress.peak_bytes[device] = progress.held_bytes[device]
    if work == _FORWARD:
        progress.forward_end_s[cell] = end_s
        if stage + 1 < len(actions.device_of_stage):
            _wake(progress, actions.device_of_stage[stage + 1])
    elif work != _WEIGHT_GRADIENT:
        progress.backward_end_s[cell] = end_s
        if stage > 0:
            _wake(progress, actions.device_of_stage[stage - 1])


@kernel
def run(actions: ActionTable, stages: StageTable, progress: PipelineProgress, count: int) -> int:
    """Perform all actions that can be, of ``count`` microbatches; return how many were."""
    num_done = 0
    for device in range(len(actions.start) - 1):
        _wake(progress, device)
    while progress.pending[-1] > 0:
        progress.pending[-1] -= 1
        device = progress.pending[progress.pending[-1]]
        progress.is_pending[device] = 0
        while progress.cursor[device] < actions.start[device + 1]:
            action = progress.cursor[device]
            ready_s = _ready_s(actions, stages, progress, action, count)
            if ready_s < 0.0:
                break
            _perform(actions, stages, progress, device, action, ready_s, count)
            progress.cursor[device] += 1
            num_done += 1
    return num_done
