"""Host-resident parameters and optimizer state under a memory section. O(ops + reads).

A parameter that both passes only round (`Uses.copied_bytes`) is copied rounded: the host keeps a
low-precision copy of it, which takes half the bytes to fetch and which its update writes as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.graph.graph import Graph, Phase
from hocket.hardware.allocation import aligned
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.experts import in_groups
from hocket.simulate.rewriting.updates import Update
from hocket.simulate.rewriting.uses import Uses

_BACKWARD = int(Phase.BACKWARD)
NUM_STAGING_BUFFERS = 4
"""Pieces of state that are on the device at once for updates there: some come, some go."""
PIECE_BYTES = 2**26
"""Of parameters in such a piece."""
NUM_TURNS = 2
"""Groups of experts that are on the device at once: one is computed with, the next one comes."""


@dataclass(frozen=True, eq=False)
class HostParameters:
    """Host-resident parameters and optimizer state, with their readers and updates."""

    is_on_host: BoolArray
    """Per tensor: whether it is a parameter or optimizer state that is not on the device between
    its uses."""
    streamed_reads: dict[str, list[list[int]]]
    """``forward`` and ``backward``: per block, streamed parameters that it reads."""
    renewed: list[list[int]]
    """Per block: parameters that stay on the device and that the host updates, by the first block
    that reads them: what was changed is brought for its forward pass."""
    updates: list[list[int]]
    """Per block: ops that update its own parameters."""
    last_updates: list[int]
    """Ops that update parameters that are no block's own."""
    host_updates: frozenset[int]
    """Those of them that the host does."""
    state_swaps: dict[int, list[list[int]]]
    """Per block: those of them whose state comes to the device, in pieces."""
    staging_buffers_bytes: int
    """Device memory for the staging buffers of such pieces."""
    slots_bytes: int
    """Device memory of the buffers that streamed parameters share."""
    groups: dict[int, int]
    """Parameters of experts that are streamed in groups, and in how many."""
    ring_bytes: int
    """Device memory of the ring that these groups share."""
    copied: LongArray
    """Per tensor: the bytes that bring it from the host."""
    sizes: LongArray
    """Per tensor: its bytes on the device; of parameters that lie there as copies of what the host
    updates, those of the copy."""
    rounded: frozenset[int]
    """Parameters that come to the device rounded."""

    @property
    def reserved_bytes(self) -> int:
        """Device memory reserved for the whole step as staging buffers, slots and ring."""
        return self.staging_buffers_bytes + self.slots_bytes + self.ring_bytes


