"""Tensors that the updates of a step read, and blocks that use them: independent of the plan.

O(updates + reads), Python, once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role
from hocket.hardware.allocation import aligned
from hocket.simulate.rewriting.blocks import StepBlocks

_ONE_PASS = ("optimizer.adam", "optimizer.adamw")
"""Updates that the host runs together with the rounding, in one pass over its memory."""


class Update(NamedTuple):
    """An op that updates parameters."""

    op: int
    block: int
    readers: frozenset[int]
    """Blocks that compute with its parameters; the update's own block if none does."""
    parameters: tuple[int, ...]
    """Parameter tensors that it reads."""
    roots: tuple[int, ...]
    """Storages of these parameters, each once."""
    state: tuple[int, ...]
    gradients: tuple[int, ...]
    """Tensors that it reads and that do not persist between steps."""
    parameter_bytes: int
    aligned_bytes: int
    """Bytes of its parameters, aligned, in one buffer."""
    staging_bytes: int
    """Bytes of its parameters and optimizer state, aligned, in one buffer."""
    state_bytes: int
    gradient_bytes: int
    rounded_bytes: int
    """Bytes of the low-precision copies of its parameters."""
    is_rounded: bool
    """True if any of its parameters is copied in low precision."""
    sent_bytes: int
    """Bytes of the gradients that it needs on the host, in the precision of the parameters'
    copies."""
    host_bytes: int
    """Host memory traffic in bytes: that of the op, plus the traffic of rounding.

    If parameters are copied rounded, a one-pass update (AdamW) reads gradients at half size and
    also writes the low-precision copies. Other updates first convert the gradients to full
    precision, and read the parameters once more to round them.
    """

    @property
    def leaving_bytes(self) -> int:
        """Bytes written back to the host after an update on the device."""
        return self.parameter_bytes + self.rounded_bytes


def find_updates(
    graph: Graph, blocks: StepBlocks, readers: Mapping[int, frozenset[int]], copied: LongArray
) -> dict[int, Update]:
    """Return the updates of a step in order.

    ``readers`` are blocks by parameter, ``copied`` the bytes of each tensor's copy from the
    host.
    """
    sizes, role, root_of = graph.tensor_bytes, graph.tensor_role.tolist(), graph.root_of
    found: dict[int, Update] = {}
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        reads = graph.reads_of(op).tolist()
        parameters = tuple(t for t in reads if role[t] == Role.PARAMETER)
        roots = tuple(sorted({int(root_of[t]) for t in parameters}))
        state = tuple(t for t in reads if role[t] == Role.OPTIMIZER_STATE)
        gradients = tuple(t for t in reads if role[t] not in PERSISTENT_ROLES)
        rounded = [root for root in roots if copied[root] < sizes[root]]
        whole, full = int(sizes[list(roots)].sum()), int(sizes[list(gradients)].sum())
        sent = int(np.minimum(copied[list(roots)], sizes[list(roots)]).sum())
        block = int(blocks.block_of[op])
        apart = int(aligned(sizes[list(roots)]).sum())
        of = frozenset[int]().union(*(readers.get(root, ()) for root in roots))
        found[op] = Update(
            op=op, block=block, readers=of or frozenset({block}), parameters=parameters,
            roots=roots, state=state, gradients=gradients, parameter_bytes=whole,
            aligned_bytes=apart, staging_bytes=apart + int(aligned(sizes[list(state)]).sum()),
            state_bytes=int(sizes[list(state)].sum()), gradient_bytes=full,
            rounded_bytes=int(copied[rounded].sum()), is_rounded=bool(rounded),
            sent_bytes=full * sent // whole if whole else full,
            host_bytes=int(graph.bytes_touched[op]) + _rounding_bytes(graph, op, whole, sent),
        )  # fmt: skip
    return found


def _rounding_bytes(graph: Graph, op: int, whole: int, sent: int) -> int:
    """Return the additional host memory traffic if parameters are copied rounded."""
    # Nothing is rounded, so the host only runs the op.
    if sent == whole:
        return 0
    return 2 * sent - whole if graph.kind_of(op) in _ONE_PASS else 2 * (whole + sent)
