"""Small random training steps: phases, partners, groups, work and random draws on random graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from simulate.problems import graphs

from hocket.graph import Graph, Phase, verify_graph


@st.composite
def training_graphs(draw: Any, max_ops: int = 12) -> Graph:
    """Graphs of all roles and aliases; phases mostly follow each other, as in a real step."""
    graph = draw(graphs(max_ops))
    count = graph.num_ops
    phases = draw(_column(st.sampled_from(list(Phase)), count))
    if draw(st.integers(0, 3)):
        phases = sorted(phases)
    forward = [op for op in range(count) if phases[op] == Phase.FORWARD]
    partners = [
        draw(st.sampled_from([-1, *forward])) if phases[op] == Phase.BACKWARD else -1
        for op in range(count)
    ]
    drawn = draw(st.permutations(range(count)))
    changed = replace(
        graph,
        op_phase=np.array(phases, dtype=np.int8),
        partner=np.array(partners, dtype=np.int32),
        group=np.array(draw(_column(st.sampled_from([-1, -1, -1, 0, 1]), count)), dtype=np.int32),
        rng_order=np.where(np.arange(count) % 3 == 0, drawn, -1).astype(np.int32),
        flops=np.array(draw(_column(st.sampled_from([0.0, 1.0, 1.0]), count))),
    )
    verify_graph(changed)
    return changed


@st.composite
def units_of(draw: Any, graph: Graph, max_units: int = 4) -> np.ndarray:
    """Any assignment of ops to units, numbered by first op."""
    labels = draw(_column(st.integers(0, max_units - 1), graph.num_ops))
    number: dict[int, int] = {}
    return np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int32)


def _column(values: Any, count: int) -> Any:
    return st.lists(values, min_size=count, max_size=count)
