"""Where a pipeline cuts a model: between the layers of its stack, or at the ops that a plan names.

By layers: forward ops of a layer belong to its stage; what comes before all layers goes to the
first stage, what comes after the last one to the last, and what only weights or the batch feed goes
to the first stage that uses it. By a plan: forward ops belong to the stages that were simulated; an
op that the planned step does not have, since the batch has another size, goes with its module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from hocket.capture.program import Program
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections import Schedule
from hocket.runtime.train.divided.stack import find_stack, layer_of, stage_layers
from hocket.runtime.train.divided.stages import makers_of
from hocket.runtime.train.traced_step import placed_like
from hocket.simulate.parallel.stage_order import stages_of
from hocket.transformer import ParallelConfig

_BEFORE = -2
"""Of ops whose stage is not known yet, and of those that are not forward."""


class Cutting(NamedTuple):
    """How a pipeline cuts a model."""

    device_of_stage: tuple[int, ...]
    """The pipeline rank of each virtual stage."""
    forward_stages: Callable[[Graph, Program], list[int]]
    """The virtual stage of each forward op of a recorded step; that of others means nothing."""


def cut_by_layers(model: nn.Module, config: ParallelConfig, schedule: Schedule) -> Cutting:
    """The layers of the model's stack as a config has them."""
    stack, num_layers = find_stack(model)
    stages = stage_layers(num_layers, config.layers, config.num_stages)
    return Cutting(
        tuple(schedule.device_of_stage.tolist()),
        lambda graph, program: _stages_of_layers(graph, program, stack, stages, config.num_stages),
    )


def cut_at_ops(planned: Graph, cuts: tuple[int, ...]) -> Cutting:
    """One stage per rank, each but the first beginning with an op of the planned graph."""
    stage_of = stages_of(planned, cuts)

    def forward_stages(graph: Graph, program: Program) -> list[int]:
        near = placed_like(graph, planned, stage_of).tolist()
        stages = [_BEFORE] * len(program.calls)
        for op, call in enumerate(program.calls):
            if call.phase == Phase.FORWARD:
                stages[op] = max([near[op], *(stages[m] for m in makers_of(program, op))])
        return stages

    return Cutting(tuple(range(len(cuts) + 1)), forward_stages)


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
            # What the first layer waits for, an embedding, may have a stage of its own before it.
            stages[op] = 0 if used <= first else used
    return stages
