"""The large model under memory sections: the planner's, and such with a given mix of updates.

In a mix every block is recomputed from its input on the host and streams its parameters; of the
layers a given number, evenly spread, have their state come to the device for the update, the others
are updated on the host. What was rehearsed and simulated stands beside what was measured.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from budget_case import Case
from gpu_models import DEVICE
from gpu_rows import GIB, cap_to, clear, spent, synchronize
from gpu_systems import adamw

from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.update_order import BY_NEED, host_update_orders
from hocket.runtime.train.fitting import KeptBudget
from hocket.simulate.engine import simulate
from hocket.simulate.rewriting.step import budgeted


def mixed_section(case: Case, num_visiting: int, chunks: int, *, is_first_here: bool) -> Memory:
    """So many blocks with their state on the way; the first, which has the embedding that the last
    one shares, may have its state on the device."""
    blocks = case.frontier.uses.blocks
    starts, last = blocks.start.tolist(), blocks.num_blocks - 1
    middle = range(1, last)
    share = num_visiting / max(1, len(middle))
    visiting = {n for i, n in enumerate(middle) if int((i + 1) * share) > int(i * share)}
    policies = []
    for number, name in enumerate(blocks.names):
        away: dict[str, Any] = {"parameters": "streamed"}
        away["update"] = "device" if number in visiting else "host"
        if number < last:
            away |= {"activations": "recomputed", "checkpoint": "offloaded"}
        if number == 0 and is_first_here:
            away = {"parameters": "resident", "update": "device"}
        policies.append(
            MemoryBlock(name=name, start=starts[number], stop=starts[number + 1], **away)
        )
    return Memory(budget_bytes=(0,), blocks=tuple(policies), loss_chunks=chunks)


def simulated(case: Case, section: Memory) -> dict[str, float]:
    """Seconds of a step by itself, and of one among many."""
    planned = case.frontier
    step = budgeted(planned.problem, planned.plan, section, uses=planned.uses)
    timeline = simulate(step.problem, step.plan)
    orders = host_update_orders(step, timeline, planned.uses.blocks)
    alone_s = timeline.makespan_s
    among_s = alone_s if orders is None else orders.step_s[BY_NEED.name]
    return {"simulated_alone_s": alone_s, "simulated_s": among_s}


def mix_row(case: Case, build: Any, section: Memory, cap: int, steps: int = 4) -> dict[str, Any]:
    """Seconds and peak of a section, and what was foreseen."""
    clear()
    case.model = model = case.model or build()
    clear()
    kinds = Counter(f"{b.activations}/{b.parameters}/{b.update}" for b in section.blocks)
    row: dict[str, Any] = {"blocks": kinds, "loss_chunks": section.loss_chunks}
    row["rehearsed_gib"] = case.rehearse(section) / GIB
    if section.blocks:
        row |= simulated(case, section)
    cap_to(cap)
    try:
        train = case.loop(model, KeptBudget(section, 0), adamw(model))
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
    train = model = case.model = None
    cap_to(None)
    clear()
    return row
