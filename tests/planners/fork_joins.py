"""Fork-joins with heavy tensors: groups of ops that meet hide what could run in parallel."""

from __future__ import annotations

from hocket.graph import Graph, GraphBuilder, Role

_MIB = 2**20


def fork_join(num_stages: int, num_branches: int, length: int) -> Graph:
    """Stages of chains that meet in one op; every other branch has heavy results."""
    builder = GraphBuilder("fork-join")
    made = builder.tensor("batch", _MIB, role=Role.INPUT)
    for stage in range(num_stages):
        ends = []
        for branch in range(num_branches):
            end = made
            for depth in range(length):
                name = f"s{stage}.b{branch}.{depth}"
                op = builder.op(name, reads=[end], flops=2e11 * (1 + branch), bytes_touched=_MIB)
                end = builder.tensor(name, (64 if branch % 2 else 4) * _MIB, producer=op)
            ends.append(end)
        op = builder.op(f"join{stage}", reads=ends, flops=1e10, bytes_touched=_MIB)
        made = builder.tensor(f"join{stage}", _MIB, producer=op)
    return builder.build()
