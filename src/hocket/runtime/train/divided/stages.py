"""Cut a recorded training step into pipeline stages: which op belongs to which stage and part.

A cutting says where forward ops go. Backward ops follow them and never go up again. Of a stage's
backward the ops that an earlier stage waits for come first (part I), the others, mostly gradients
of weights, later (part W), as zero-bubble schedules want it (Qi et al., 2024). O(ops + reads).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from hocket.base.errors import UsageError
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Phase


class Part(IntEnum):
    """A part of a stage's work on one microbatch, in the order in which they are done."""

    FORWARD = 0
    INPUT_GRADIENT = 1
    WEIGHT_GRADIENT = 2


class Segment(NamedTuple):
    """One part of one stage."""

    stage: int
    part: Part


def segments_of(
    graph: Graph, program: Program, forward_stages: Sequence[int], num_stages: int
) -> list[Segment | None]:
    """The segment of each op, from the stages of forward ops; None for updates, which have none."""
    stages = list(forward_stages)
    _add_backward(program, stages, num_stages)
    _keep_together(program, stages)
    _require_order(graph, program, stages)
    urgent = _urgent(program, stages)
    found: list[Segment | None] = []
    for op, call in enumerate(program.calls):
        if call.phase == Phase.OPTIMIZER:
            found.append(None)
        elif call.phase == Phase.FORWARD:
            found.append(Segment(stages[op], Part.FORWARD))
        else:
            part = Part.INPUT_GRADIENT if op in urgent else Part.WEIGHT_GRADIENT
            found.append(Segment(stages[op], part))
    return found


def _add_backward(program: Program, stages: list[int], num_stages: int) -> None:
    for op, call in enumerate(program.calls):
        if call.phase != Phase.BACKWARD:
            continue
        makers = [m for m in makers_of(program, op) if program.calls[m].phase == Phase.BACKWARD]
        most = min((stages[maker] for maker in makers), default=num_stages - 1)
        partner = call.partner
        is_paired = partner >= 0 and program.calls[partner].phase == Phase.FORWARD
        stages[op] = min(stages[partner], most) if is_paired else most


def _keep_together(program: Program, stages: list[int]) -> None:
    """Ops that write one storage in place stay where the first of them is."""
    writer: dict[int, int] = {}
    for op, call in enumerate(program.calls):
        if call.phase == Phase.OPTIMIZER:
            continue
        for target in call.targets:
            storage = program.tensors[target].storage
            if storage >= 0:
                stages[op] = writer.setdefault(storage, stages[op])


def _require_order(graph: Graph, program: Program, stages: Sequence[int]) -> None:
    """Forward goes up and backward goes down, else stages would wait for each other."""
    for op, call in enumerate(program.calls):
        for maker in makers_of(program, op):
            made = program.calls[maker]
            if Phase.OPTIMIZER in (call.phase, made.phase) or made.phase != call.phase:
                continue
            is_up = stages[maker] <= stages[op]
            if (call.phase == Phase.FORWARD and not is_up) or (
                call.phase == Phase.BACKWARD and stages[maker] < stages[op]
            ):
                raise UsageError(
                    f"op {graph.op_names[op]!r} of stage {stages[op]} needs what stage "
                    f"{stages[maker]} makes, so no pipeline can be cut there",
                    hint="cut elsewhere: state the layers of each stage, or use fewer stages",
                )


def _urgent(program: Program, stages: Sequence[int]) -> set[int]:
    """Backward ops that another stage waits for, directly or by others of their own stage."""
    urgent: set[int] = set()
    for op in range(len(program.calls) - 1, -1, -1):
        call = program.calls[op]
        if call.phase != Phase.BACKWARD:
            continue
        for maker in makers_of(program, op):
            if program.calls[maker].phase == Phase.BACKWARD and (
                stages[maker] != stages[op] or op in urgent
            ):
                urgent.add(maker)
    return urgent


def makers_of(program: Program, op: int) -> list[int]:
    """Ops whose results an op reads."""
    found = (program.tensors[tensor].producer for tensor in program.calls[op].reads)
    return [maker for maker in found if maker >= 0]


def shared_gradients(
    program: Program, segments: Sequence[Segment | None], device_of_stage: Sequence[int]
) -> dict[int, list[int]]:
    """Per parameter the tensors that its gradient is the sum of, where ranks make parts of it.

    A weight that several stages use, such as a tied embedding, gets a part from each; they are
    summed once per step instead of once per microbatch. Its adding ops are left out.
    """
    return {
        parameter: _addends(program, gradient, segments, device_of_stage)
        for parameter, gradient in program.gradients.items()
    }


def _addends(
    program: Program,
    tensor: int,
    segments: Sequence[Segment | None],
    device_of_stage: Sequence[int],
) -> list[int]:
    op = program.tensors[tensor].producer
    call = program.calls[op]
    if call.cost.kind != "aten.add" or len(call.args) != 2 or call.kwargs:
        return [tensor]
    numbers = [getattr(arg, "number", -1) for arg in call.args]
    if min(numbers) < 0:
        return [tensor]
    makers = [program.tensors[number].producer for number in numbers]
    if min(makers) < 0:
        return [tensor]
    homes = {device_of_stage[seg.stage] for m in makers if (seg := segments[m]) is not None}
    if len(homes) < 2:
        return [tensor]
    return [
        part for number in numbers for part in _addends(program, number, segments, device_of_stage)
    ]
