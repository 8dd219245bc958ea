"""Casts that a step skips because its parameters are on the device in low precision already.

Autocast rounds a parameter to low precision for each use, and its backward pass converts the
gradient to the parameter's precision. If host-resident parameters are copied in low precision
(`Uses.copied_bytes`), both casts are unnecessary: the copies equal the results of rounding, and
gradients stay in the dtype in which they are computed. O(ops).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hocket.graph.graph import Graph, Phase

CAST = "aten._to_copy"


class Widening(NamedTuple):
    """A backward op that converts a gradient to the precision of its parameter."""

    op: int
    gradient: int
    narrow: int
    """The low-precision gradient that is converted."""


class Casts(NamedTuple):
    """Casts of some parameters and of their gradients."""

    rounding: tuple[int, ...]
    """Ops that round parameters to low precision."""
    widening: tuple[Widening, ...]

    def copies(self, graph: Graph) -> list[int]:
        """Return the tensors that rounding makes."""
        return [tensor for op in self.rounding for tensor in graph.made_by(op)]

    @property
    def ops(self) -> list[int]:
        """All casts, of parameters and of gradients."""
        return [*self.rounding, *(each.op for each in self.widening)]


def find_casts(
    graph: Graph, roots: Collection[int], parameter_reads: Iterable[tuple[int, int]]
) -> Casts:
    """Return the casts of parameters in the storages ``roots``, given all (op, storage) reads."""
    chosen = set(roots)
    rounding = {op for op, root in parameter_reads if root in chosen and graph.kind_of(op) == CAST}
    is_back = np.isin(graph.partner, list(rounding)) & (graph.op_phase == Phase.BACKWARD)
    widening = [
        Widening(op, graph.made_by(op)[0], int(graph.reads_of(op)[0]))
        for op in np.flatnonzero(is_back).tolist()
        if graph.kind_of(op) == CAST
    ]
    return Casts(tuple(sorted(rounding)), tuple(widening))


def without_casts(graph: Graph, casts: Casts) -> Graph:
    """Return the graph in which the results of casts take no memory."""
    if not casts.ops:
        return graph
    num_bytes, alias_of = graph.tensor_bytes.copy(), graph.alias_of.copy()
    # Copies arrive rounded already, and gradients stay as they are computed.
    num_bytes[casts.copies(graph)] = 0
    alias_of[[each.gradient for each in casts.widening]] = [each.narrow for each in casts.widening]
    return replace(graph, tensor_bytes=num_bytes, alias_of=alias_of)
