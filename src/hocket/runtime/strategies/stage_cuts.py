"""Cut a traced training step into pipeline stages: assign each op to a stage and a part.

`StageCuts` assigns forward ops to stages. `cut_by_layers` assigns ops of a layer to the layer's
stage, ops before all layers to the first stage, ops after the last layer to the last stage, and ops
that depend only on weights or the batch to the first stage that uses them. `cut_at_ops` uses the
stages of a plan; an op that the planned step does not have, because its batch size differs, gets
the stage of its module. Backward ops follow their forward ops, in never increasing stages. The
backward of a stage has two parts, as zero-bubble schedules need (Qi et al., 2024): first the ops
that an earlier stage waits for (part I), then all others, mostly weight gradients (part W). O(ops +
reads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections import Schedule
from hocket.runtime.strategies.layer_stack import find_stack, layer_of
from hocket.runtime.traced_step import placement_like
from hocket.simulate.parallel.stage_order import stages_of
from hocket.transformer import ParallelConfig


class Part(IntEnum):
    """A part of a stage's work on one microbatch; members are listed in execution order."""

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
    """Return the segment of each op, from the stages of forward ops; None for updates."""
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
        # Backward data flows to lower stages only, so no op is later than its latest input allows.
        most = min((stages[maker] for maker in makers), default=num_stages - 1)
        partner = call.partner
        is_paired = partner >= 0 and program.calls[partner].phase == Phase.FORWARD
        stages[op] = min(stages[partner], most) if is_paired else most


def _keep_together(program: Program, stages: list[int]) -> None:
    """Move ops that write in place to one storage to the stage of the first such op."""
    writer: dict[int, int] = {}
    for op, call in enumerate(program.calls):
        if call.phase == Phase.OPTIMIZER:
            continue
        for target in call.targets:
            storage = program.tensors[target].storage
            if storage >= 0:
                # A write on another rank would change a copy instead of the storage itself.
                stages[op] = writer.setdefault(storage, stages[op])


def _require_order(graph: Graph, program: Program, stages: Sequence[int]) -> None:
    """Refuse forward data flow to an earlier stage, and backward data flow to a later stage."""
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
    """Return backward ops whose results another stage needs, directly or through other ops."""
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
    """Return the ops that produce the inputs of an op."""
    found = (program.tensors[tensor].producer for tensor in program.calls[op].reads)
    return [maker for maker in found if maker >= 0]


def shared_gradients(
    program: Program, segments: Sequence[Segment | None], device_of_stage: Sequence[int]
) -> tuple[dict[int, list[int]], set[int]]:
    """Return the partial gradients of each parameter, and the traced ops that sum them.

    A weight that several stages use, such as a tied embedding, gets a partial gradient from each
    stage. Partial gradients are summed once per step instead of once per microbatch, so the traced
    sums are skipped. A gradient that one rank computes has itself as its only part.
    """
    adding: set[int] = set()

    def parts_of(tensor: int) -> list[int]:
        op = program.tensors[tensor].producer
        call = program.calls[op]
        numbers = [getattr(arg, "number", -1) for arg in call.args]
        if call.cost.kind != "aten.add" or len(numbers) != 2 or call.kwargs or min(numbers) < 0:
            return [tensor]
        makers = [program.tensors[number].producer for number in numbers]
        added = [segments[maker] if maker >= 0 else None for maker in makers]
        if len({device_of_stage[segment.stage] for segment in added if segment}) < 2:
            return [tensor]
        adding.add(op)
        return [part for number in numbers for part in parts_of(number)]

    return {parameter: parts_of(each) for parameter, each in program.gradients.items()}, adding


# ── where forward ops go ─────────────────────────────────────────────────────────────────────────

_BEFORE = -2
"""Stage number of ops without a stage: not assigned yet, or no forward op."""


class StageCuts(NamedTuple):
    """Stages of a pipeline, and the stage of each forward op."""

    device_of_stage: tuple[int, ...]
    """The pipeline rank of each virtual stage."""
    forward_stages: Callable[[Graph, Program], list[int]]
    """Returns the virtual stage of each op of a traced step; values of other than forward ops are
    undefined."""


def cut_by_layers(model: nn.Module, config: ParallelConfig, schedule: Schedule) -> StageCuts:
    """Cut the model's layer stack as a parallel config states."""
    stack, num_layers = find_stack(model)
    layers = config.stage_layers(num_layers)
    if sum(layers) != num_layers or len(layers) != config.num_stages:
        raise UsageError(
            f"the plan has {len(layers)} stages with {sum(layers)} layers, the model has "
            f"{num_layers}",
            hint="plan this very model again",
        )
    if config.layers is None and not min(layers):
        raise UsageError(
            f"{config.num_stages} stages are more than the {num_layers} layers of the model",
            hint="use fewer stages",
        )
    stages = [stage for stage, count in enumerate(layers) for _ in range(count)]
    return StageCuts(
        tuple(schedule.device_of_stage.tolist()),
        lambda graph, program: _stages_of_layers(graph, program, stack, stages, config.num_stages),
    )


def cut_at_ops(planned: Graph, cuts: tuple[int, ...]) -> StageCuts:
    """Cut at ops of the planned graph, one stage per rank."""
    stage_of = stages_of(planned, cuts)

    def forward_stages(graph: Graph, program: Program) -> list[int]:
        near = placement_like(graph, planned, stage_of).tolist()
        stages = [_BEFORE] * len(program.calls)
        for op, call in enumerate(program.calls):
            if call.phase == Phase.FORWARD:
                # An op cannot be in an earlier stage than its inputs.
                stages[op] = max([near[op], *(stages[m] for m in makers_of(program, op))])
        return stages

    return StageCuts(tuple(range(len(cuts) + 1)), forward_stages)


def _stages_of_layers(
    graph: Graph, program: Program, stack: str, stage_of_layer: Sequence[int], num_stages: int
) -> list[int]:
    last_layer = len(stage_of_layer) - 1
    stages = [_BEFORE] * len(program.calls)
    is_after = [False] * len(program.calls)
    for op, call in enumerate(program.calls):
        if call.phase != Phase.FORWARD:
            continue
        makers = makers_of(program, op)
        layer = layer_of(call.module, stack)
        feeds = max((stages[maker] for maker in makers), default=_BEFORE)
        is_after[op] = layer is None and any(
            is_after[m] or layer_of(program.calls[m].module, stack) == last_layer for m in makers
        )
        if layer is not None:
            stages[op] = max(stage_of_layer[layer], feeds)
        elif is_after[op]:
            stages[op] = num_stages - 1
        else:
            stages[op] = feeds
    first = stage_of_layer[0] if stage_of_layer else 0
    for op in range(len(program.calls) - 1, -1, -1):
        if program.calls[op].phase == Phase.FORWARD and stages[op] == _BEFORE:
            users = [
                stages[user]
                for tensor in graph.made_by(op)
                for user in graph.users_of(tensor).tolist()
                if program.calls[user].phase == Phase.FORWARD
            ]
            used = min(users, default=0)
            # Inputs of the first layer (an embedding) may be in a stage before that layer.
            stages[op] = 0 if used <= first else used
    return stages
