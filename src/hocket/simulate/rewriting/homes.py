"""Where parameters and optimizer state are at home under a memory section. O(ops + reads).

A parameter that both passes only round (`Uses.copied_bytes`) is copied rounded: the host keeps a
rounded twin beside it, which half the bytes bring, and which its update writes as well.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.needs import Uses

_BACKWARD = int(Phase.BACKWARD)


@dataclass(frozen=True, eq=False)
class ParameterHomes:
    """What is at home on the host, and who reads and updates it."""

    on_host: frozenset[int]
    """Parameters and optimizer state that are not on the device between their uses."""
    streamed_reads: dict[str, list[list[int]]]
    """``forward`` and ``backward``: per block, streamed parameters that it reads."""
    updates: list[list[int]]
    """Per block: ops that update its parameters."""
    copied: LongArray
    """Per tensor: the bytes that bring it from the host."""


def host_update_bytes(graph: Graph, op: int, copied: LongArray) -> int:
    """What an update on the host reads and writes: what the op itself does, and where parameters
    are copied rounded, once more the parameter and its twin."""
    reads = graph.reads_of(op)
    roots = np.unique(graph.root_of[reads[graph.tensor_role[reads] == Role.PARAMETER]])
    whole = graph.tensor_bytes[roots]
    rounding = np.where(copied[roots] < whole, whole + copied[roots], 0)
    return int(graph.bytes_touched[op]) + int(rounding.sum())


def visiting_bytes(graph: Graph, roots: IntArray, copied: LongArray) -> tuple[int, int]:
    """What an update on the device of parameters that are at home on the host brings of them and
    sends: those that were copied rounded come in full, and go home with their rounded twin."""
    whole, copies = graph.tensor_bytes[roots], copied[roots]
    is_rounded = copies < whole
    arriving = np.where(is_rounded, whole, 0)
    return int(arriving.sum()), int((whole + np.where(is_rounded, copies, 0)).sum())


def parameter_reads(
    uses: Uses, again: tuple[tuple[int, ...], ...]
) -> tuple[list[set[int]], list[set[int]]]:
    """Per block: parameters that its forward and its backward pass read."""
    phase, block_of = uses.graph.op_phase.tolist(), uses.blocks.block_of.tolist()
    runs_again = {op for ops in again for op in ops}
    forward: list[set[int]] = [set() for _ in uses.blocks.names]
    backward: list[set[int]] = [set() for _ in uses.blocks.names]
    for op, root in uses.parameter_reads:
        block = block_of[op]
        is_backward = phase[op] == _BACKWARD
        if not is_backward:
            forward[block].add(root)
        if is_backward or op in runs_again:
            backward[block].add(root)
    return forward, backward


def find_homes(
    graph: Graph, memory: Memory, uses: Uses, again: tuple[tuple[int, ...], ...]
) -> ParameterHomes:
    """A parameter that several blocks read is streamed where all of them stream theirs."""
    forward, backward = parameter_reads(uses, again)
    readers: dict[int, set[int]] = defaultdict(set)
    for reads in (forward, backward):
        for block, roots in enumerate(reads):
            for root in roots:
                readers[root].add(block)
    streamed = {
        root
        for root, blocks in readers.items()
        if all(memory.blocks[block].parameters == "streamed" for block in blocks)
    }
    on_host, updates = set(streamed), list[list[int]]([] for _ in memory.blocks)
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        block = int(uses.blocks.block_of[op])
        updates[block].append(op)
        read = graph.reads_of(op)
        roles = graph.tensor_role[read]
        parameters = graph.root_of[read[roles == Role.PARAMETER]].tolist()
        if memory.blocks[block].update == "host" or any(root in streamed for root in parameters):
            on_host.update(read[roles == Role.OPTIMIZER_STATE].tolist())
    kept = {
        "forward": [sorted(roots & streamed) for roots in forward],
        "backward": [sorted(roots & streamed) for roots in backward],
    }
    return ParameterHomes(frozenset(on_host), kept, updates, uses.copied_bytes)
