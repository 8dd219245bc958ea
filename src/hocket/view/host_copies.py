"""Copies of a step between a device and the memory of its host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.graph.graph import Graph, Stream


class HostCopies(NamedTuple):
    """Copies of one step."""

    num_copies: int
    to_host_bytes: int
    from_host_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes in both directions."""
        return self.to_host_bytes + self.from_host_bytes


def host_copies(graph: Graph) -> HostCopies:
    """The copies of a step; work on a copy stream that is no copy is not among them."""
    kinds = np.array([kind.split(".")[0] == "copy" for kind in graph.kinds], dtype=bool)
    is_copy = kinds[graph.op_kind] if len(kinds) else np.zeros(graph.num_ops, dtype=bool)
    out = is_copy & (graph.op_stream == Stream.COPY_OUT)
    back = is_copy & (graph.op_stream == Stream.COPY_IN)
    size = graph.bytes_touched
    return HostCopies(int((out | back).sum()), int(size[out].sum()), int(size[back].sum()))