def runs_within(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Neighbours that together are no more than ``most``, as starts and stops; what is larger
    stands alone."""
    runs: list[tuple[int, int]] = []
    total = 0
    for number, size in enumerate(sizes):
        if runs and total + size <= most:
            runs[-1] = (runs[-1][0], number + 1)
            total += size
        else:
            runs.append((number, number + 1))
            total = size
    return runs


def num_parts(piece: Sequence[Update]) -> int:
    """Number of parts in which a piece of state is copied; more than 1 for one large parameter."""
    return max(1, -(-piece[0].parameter_bytes // PIECE_BYTES)) if len(piece) == 1 else 1


def state_chunks(
    updates: Mapping[int, Sequence[Update]],
) -> tuple[dict[int, list[list[int]]], int]:
    """Updates of neighbouring parameters together, by block, and the device memory of their staging
    buffers, large ones in parts: parameters in full, state, and once, where parameters are copied
    rounded, gradients in full."""
    pieces: dict[int, list[list[int]]] = {}
    buffer = once = 0
    for block, of_block in updates.items():
        runs = runs_within([update.aligned_bytes for update in of_block], PIECE_BYTES)
        pieces[block] = [[update.op for update in of_block[a:b]] for a, b in runs]
        for piece in (of_block[a:b] for a, b in runs):
            parts = max(1, -(-sum(u.aligned_bytes for u in piece) // PIECE_BYTES))
            buffer = max(buffer, -(-sum(u.staging_bytes for u in piece) // parts))
            rounded = sum(u.aligned_bytes for u in piece if u.is_rounded)
            once = max(once, -(-rounded // parts))
    return pieces, NUM_STAGING_BUFFERS * buffer + once


def find_host_parameters(
    graph: Graph, memory: Memory, uses: Uses, recompute: tuple[tuple[int, ...], ...]
) -> HostParameters:
    """A parameter that several blocks read, or the model's own code, stays on the device; such ones
    are updated on the host where all of these blocks are host-resident, or all blocks where such
    parameters are read by the model's own code alone."""
    policies = memory.blocks
    is_streamed = [policy.parameters == "streamed" for policy in policies]
    is_hosted = [policy.update == "host" for policy in policies]
    streamed = {root for root, of in uses.readers.items()
                if root not in uses.shared and is_streamed[min(of)]}  # fmt: skip
    sharing = uses.sharing or range(len(policies))
    is_shared_on_host = bool(sharing) and all(policies[b].is_on_host for b in sharing)
    is_on_host = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_on_host[list(streamed)] = True
    sizes = graph.tensor_bytes.astype(np.int64)
    updates: list[list[int]] = [[] for _ in policies]
    last_updates: list[int] = []
    renewed: list[list[int]] = [[] for _ in policies]
    host_updates: set[int] = set()
    swapped: dict[int, list[Update]] = defaultdict(list)
    host_resident = set(streamed)
    for update in uses.updates.values():
        block = update.block
        is_shared = uses.is_shared(update)
        (last_updates if is_shared else updates[block]).append(update.op)
        is_guest = not is_hosted[block] and any(root in streamed for root in update.roots)
        is_on_host_only = is_shared_on_host if is_shared else is_hosted[block]
        if is_on_host_only:
            host_updates.add(update.op)
            staying = [root for root in update.roots if root not in streamed]
            renewed[min(update.readers)] += staying
            sizes[staying] = aligned(uses.copied_bytes[staying])
            host_resident.update(staying)
        if is_guest:
            swapped[block].append(update)
        if is_on_host_only or is_guest:
            is_on_host[list(update.state)] = True
    groups = {r: n for r, n in in_groups(uses.experts, memory).items() if r in streamed}
    kept = _streamed_reads(uses, recompute, streamed - groups.keys())
    own = [int(aligned(uses.copied_bytes[sorted({*a, *b})]).sum())
           for a, b in zip(kept["forward"], kept["backward"], strict=True)]  # fmt: skip
    state_swaps, staging_buffers_bytes = state_chunks(swapped)
    return HostParameters(
        is_on_host=is_on_host, streamed_reads=kept, renewed=renewed, updates=updates,
        last_updates=last_updates, host_updates=frozenset(host_updates), state_swaps=state_swaps,
        staging_buffers_bytes=staging_buffers_bytes, copied=uses.copied_bytes, sizes=sizes,
        groups=groups,
        slots_bytes=(1 + max(1, memory.prefetch)) * max(own, default=0),
        ring_bytes=ring_bytes(uses, groups),
        rounded=frozenset(root for root in host_resident - groups.keys()
                          if uses.copied_bytes[root] < graph.tensor_bytes[root]),
    )  # fmt: skip


def _streamed_reads(
    uses: Uses, recompute: tuple[tuple[int, ...], ...], streamed: set[int]
) -> dict[str, list[list[int]]]:
    """Per pass and block: those of some parameters that it reads."""
    found: dict[str, list[set[int]]] = {
        phase: [set() for _ in uses.blocks.names] for phase in ("forward", "backward")
    }
    if streamed:
        phase, block_of = uses.graph.op_phase.tolist(), uses.blocks.block_of.tolist()
        is_recomputed = {op for ops in recompute for op in ops}
        for op, root in uses.parameter_reads:
            if root in streamed:
                is_backward = phase[op] == _BACKWARD
                if not is_backward:
                    found["forward"][block_of[op]].add(root)
                if is_backward or op in is_recomputed:
                    found["backward"][block_of[op]].add(root)
    return {phase: [sorted(roots) for roots in by_block] for phase, by_block in found.items()}


def ring_bytes(uses: Uses, groups: Mapping[int, int]) -> int:
    """Device memory for the largest group of experts in use and for the one being fetched."""
    sizes = (
        int(uses.copied_bytes[root]) // uses.experts[root].count * -(-uses.experts[root].count // n)
        for root, n in groups.items()
    )
    return NUM_TURNS * max(sizes, default=0)
