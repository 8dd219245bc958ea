"""Storages that the backward pass of each module call needs: saved, fetched or recomputed.

A storage of the forward pass is needed by a module call whose backward ops read it, or whose
recomputed forward ops do. It stays on the device if any call that needs it saves it there, as ops
outside of all module calls do. It is offloaded if all calls that need it can fetch it. It is
dropped if only recomputed calls need it and make it themselves. O(ops + reads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hocket.graph.graph import Graph
from hocket.plan.sections import Memory, MemoryBlock
from hocket.plan.sections.memory import SMALLEST_MOVED
from hocket.simulate.rewriting.experts import in_groups
from hocket.simulate.rewriting.uses import Uses

NUM_LINGERING = 2
"""Module calls at the end of the forward pass whose storages never leave: what a call offloads is
freed when the second call after it begins."""


class Trip(NamedTuple):
    """Offload of a storage to the host and its fetch."""

    sent_by: int
    """The first module call that saves it."""
    needed_by: int
    """The last module call that saves it, which comes first in the backward pass."""


@dataclass(frozen=True, eq=False)
class Needs:
    """Policy of each storage of the forward pass, by the tensor that owns it."""

    taken: tuple[list[int], ...]
    """Per module call: storages from elsewhere that its recomputation needs."""
    offloaded: dict[int, Trip]


def is_recomputed(uses: Uses, memory: Memory) -> tuple[tuple[int, ...], ...]:
    """Per module call: forward ops that its backward pass recomputes under a plan, in order."""
    last = len(memory.blocks) - 1
    return tuple(
        () if (module_call.block == last and memory.loss_chunks > 1)
        or memory.blocks[module_call.block].activations != "recomputed" else recompute
        for module_call, recompute in zip(uses.module_calls.calls, uses.recompute, strict=True)
    )  # fmt: skip


def find_needs(uses: Uses, memory: Memory, with_parameters: Collection[int]) -> Needs:
    """Policies of storages under a plan; those in ``with_parameters`` need none of their own."""
    stays: set[int] = set().union(*uses.outside)
    wanted: dict[int, list[int]] = defaultdict(list)
    taken: list[list[int]] = []
    last = len(memory.blocks) - 1
    # What is made of one group of experts is recomputed for the backward pass of the group.
    passing = {s for root in in_groups(uses.experts, memory) for s in uses.experts[root].made}
    passing.update(with_parameters)
    for number, module_call in enumerate(uses.module_calls.calls):
        policy = memory.blocks[module_call.block]
        if module_call.block == last and memory.loss_chunks > 1:
            # In chunks nothing of it is left behind.
            policy = replace(policy, activations="kept")
        is_checkpoint = _is_checkpoint(uses, number, policy)
        needed = uses.taken[number] if is_checkpoint else uses.saved(number)
        needed = [storage for storage in needed if storage not in passing]
        taken.append(needed if is_checkpoint else [])
        goes = _offloaded(uses.graph, policy, needed)
        is_lingering = number >= len(uses.module_calls) - NUM_LINGERING
        for storage in needed:
            is_small = uses.graph.tensor_bytes[storage] < SMALLEST_MOVED
            if storage in goes and not is_small and not is_lingering:
                wanted[storage].append(number)
            else:
                stays.add(storage)
    offloaded = {
        storage: Trip(min(numbers), max(numbers))
        for storage, numbers in wanted.items()
        if storage not in stays
    }
    return Needs(tuple(taken), offloaded)


def _is_checkpoint(uses: Uses, module_call: int, policy: MemoryBlock) -> bool:
    """True if a module call saves its input in place of its activations."""
    if policy.activations != "recomputed":
        return False
    return bool(uses.recompute[module_call]) or not uses.makes(module_call, uses.saved(module_call))


def _offloaded(graph: Graph, policy: MemoryBlock, storages: list[int]) -> set[int]:
    """Storages of a module call that its policy offloads; what cannot be recomputed is treated as
    the call's input."""
    if policy.activations == "recomputed" and policy.checkpoint == "offloaded":
        return set(storages)
    if policy.activations != "offloaded":
        return set()
    storages = [s for s in storages if graph.tensor_bytes[s] >= SMALLEST_MOVED]
    sizes = graph.tensor_bytes[storages]
    buffer = policy.share * float(sizes.sum())
    return {s for s, end in zip(storages, np.cumsum(sizes).tolist(), strict=True) if end <= buffer}
