"""Small random training steps: phases, partners, groups, work and random draws on random graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from simulate.problems import graphs, numbers

from hocket.graph import Graph, Phase, verify_graph


@st.composite
def training_graphs(draw: Any, max_ops: int = 12) -> Graph:
    """Graphs of all roles and aliases; phases mostly follow each other, as in a real step."""
    graph = draw(graphs(max_ops))
    count = graph.num_ops
    phases = numbers(draw, count, list(Phase))
    if draw(st.integers(0, 3)):
        phases = np.sort(phases)
    forward = np.append(-1, np.flatnonzero(phases == Phase.FORWARD))
    partners = np.where(phases == Phase.BACKWARD, numbers(draw, count, forward), -1)
    drawn = draw(st.permutations(range(count)))
    changed = replace(
        graph,
        op_phase=phases.astype(np.int8),
        partner=partners.astype(np.int32),
        group=numbers(draw, count, [-1, -1, -1, 0, 1]).astype(np.int32),
        rng_order=np.where(np.arange(count) % 3 == 0, drawn, -1).astype(np.int32),
        flops=numbers(draw, count, [0.0, 1.0, 1.0]),
    )
    verify_graph(changed)
    return changed


@st.composite
def units_of(draw: Any, graph: Graph, max_units: int = 4) -> np.ndarray:
    """Any assignment of ops to units, numbered by first op."""
    labels = numbers(draw, graph.num_ops, range(max_units)).tolist()
    number: dict[int, int] = {}
    return np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int32)
