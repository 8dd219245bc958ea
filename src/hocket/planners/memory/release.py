"""Release gradients as soon as their update has run.

A plain training step holds every gradient to its end, so the order of its updates cannot lower the
peak. If no code reads gradients after the update, their storages become ordinary results that are
freed after their last reader. Only roles of tensors change, so planner, simulator and executor need
no special case. O(reads).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.graph.graph import Graph, Phase, Role


def release_gradients(graph: Graph) -> Graph:
    """The same step, holding each gradient that an update reads only until its last reader."""
    reader = graph.reader
    is_updating = graph.op_phase[reader] == Phase.OPTIMIZER
    is_used = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_used[graph.root_of[graph.reads[is_updating]]] = True
    released = is_used[graph.root_of] & (graph.tensor_role == Role.GRADIENT)
    role = np.where(released, Role.ACTIVATION, graph.tensor_role).astype(np.int8)
    return replace(graph, tensor_role=role)
