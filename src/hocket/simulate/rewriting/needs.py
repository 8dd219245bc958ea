"""Which storages the backward pass of each visit needs, and how: kept, fetched or made again.

A storage that the forward pass makes is needed by a visit whose backward ops read it, or, where the
visit is recomputed, whose forward ops read it again. It stays on the device as soon as one of those
that need it keeps it, as ops outside of all visits do; it goes to the host where all of them are
content to fetch it; what only recomputed visits need and make themselves is dropped. O(ops +
reads).
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
"""Visits at the end of the forward pass whose storages never leave: what is sent in one gives up
its room when the second one after it begins."""


class Trip(NamedTuple):
    """A storage's way to the host and back."""

    sent_by: int
    """The first visit that saves it."""
    needed_by: int
    """The last visit that does, which is the first to come in the backward pass."""


@dataclass(frozen=True, eq=False)
class Needs:
    """What becomes of the storages of the forward pass, by the tensors that own them."""

    taken: tuple[list[int], ...]
    """Per visit: storages from elsewhere that it needs to run again."""
    offloaded: dict[int, Trip]


def is_recomputed(uses: Uses, memory: Memory) -> tuple[tuple[int, ...], ...]:
    """Per visit: forward ops that its backward pass runs again under a plan, in order."""
    last = len(memory.blocks) - 1
    return tuple(
        () if (module_call.block == last and memory.loss_chunks > 1)
        or memory.blocks[module_call.block].activations != "recomputed" else recompute
        for module_call, recompute in zip(uses.module_calls.calls, uses.recompute, strict=True)
    )  # fmt: skip


def find_needs(uses: Uses, memory: Memory, with_parameters: Collection[int]) -> Needs:
    """What becomes of each storage under a plan; some lie with the parameters."""
    stays: set[int] = set().union(*uses.outside)
    wanted: dict[int, list[int]] = defaultdict(list)
    taken: list[list[int]] = []
    last = len(memory.blocks) - 1
    # What is made of one group of experts is made again for the backward pass of the group.
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
    """True if a visit keeps its input in place of what it saves."""
    if policy.activations != "recomputed":
        return False
    return bool(uses.recompute[module_call]) or not uses.makes(module_call, uses.saved(module_call))


def _offloaded(graph: Graph, policy: MemoryBlock, storages: list[int]) -> set[int]:
    """Those of a visit's storages that its policy sends to the host; what cannot be made again goes
    where the visit's input would."""
    if policy.activations == "recomputed" and policy.checkpoint == "offloaded":
        return set(storages)
    if policy.activations != "offloaded":
        return set()
    storages = [s for s in storages if graph.tensor_bytes[s] >= SMALLEST_MOVED]
    sizes = graph.tensor_bytes[storages]
    buffer = policy.share * float(sizes.sum())
    return {s for s, end in zip(storages, np.cumsum(sizes).tolist(), strict=True) if end <= buffer}
