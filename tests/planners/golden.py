"""Two published scheduling examples: times, transfers and bytes of a few ops, optima known.

A is the example of the talk on Baechi (SoCC 2020), B is from Hanen and Munier (1995).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from simulate.problems import costs_of, joined

from hocket.graph import GraphBuilder, Role
from hocket.plan.problem import Problem


@dataclass(frozen=True)
class Example:
    """Ops by name in a topological order, with what they send to whom."""

    op_s: dict[str, float]
    transfer_s: dict[str, float]
    """Keys are pairs of names, as in "01"."""
    op_bytes: dict[str, int]

    def problem(
        self,
        num_devices: int,
        *,
        memory_bytes: int = 100,
        transfers: Any = "parallel",
        duplex: Any = "full",
    ) -> Problem:
        """The example on equal devices, each pair joined by a link."""
        builder = GraphBuilder("example")
        sent: dict[str, int] = {}
        for name in self.op_s:
            weight = builder.tensor(f"w{name}", self.op_bytes[name], role=Role.PARAMETER)
            reads = [weight, *(tensor for pair, tensor in sent.items() if pair[1] == name)]
            op = builder.op(name, reads=reads)
            for pair in self.transfer_s:
                if pair[0] == name:
                    sent[pair] = builder.tensor(pair, 0, producer=op)
        graph = builder.build()
        cluster = joined(num_devices)
        devices = tuple(replace(d, memory_bytes=memory_bytes) for d in cluster.devices)
        links = tuple(replace(link, duplex=duplex) for link in cluster.links)
        cluster = replace(cluster, devices=devices, links=links)
        op_s = np.array([self.op_s[name] for name in graph.op_names])
        tensor_s = np.array([self.transfer_s.get(name, 0.0) for name in graph.tensor_names])
        costs = costs_of(graph, cluster, op_s, tensor_s)
        return Problem(work=graph, cluster=cluster, op_costs=costs, transfers=transfers)


EXAMPLE_A = Example(
    op_s={"0": 1, "1": 3, "2": 3, "4": 3, "5": 1, "3": 1},
    transfer_s={"01": 1, "04": 1, "12": 1, "23": 1, "45": 1, "53": 1},
    op_bytes={"0": 1, "1": 2, "2": 2, "3": 1, "4": 1, "5": 1},
)
EXAMPLE_B = Example(
    op_s={"0": 6, "1": 7, "2": 9, "3": 8, "4": 10, "5": 6, "6": 6, "7": 10, "8": 6},
    transfer_s={
        "02": 1, "03": 5, "04": 2, "12": 1, "13": 1, "14": 1,
        "25": 5, "26": 3, "35": 4, "36": 1, "37": 5, "48": 1,
    },
    op_bytes=dict.fromkeys("012345678", 1),
)  # fmt: skip
