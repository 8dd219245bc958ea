"""Loops within a budget of bytes, of a model and a memory plan."""

import torch

from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.offload.budgeted_model import BudgetedModel, BudgetSetup
from hocket.runtime.offload.model_blocks import block_names
from hocket.runtime.offload.plan_choice import BudgetPlan
from hocket.runtime.planned_optimizer import planned_update
from hocket.runtime.strategy import LoopOptions, TrainingTask
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop

CPU = torch.device("cpu")
WAYS = [
    {"activations": a, "checkpoint": c, "parameters": p, "update": u}
    for a, c in (("kept", "kept"), ("offloaded", "kept"), ("recomputed", "kept"),
                 ("recomputed", "offloaded"))
    for p, u in (("resident", "device"), ("resident", "host"), ("streamed", "host"),
                 ("streamed", "device"))
]  # fmt: skip


def mixed(model, seed, **options):
    """A memory plan with a policy of its own for each block."""
    draws = torch.Generator().manual_seed(seed)
    blocks = [
        MemoryBlock(name=name, **WAYS[int(torch.randint(len(WAYS), (), generator=draws))])
        for name in block_names(model)
    ]
    return Memory(budget_bytes=(0,), blocks=tuple(blocks), **options)


def task_of(model, optimizer, batch, recipe, device=CPU, **options):
    """A training as `hocket.prepare` hands it to strategies."""
    return TrainingTask(
        model=model, optimizer=optimizer, batch=batch, recipe=recipe, device=device,
        options=LoopOptions(**options),
    )  # fmt: skip


def loop_of(model, optimizer, section, batch, forward=None, rounded=None, device=CPU, **options):
    update = planned_update(optimizer, model)
    recipe = TraceOptions(update=update, device=device.type, forward=forward)
    setup = BudgetSetup(low_precision=rounded or {})
    strategy = BudgetedModel(model, batch, recipe, BudgetPlan(section, 0), device, setup)
    return TrainingLoop(model, optimizer, strategy, LoopOptions(**options))
