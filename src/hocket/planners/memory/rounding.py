"""From shares to a memory section: each block gets one way and one home.

Blocks are gone through in order and what a block was given too much or too little of is carried to
the next one (error diffusion), so that after any number of blocks each way has about the bytes and
seconds that the linear program gave it. Kept and offloaded need no rounding: a block offloads a
share of its bytes. How much each block offloads is therefore asked of the program once more when
all else is chosen: what was spread over blocks that are made again now would hold others up.
O(blocks).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.sections import Memory, MemoryBlock
from hocket.planners.memory.linear import Allowed, ProgramShares
from hocket.planners.memory.numbers import (
    FROM_HOST,
    HOMES,
    HOST_UPDATE,
    KEPT,
    OFFLOADED,
    RECOMPUTED,
    RESIDENT,
    STREAMED,
    VISITING,
    WAYS,
    BlockNumbers,
)
from hocket.simulate.rewriting.uses import Uses

SMALLEST_SHARE = 0.02
"""Less than this part of a block is not worth offloading."""


class BlockChoices(NamedTuple):
    """One way and one home per block; what is kept may be offloaded in part."""

    way: IntArray
    home: IntArray

    @property
    def allowed(self) -> Allowed:
        """What is left to choose: how much of what is there is offloaded."""
        ways = np.arange(len(WAYS)) == self.way[:, None]
        ways[self.way == KEPT, OFFLOADED] = True
        return Allowed(ways, np.arange(len(HOMES)) == self.home[:, None])


def chosen(shares: ProgramShares, numbers: BlockNumbers) -> BlockChoices:
    """The choice nearest to the shares."""
    ways = shares.ways.copy()
    ways[:, KEPT] += ways[:, OFFLOADED]
    ways[:, OFFLOADED] = 0.0
    home = _diffused(shares.homes, numbers.home[:, RESIDENT], _late(numbers))
    return BlockChoices(_diffused(ways, numbers.stay[:, KEPT]), home)


def offloaded_share(shares: ProgramShares) -> FloatArray:
    """Per block: the part of what is there that is offloaded."""
    offloaded = shares.ways[:, OFFLOADED]
    there = shares.ways[:, KEPT] + offloaded
    return np.divide(offloaded, there, out=np.zeros_like(there), where=there > 0)


def section_of(
    choice: BlockChoices,
    share: FloatArray,
    uses: Uses,
    *,
    budget_bytes: tuple[int, ...],
    loss_chunks: int,
    prefetch: int,
    expert_groups: int = 1,
) -> Memory:
    """The section of a choice, with the offloaded share of each block."""
    of_experts = {each.block for each in uses.experts.values()}
    home = choice.home
    blocks = tuple(
        MemoryBlock(
            name=name,
            start=int(uses.blocks.start[number]),
            stop=int(uses.blocks.start[number + 1]),
            parameters="streamed" if home[number] in (STREAMED, VISITING) else "resident",
            update="device" if home[number] in (RESIDENT, VISITING) else "host",
            expert_groups=expert_groups if home[number] == STREAMED and number in of_experts else 1,
            **_activations(int(choice.way[number]), float(share[number])),
        )
        for number, name in enumerate(uses.blocks.names)
    )
    return Memory(
        budget_bytes=budget_bytes, blocks=blocks, loss_chunks=loss_chunks, prefetch=prefetch
    )


def _activations(way: int, share: float) -> dict[str, Any]:
    if way == RECOMPUTED:
        return {"activations": "recomputed"}
    if way == FROM_HOST:
        return {"activations": "recomputed", "checkpoint": "offloaded"}
    if share >= SMALLEST_SHARE:
        return {"activations": "offloaded", "share": round(share, 4)}
    return {}


def _late(numbers: BlockNumbers) -> FloatArray:
    """What is owed of each home to begin with: the host's updates of the first blocks are waited
    for first of all, so that rather fewer of them are given to it, and rather more later on."""
    owed = np.zeros(len(HOMES))
    typical = float(np.median(numbers.home[:, RESIDENT]))
    owed[[HOST_UPDATE, STREAMED]], owed[[RESIDENT, VISITING]] = -typical / 4, typical / 4
    return owed


def _diffused(shares: FloatArray, weight: FloatArray, owed: FloatArray | None = None) -> IntArray:
    """One choice per row such that running sums of weighted choices follow those of the shares,
    beginning with what is ``owed``."""
    chosen = np.zeros(len(shares), dtype=np.int32)
    owed = np.zeros(shares.shape[1]) if owed is None else owed.copy()
    for row, given in enumerate(shares):
        owed += given * weight[row]
        # A choice that was not given to any row of this kind is never taken.
        allowed = np.where(given > 1e-9, owed, -np.inf)
        chosen[row] = int(np.argmax(allowed)) if weight[row] else int(np.argmax(given))
        owed[chosen[row]] -= weight[row]
    return chosen
