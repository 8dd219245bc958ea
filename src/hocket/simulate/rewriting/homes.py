"""Where parameters and optimizer state are at home under a memory section. O(ops + reads).

A parameter that both passes only round (`Uses.copied_bytes`) is copied rounded: the host keeps a
rounded twin beside it, which half the bytes bring, and which its update writes as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.experts import in_groups
from hocket.simulate.rewriting.needs import Uses

_BACKWARD = int(Phase.BACKWARD)
_LASTING = tuple(map(int, PERSISTENT_ROLES))
_ONE_PASS = ("optimizer.adam", "optimizer.adamw")
"""Updates that the host does together with the rounding, in one pass over its memory."""
NUM_BERTHS = 4
"""Pieces of state that are on the device at once for updates there: some come, some go."""
PIECE_BYTES = 2**26
"""Of parameters in such a piece."""
NUM_TURNS = 2
"""Groups of experts that are on the device at once: one is computed with, the next one comes."""


@dataclass(frozen=True, eq=False)
class ParameterHomes:
    """What is at home on the host, and who reads and updates it."""

    on_host: frozenset[int]
    """Parameters and optimizer state that are not on the device between their uses."""
    streamed_reads: dict[str, list[list[int]]]
    """``forward`` and ``backward``: per block, streamed parameters that it reads."""
    renewed: list[list[int]]
    """Per block: parameters that stay on the device and that the host updates, by the first block
    that reads them: what was changed is brought for its forward pass."""
    updates: list[list[int]]
    """Per block: ops that update its parameters."""
    host_updates: frozenset[int]
    """Those of them that the host does."""
    visits: dict[int, list[list[int]]]
    """Per block: those of them whose state comes to the device, in pieces."""
    berths_bytes: int
    """Room on the device for such pieces."""
    slots_bytes: int
    """Room on the device that streamed parameters take turns in."""
    groups: dict[int, int]
    """Parameters of experts that are streamed in groups, and in how many."""
    ring_bytes: int
    """Room on the device that these groups take turns in."""
    copied: LongArray
    """Per tensor: the bytes that bring it from the host."""

    @property
    def room_bytes(self) -> int:
        """What lasts on the device for all that comes and goes."""
        return self.berths_bytes + self.slots_bytes + self.ring_bytes


def gradient_bytes(graph: Graph, op: int, copied: LongArray) -> int:
    """What an update on the host waits for: gradients, rounded as the parameters were that they
    are for."""
    reads = graph.reads_of(op)
    whole, sent = _sizes(graph, op, copied)
    full = int(graph.tensor_bytes[reads[~np.isin(graph.tensor_role[reads], _LASTING)]].sum())
    return full * sent // whole if whole else full


def host_update_bytes(graph: Graph, op: int, copied: LongArray) -> int:
    """What an update on the host reads and writes: what the op itself does; and where parameters
    are copied rounded, in one pass of AdamW half of a gradient and the twin, else the gradient in
    full, and the parameter once more for its twin."""
    whole, sent = _sizes(graph, op, copied)
    if sent == whole:
        return int(graph.bytes_touched[op])
    is_one_pass = graph.kind_of(op) in _ONE_PASS
    return int(graph.bytes_touched[op]) + (2 * sent - whole if is_one_pass else 2 * (whole + sent))


def _sizes(graph: Graph, op: int, copied: LongArray) -> tuple[int, int]:
    """Bytes of the parameters of an update, and of what is copied of them."""
    reads = graph.reads_of(op)
    roots = np.unique(graph.root_of[reads[graph.tensor_role[reads] == Role.PARAMETER]])
    whole = graph.tensor_bytes[roots]
    return int(whole.sum()), int(np.minimum(copied[roots], whole).sum())


def visiting_bytes(graph: Graph, roots: IntArray, copied: LongArray) -> tuple[int, int]:
    """What an update on the device of parameters that are at home on the host brings of them and
    sends: they come in full, and go home with the rounded twin where there is one."""
    whole, copies = graph.tensor_bytes[roots], copied[roots]
    twins = np.where(copies < whole, copies, 0)
    return int(whole.sum()), int((whole + twins).sum())


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


def num_parts(graph: Graph, ops: Sequence[int]) -> int:
    """In how many parts a piece of state comes: those of one large parameter."""
    reads = np.concatenate([graph.reads_of(op) for op in ops])
    roots = np.unique(graph.root_of[reads[graph.tensor_role[reads] == Role.PARAMETER]])
    size = int(graph.tensor_bytes[roots].sum())
    return max(1, -(-size // PIECE_BYTES)) if len(ops) == 1 else 1


def visiting_pieces(
    graph: Graph, updates: Mapping[int, Sequence[int]], copied: LongArray
) -> tuple[dict[int, list[list[int]]], int]:
    """Updates of neighbouring parameters together, and the room on the device that they take turns
    in, large ones in parts: parameters in full, state, and once, where parameters are copied
    rounded, gradients in full."""
    whole, rounding, state = {}, {}, {}
    for op in (op for ops in updates.values() for op in ops):
        reads = graph.reads_of(op)
        roots = np.unique(graph.root_of[reads[graph.tensor_role[reads] == Role.PARAMETER]])
        whole[op] = int(graph.tensor_bytes[roots].sum())
        rounding[op] = whole[op] if (copied[roots] < graph.tensor_bytes[roots]).any() else 0
        is_state = graph.tensor_role[reads] == Role.OPTIMIZER_STATE
        state[op] = int(graph.tensor_bytes[reads[is_state]].sum())
    pieces = {
        block: [list(ops[a:b]) for a, b in runs_within([whole[op] for op in ops], PIECE_BYTES)]
        for block, ops in updates.items()
    }
    room = once = 0
    for ops in (ops for of_block in pieces.values() for ops in of_block):
        parts = max(1, -(-sum(whole[op] for op in ops) // PIECE_BYTES))
        room = max(room, -(-sum(whole[op] + state[op] for op in ops) // parts))
        once = max(once, -(-sum(rounding[op] for op in ops) // parts))
    return pieces, NUM_BERTHS * room + once


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
    """A parameter that several blocks read stays on the device; it is updated on the host where
    all of them are at home there."""
    forward, backward = parameter_reads(uses, again)
    readers: dict[int, set[int]] = defaultdict(set)
    for reads in (forward, backward):
        for block, roots in enumerate(reads):
            for root in roots:
                readers[root].add(block)
    policies = memory.blocks
    streamed = {
        root
        for root, (block, *others) in readers.items()
        if not others and policies[block].parameters == "streamed"
    }
    at_home = [p.update == "host" or p.parameters == "streamed" for p in policies]
    on_host, updates = set(streamed), list[list[int]]([] for _ in policies)
    renewed: list[list[int]] = [[] for _ in policies]
    host_updates: set[int] = set()
    visiting: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        block = int(uses.blocks.block_of[op])
        updates[block].append(op)
        read = graph.reads_of(op)
        roles = graph.tensor_role[read]
        parameters = graph.root_of[read[roles == Role.PARAMETER]].tolist()
        of = {each for root in parameters for each in readers.get(root, ())} or {block}
        is_away = any(root in streamed for root in parameters)
        is_guest = is_away and policies[block].update == "device"
        is_home = policies[block].update == "host" if len(of) == 1 else all(at_home[b] for b in of)
        if is_home:
            host_updates.add(op)
            renewed[min(of)] += [root for root in parameters if root not in streamed]
        if is_guest:
            visiting[block].append(op)
        if is_home or is_guest:
            on_host.update(read[roles == Role.OPTIMIZER_STATE].tolist())
    groups = {r: n for r, n in in_groups(uses.experts, memory).items() if r in streamed}
    together = streamed - groups.keys()
    kept = {
        "forward": [sorted(roots & together) for roots in forward],
        "backward": [sorted(roots & together) for roots in backward],
    }
    own = [int(uses.copied_bytes[sorted({*a, *b})].sum())
           for a, b in zip(kept["forward"], kept["backward"], strict=True)]  # fmt: skip
    visits, berths_bytes = visiting_pieces(graph, visiting, uses.copied_bytes)
    return ParameterHomes(
        on_host=frozenset(on_host), streamed_reads=kept, renewed=renewed, updates=updates,
        host_updates=frozenset(host_updates), visits=visits, berths_bytes=berths_bytes,
        slots_bytes=(1 + max(1, memory.prefetch)) * max(own, default=0), copied=uses.copied_bytes,
        groups=groups, ring_bytes=ring_bytes(uses, groups),
    )  # fmt: skip


def ring_bytes(uses: Uses, groups: Mapping[int, int]) -> int:
    """Room for the largest group of experts in its turn and for the one that comes meanwhile."""
    sizes = (
        int(uses.copied_bytes[root]) // uses.experts[root].count * -(-uses.experts[root].count // n)
        for root, n in groups.items()
    )
    return NUM_TURNS * max(sizes, default=0)
