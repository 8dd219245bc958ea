"""Host-resident parameters and optimizer state under a memory section. O(ops + reads).

A parameter that both passes only round (`Uses.copied_bytes`) is copied in low precision. The host
holds a low-precision copy of it, which takes half the bytes to fetch and which updates write too.
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
from hocket.simulate.rewriting.updates import Update
from hocket.simulate.rewriting.uses import Uses

_BACKWARD = int(Phase.BACKWARD)
NUM_STAGING_BUFFERS = 4
"""Number of chunks of swapped state on the device at once: fetched, updated or written back."""
PIECE_BYTES = 2**26
"""Largest bytes of parameters in a chunk of swapped state."""


@dataclass(frozen=True, eq=False)
class HostParameters:
    """Host-resident parameters and optimizer state, with their readers and updates."""

    is_on_host: BoolArray
    """Per tensor: True for parameters and optimizer state that are on the device only while
    used."""
    streamed_reads: dict[str, list[list[int]]]
    """For ``forward`` and ``backward``, per block: the streamed parameters that it reads."""
    renewed: list[list[int]]
    """Per block: resident parameters that the host updates and that this block is the first to
    read; new values are copied to the device for its forward pass."""
    updates: list[list[int]]
    """Per block: updates of parameters that only this block reads."""
    last_updates: list[int]
    """Updates of parameters that belong to no single block."""
    host_updates: frozenset[int]
    """Updates that run on the host."""
    state_swaps: dict[int, list[list[int]]]
    """Per block: updates on the device with swapped-in state, in chunks."""
    staging_buffers_bytes: int
    """Device memory of the staging buffers for swapped state."""
    slots_bytes: int
    """Device memory of the buffers into which blocks of streamed parameters are fetched."""
    copied: LongArray
    """Per tensor: bytes of its copy from the host."""
    sizes: LongArray
    """Per tensor: its bytes on the device; for resident parameters that the host updates, the bytes
    of their copies."""
    rounded: frozenset[int]
    """Parameters that are copied to the device in low precision."""

    @property
    def reserved_bytes(self) -> int:
        """Device memory reserved for the whole step as staging buffers and slots."""
        return self.staging_buffers_bytes + self.slots_bytes


def runs_within(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Split a sequence into consecutive runs (start, stop) with sums of at most ``most``.

    An element larger than ``most`` is a run of its own.
    """
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
    """Return the number of parts in which a chunk is copied: above 1 for a large parameter."""
    return max(1, -(-piece[0].parameter_bytes // PIECE_BYTES)) if len(piece) == 1 else 1


def state_chunks(
    updates: Mapping[int, Sequence[Update]],
) -> tuple[dict[int, list[list[int]]], int]:
    """Return the updates of each block in chunks, and the total bytes of the staging buffers.

    A buffer holds parameters and state in full precision. If parameters are copied rounded, one
    more buffer holds gradients in full precision. Large parameters are copied in parts.
    """
    pieces: dict[int, list[list[int]]] = {}
    buffer = once = 0
    for block, of_block in updates.items():
        runs = runs_within([update.aligned_bytes for update in of_block], PIECE_BYTES)
        pieces[block] = [[update.op for update in of_block[a:b]] for a, b in runs]
        for piece in (of_block[a:b] for a, b in runs):
            # A large parameter is copied in parts, so a buffer holds one part only.
            parts = max(1, -(-sum(u.aligned_bytes for u in piece) // PIECE_BYTES))
            buffer = max(buffer, -(-sum(u.staging_bytes for u in piece) // parts))
            rounded = sum(u.aligned_bytes for u in piece if u.is_rounded)
            once = max(once, -(-rounded // parts))
    return pieces, NUM_STAGING_BUFFERS * buffer + once


def find_host_parameters(
    graph: Graph, memory: Memory, uses: Uses, recompute: tuple[tuple[int, ...], ...]
) -> HostParameters:
    """Return the parameters and states on the host, and the place and order of updates.

    Parameters that several blocks or the model's own code read stay on the device. The host updates
    them only if all blocks that read such parameters are host-resident or, if only the model's own
    code reads them, all blocks.
    """
    policies = memory.blocks
    is_streamed = [policy.parameters == "streamed" for policy in policies]
    is_hosted = [policy.update == "host" for policy in policies]
    streamed = {root for root, of in uses.readers.items()
                if root not in uses.shared and is_streamed[min(of)]}  # fmt: skip
    # Without blocks that share parameters, all blocks decide.
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
    kept = _streamed_reads(uses, recompute, streamed)
    own = [int(aligned(uses.copied_bytes[sorted({*a, *b})]).sum())
           for a, b in zip(kept["forward"], kept["backward"], strict=True)]  # fmt: skip
    state_swaps, staging_buffers_bytes = state_chunks(swapped)
    return HostParameters(
        is_on_host=is_on_host, streamed_reads=kept, renewed=renewed, updates=updates,
        last_updates=last_updates, host_updates=frozenset(host_updates), state_swaps=state_swaps,
        staging_buffers_bytes=staging_buffers_bytes, copied=uses.copied_bytes, sizes=sizes,
        slots_bytes=(1 + max(1, memory.prefetch)) * max(own, default=0),
        rounded=frozenset(root for root in host_resident
                          if uses.copied_bytes[root] < graph.tensor_bytes[root]),
    )  # fmt: skip


def _streamed_reads(
    uses: Uses, recompute: tuple[tuple[int, ...], ...], streamed: set[int]
) -> dict[str, list[list[int]]]:
    """Return, per pass and block, the streamed parameters that it reads."""
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
