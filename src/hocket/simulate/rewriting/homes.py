"""Where parameters and optimizer state are at home under a memory section. O(ops + reads)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.needs import Uses


@dataclass(frozen=True, eq=False)
class ParameterHomes:
    """What is at home on the host, and who reads and updates it."""

    on_host: frozenset[int]
    """Parameters and optimizer state that are not on the device between their uses."""
    streamed_reads: dict[str, list[list[int]]]
    """``forward`` and ``backward``: per block, streamed parameters that it reads."""
    updates: list[list[int]]
    """Per block: ops that update its parameters."""


def parameter_reads(
    uses: Uses, again: tuple[tuple[int, ...], ...]
) -> tuple[list[set[int]], list[set[int]]]:
    """Per block: parameters that its forward and its backward pass read."""
    graph, blocks = uses.graph, uses.blocks
    is_parameter = graph.tensor_role[graph.root_of] == Role.PARAMETER
    forward: list[set[int]] = [set() for _ in blocks.names]
    backward: list[set[int]] = [set() for _ in blocks.names]
    for op in np.flatnonzero(graph.op_phase != Phase.OPTIMIZER).tolist():
        block = int(blocks.block_of[op])
        here = graph.reads_of(op)
        roots = graph.root_of[here[is_parameter[here]]].tolist()
        if graph.op_phase[op] == Phase.BACKWARD:
            backward[block].update(roots)
            continue
        forward[block].update(roots)
        if op in again[block]:
            backward[block].update(roots)
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
    return ParameterHomes(frozenset(on_host), kept, updates)
