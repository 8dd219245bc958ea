"""The large model with so many of its blocks updated on the device, beside what is simulated.

Every block is recomputed from its input on the host and streams its parameters; of the layers a
given number, evenly spread, have their state come to the device for the update, the others are
updated on the host. One model is trained by one section after the other.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from budget_case import Case
from gpu_models import DEVICE
from gpu_rows import GIB, cap_to, clear, spent, synchronize
from gpu_systems import adamw

from hocket.plan.sections import Memory, MemoryBlock
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.fitting import KeptBudget
from hocket.runtime.train.loop import LoopOptions, TrainingLoop
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.step import budgeted


def mixed_section(case: Case, num_visiting: int, chunks: int, num_resident: int = 0) -> Memory:
    """So many blocks with their state on the way, and so many that never leave the device."""
    blocks = case.frontier.uses.blocks
    starts, last = blocks.start.tolist(), blocks.num_blocks - 1
    middle = range(1, last)
    resident = {middle[i] for i in range(min(num_resident, len(middle)))}
    others = [n for n in middle if n not in resident]
    share = num_visiting / max(1, len(others))
    visiting = {n for i, n in enumerate(others) if int((i + 1) * share) > int(i * share)}
    policies = []
    for number, name in enumerate(blocks.names):
        away: dict[str, Any] = {"parameters": "streamed"}
        away["update"] = "device" if number in visiting else "host"
        if number < last:
            away |= {"activations": "recomputed", "checkpoint": "offloaded"}
        if number in resident:
            away |= {"parameters": "resident", "update": "device"}
        policies.append(
            MemoryBlock(name=name, start=starts[number], stop=starts[number + 1], **away)
        )
    return Memory(budget_bytes=(0,), blocks=tuple(policies), loss_chunks=chunks)


def mix_row(case: Case, build: Any, section: Memory, cap: int, steps: int = 4) -> dict[str, Any]:
    """Seconds and peak of a section, and what was foreseen."""
    clear()
    model = build()
    clear()
    began = time.perf_counter()
    row: dict[str, Any] = {"rehearsed_gib": case.rehearse(section) / GIB}
    row["rehearsal_s"] = time.perf_counter() - began
    planned = case.frontier
    step = budgeted(planned.problem, planned.plan, section, uses=planned.uses)
    row["simulated_s"] = simulate(step.problem, step.plan).makespan_s
    cap_to(cap)
    try:
        carrier = Budgeted(
            model, case.batch, case.recipe, KeptBudget(section, 0), torch.device(DEVICE),
            graph=case.graph, rounded=case.rounded,
        )  # fmt: skip
        train = TrainingLoop(model, adamw(model), carrier, LoopOptions())
        row["times"], row["losses"] = [], []
        for _ in range(2 + steps):
            synchronize()
            start = time.perf_counter()
            row["losses"].append(float(train.step(case.batch)))
            synchronize()
            row["times"].append(time.perf_counter() - start)
        row["step_s"] = sorted(row["times"][2:])[steps // 2]
        row["where"] = spent(lambda: train.step(case.batch))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:600]
    if DEVICE == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    train = carrier = model = None
    cap_to(None)
    clear()
    return row
