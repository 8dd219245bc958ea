"""Storages that the backward pass of each module call needs: saved, fetched or recomputed.

A module call needs a storage of the forward pass if its backward ops or its recomputed forward ops
read it. The storage stays on the device if any call that needs it saves it there, as ops outside of
all module calls do. It is offloaded if all calls that need it can fetch it. It is dropped if only
recomputed calls need it and make it themselves. O(ops + reads).
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
from hocket.simulate.rewriting.uses import Uses

NUM_LINGERING = 2
"""Number of module calls at the end of the forward pass whose storages are not offloaded: an
offloaded storage is freed only when the second call after its own begins."""


class Trip(NamedTuple):
    """Offload of a storage to the host and the fetch back to the device."""

    sent_by: int
    """The first module call that saves it."""
    needed_by: int
    """The last module call that saves it, which comes first in the backward pass."""


@dataclass(frozen=True, eq=False)
class Needs:
    """Policy of each storage of the forward pass, by the tensor that owns it."""

    taken: tuple[list[int], ...]
    """Per module call: inputs of its recomputation that other calls make; empty if it saves
    activations."""
    offloaded: dict[int, Trip]


def is_recomputed(uses: Uses, memory: Memory) -> tuple[tuple[int, ...], ...]:
    """Return, per module call, the forward ops to recompute under a plan, in order."""
    last = len(memory.blocks) - 1
    return tuple(
        () if (module_call.block == last and memory.loss_chunks > 1)
        or memory.blocks[module_call.block].activations != "recomputed" else recompute
        for module_call, recompute in zip(uses.module_calls.calls, uses.recompute, strict=True)
    )  # fmt: skip


def find_needs(uses: Uses, memory: Memory, with_parameters: Collection[int]) -> Needs:
    """Return the policies of storages under a plan, except those in ``with_parameters``."""
    stays: set[int] = set().union(*uses.outside)
    wanted: dict[int, list[int]] = defaultdict(list)
    taken: list[list[int]] = []
    last = len(memory.blocks) - 1
    passing = set(with_parameters)
    for number, module_call in enumerate(uses.module_calls.calls):
        policy = memory.blocks[module_call.block]
        if module_call.block == last and memory.loss_chunks > 1:
            # With the loss in chunks, no activations of the last block stay for its backward pass.
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
        # A storage that one call saves on the device is never freed, so offloading it is useless.
        for storage, numbers in wanted.items()
        if storage not in stays
    }
    return Needs(tuple(taken), offloaded)


def _is_checkpoint(uses: Uses, module_call: int, policy: MemoryBlock) -> bool:
    """Return True if a module call saves its input instead of its activations."""
    if policy.activations != "recomputed":
        return False
    return bool(uses.recompute[module_call]) or not uses.makes(module_call, uses.saved(module_call))


def _offloaded(graph: Graph, policy: MemoryBlock, storages: list[int]) -> set[int]:
    """Return the storages of a module call that its policy offloads.

    Storages that cannot be recomputed are treated as inputs of the call.
    """
    if policy.activations == "recomputed" and policy.checkpoint == "offloaded":
        return set(storages)
    if policy.activations != "offloaded":
        return set()
    # Storages are offloaded in order, as far as their sum stays within the policy's fraction.
    storages = [s for s in storages if graph.tensor_bytes[s] >= SMALLEST_MOVED]
    sizes = graph.tensor_bytes[storages]
    buffer = policy.share * float(sizes.sum())
    return {s for s, end in zip(storages, np.cumsum(sizes).tolist(), strict=True) if end <= buffer}
