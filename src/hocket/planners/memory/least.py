"""The fewest bytes that any plan needs: what the largest op reads, makes and works in.

Whatever is offloaded, fetched or made again, the storages of an op are on the device while it runs,
and the batch and buffers are there at all times. Ops of the last block may go in chunks, of which
only the part that exists for one chunk at a time is divided, and products of experts one expert at
a time. O(ops + reads).
"""

from __future__ import annotations

import numpy as np

from hocket.graph.graph import Phase, Role
from hocket.simulate.rewriting.chunks import find_region
from hocket.simulate.rewriting.experts import all_in_groups, parts_of
from hocket.simulate.rewriting.uses import Uses


def least_bytes(uses: Uses, max_chunks: int) -> int:
    """Bytes that no memory section of this step goes below."""
    graph, blocks = uses.graph, uses.blocks
    region = find_region(graph, blocks)
    is_base = np.isin(graph.tensor_role, (Role.INPUT, Role.BUFFER)) & (graph.tensor_producer < 0)
    base = int(graph.held_bytes[is_base].sum())
    inside = np.zeros(graph.num_tensors, dtype=np.bool_)
    made_by = graph.tensor_producer
    inside[made_by >= 0] = np.isin(made_by[made_by >= 0], list(region.ops))
    size = graph.held_bytes.astype(np.float64)
    parted = inside & (graph.tensor_role != Role.PARAMETER)
    parted[list(region.whole)] = False
    size[parted] /= max_chunks
    size[is_base] = 0
    most_groups = max((each.count for each in uses.experts.values()), default=1)
    size /= parts_of(graph, uses.experts, all_in_groups(uses.experts, most_groups))
    most = 0.0
    for op in np.flatnonzero(graph.op_phase != Phase.OPTIMIZER).tolist():
        tensors = [*graph.reads_of(op).tolist(), *graph.made_by(op)]
        roots = np.unique(graph.root_of[tensors])
        share = max_chunks if op in region.ops else 1
        most = max(most, float(size[roots].sum()) + float(graph.workspace_bytes[op]) / share)
    return base + int(most)
