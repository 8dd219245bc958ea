"""Casts of parameters that lie on the device rounded: a step does not make them.

Autocast rounds a parameter for each use, and its backward pass makes the gradient as wide as the
parameter again. Where host-resident parameters are copied in low precision (`Uses.copied_bytes`),
there is nothing to round: the copies are what the casts would make, and gradients stay in the type
that they are computed in. O(ops).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hocket.graph.graph import Graph, Phase

CAST = "aten._to_copy"


class Widening(NamedTuple):
    """An op of the backward pass that makes a gradient as wide as its parameter."""

    op: int
    gradient: int
    narrow: int
    """The low-precision gradient that it is made from."""


class Casts(NamedTuple):
    """Casts of some parameters and of their gradients."""

    rounding: tuple[int, ...]
    """Ops that round parameters."""
    widening: tuple[Widening, ...]

    def copies(self, graph: Graph) -> list[int]:
        """Tensors that rounding makes."""
        return [tensor for op in self.rounding for tensor in graph.made_by(op)]

    @property
    def ops(self) -> list[int]:
        """All of them."""
        return [*self.rounding, *(each.op for each in self.widening)]


def find_casts(
    graph: Graph, roots: Collection[int], parameter_reads: Iterable[tuple[int, int]]
) -> Casts:
    """The casts of the parameters of some storages, which ops are known to read."""
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
    """The graph in which casts take no memory."""
    if not casts.ops:
        return graph
    num_bytes, alias_of = graph.tensor_bytes.copy(), graph.alias_of.copy()
    num_bytes[casts.copies(graph)] = 0
    alias_of[[each.gradient for each in casts.widening]] = [each.narrow for each in casts.widening]
    return replace(graph, tensor_bytes=num_bytes, alias_of=alias_of)
