"""Describe a memory plan: budget, policy of its blocks, copies to and from the host, advice.

Text and JSON for ``show`` and ``explain`` of a plan that was made within a memory budget.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hocket.base.arrays import IntArray
from hocket.base.units import format_bytes, format_percent
from hocket.graph.graph import Graph, Role
from hocket.plan.sections import Memory
from hocket.planners.memory.blocks import layer_label
from hocket.simulate.analysis import COMPUTE, COPIES, HOST
from hocket.view.facts import Facts, HostCopies, host_copies
from hocket.view.story import HALF, NOTABLE
from hocket.view.wording import count_of

_KEPT = {"kept": "saved on the device"}
AMONG_MANY = "step among many"
"""Key of the plan note that contains the step time in steady state; `hocket.api.memory` writes it.
"""


@dataclass(frozen=True, eq=False)
class WithinBudget:
    """A memory plan, with the plain step (``whole``) and the step under that plan (``step``)."""

    whole: Graph
    memory: Memory
    step: Graph

    @cached_property
    def copies(self) -> HostCopies:
        """Copies between device and host in one step."""
        return host_copies(self.step)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of parameters that each pass streams from the host."""
        # Compared by name: a parameter that the host updates has a low-precision or padded copy on
        # the device, whose size differs.
        there = {self.step.tensor_names[tensor] for tensor in _parameters(self.step)}
        whole = self.whole
        away = [t for t in _parameters(whole) if whole.tensor_names[t] not in there]
        return int(whole.held_bytes[away].sum())

    @property
    def again_flops(self) -> float:
        """Floating-point operations that one step recomputes."""
        whole, done = float(self.whole.flops.sum()), float(self.step.flops.sum())
        # The pieces of a split op add up to the op except for rounding, which must not count as
        # recompute.
        return done - whole if done > whole * (1 + 1e-9) else 0.0

    @property
    def again_share(self) -> float:
        """Recomputed operations as a fraction of the operations of the plain step."""
        whole = float(self.whole.flops.sum())
        return self.again_flops / whole if whole else 0.0


def parameter_bytes(graph: Graph) -> int:
    """Bytes of parameters that stay on the device during the whole step."""
    return int(graph.held_bytes[_parameters(graph)].sum())


def _parameters(graph: Graph) -> IntArray:
    there = (graph.tensor_role == Role.PARAMETER) & (graph.tensor_producer < 0)
    return np.flatnonzero(there).astype(np.int32)


def decided(within: WithinBudget) -> str:
    """Summary of the policies of all blocks in one sentence."""
    memory, blocks = within.memory, within.memory.blocks
    counts = Counter(block.activations for block in blocks)
    parts = [
        f"{count_of(number, 'block')} {_KEPT.get(words, words)}" for words, number in counts.items()
    ]
    if within.streamed_bytes:
        parts.append(f"{format_bytes(within.streamed_bytes)} of parameters streamed")
    if on_host := sum(block.update == "host" for block in blocks):
        parts.append(f"{on_host} updated on the host")
    swapped = sum(block.parameters == "streamed" and block.update == "device" for block in blocks)
    if swapped:
        parts.append(f"{swapped} updated on the device with optimizer state swapped in")
    if members := sum(bool(layer_label(block.name, 2)) for block in blocks):
        parts.append(f"{members} of the blocks are members of lists inside others")
    if memory.loss_chunks > 1:
        parts.append(f"the loss in {memory.loss_chunks} chunks")
    return ", ".join(parts)


def kept_sentences(within: WithinBudget, note: str = "") -> list[str]:
    """Sentences about the budget and how the plan stays within it; ``note`` is the steady-state
    step time.
    """
    copies = within.copies
    moved = "nothing moves between device and host"
    if copies.num_copies:
        moved = (
            f"{format_bytes(copies.to_host_bytes)} go to the host and "
            f"{format_bytes(copies.from_host_bytes)} come from it in one step"
        )
    again = "nothing is recomputed"
    if within.again_flops:
        again = f"{format_percent(within.again_share)} of the arithmetic is recomputed"
    lines = [
        f"within {format_bytes(max(within.memory.budget_bytes))}: {decided(within)}",
        f"{moved}; {again}",
    ]
    return [*lines, f"this is one isolated step; a step among many takes {note}"] if note else lines


def kept_data(within: WithinBudget) -> dict[str, Any]:
    """Data about the budget and how the plan stays within it, for JSON."""
    blocks = within.memory.blocks
    return {
        "budget_bytes": max(within.memory.budget_bytes),
        "blocks": dict(Counter(block.activations for block in blocks)),
        "streamed_blocks": sum(block.parameters == "streamed" for block in blocks),
        "streamed_bytes": within.streamed_bytes,
        "host_updated_blocks": sum(block.update == "host" for block in blocks),
        "loss_chunks": within.memory.loss_chunks,
        "offloaded_bytes": within.copies.to_host_bytes,
        "fetched_bytes": within.copies.from_host_bytes,
        "recomputed_flops": within.again_flops,
    }


def budget_advice(facts: Facts, within: WithinBudget) -> tuple[str, ...]:
    """Suggest measures that would shorten a step within a budget, according to its timeline."""
    shares = facts.path.shares
    copying, on_host = shares.get(COPIES, 0.0), shares.get(HOST, 0.0)
    lines = []
    if within.again_share >= NOTABLE:
        lines.append(
            f"a larger budget: {format_percent(within.again_share)} of the arithmetic is recomputed"
        )
    if copying >= NOTABLE:
        lines.append(
            "a larger budget, or a faster link to the host: the step waits "
            f"{format_percent(copying)} of its time for copies"
        )
    if on_host >= NOTABLE:
        lines.append(
            "a larger budget, or more memory bandwidth on the host: updates there take "
            f"{format_percent(on_host)} of this step"
        )
    if shares.get(COMPUTE, 0.0) >= HALF:
        lines.append(
            f"a faster device: {format_percent(shares[COMPUTE])} of the step is computing there"
        )
    return tuple(lines)
