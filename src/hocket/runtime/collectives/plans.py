"""The plans that all ranks follow: the first rank makes each, the others read it at the store.

Planning is pure, but a plan that every rank makes for itself would be as many chances to disagree
(another version of a solver is enough) and as much work as there are ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import RunError
from hocket.base.jsonfile import dump_json, parse_json
from hocket.hardware.cluster import Cluster
from hocket.plan.problem import Problem
from hocket.plan.sections.communication import Collective, Communication
from hocket.planners.communication.collective import plan_collective
from hocket.runtime.collectives.tuning import ChunkTuning


def _told(what: str) -> str:
    collective, root, size = what.split()
    of_root = f" from rank {root}" if collective == "broadcast" else ""
    return f"{collective}{of_root} of less than {1 << int(size)} bytes"


class AgreedPlan:
    """A section, what it promises, and what each rank must get through for it."""

    def __init__(self, section: Communication, cluster: Cluster, tuning: ChunkTuning) -> None:
        self.section, self.tuning = section, tuning
        self.rate_bps = float(section.rate_bps(cluster))

    def expected_bps(self, rank: int) -> FloatArray:
        """What this rank sends to each other while the plan runs at its rate."""
        number = {name: index for index, name in enumerate(self.section.ranks)}
        rates = np.zeros(len(number))
        for tree in self.section.trees:
            for send in (*tree.reduce, *tree.broadcast):
                if number[send.src] == rank:
                    rates[number[send.dst]] += float(tree.share) * self.rate_bps
        return rates


class AgreedPlans:
    """Plans by collective, root and size (to a power of two) on one cluster."""

    def __init__(self, store: Any, rank: int, cluster: Cluster, num_ranks: int, key: str) -> None:
        self.cluster = cluster
        self._store, self._rank, self._key = store, rank, f"{key}/plan"
        self._ranks = cluster.device_names[:num_ranks]
        self._known: dict[tuple[str, int, int], AgreedPlan] = {}

    def plan(self, collective: Collective, root: int, num_bytes: int) -> AgreedPlan:
        """The plan for a message; all ranks ask for the same ones in the same order."""
        size = max(num_bytes, 1).bit_length()
        place = (collective, root, size)
        if place not in self._known:
            self._known[place] = self._agree(collective, root, size)
        return self._known[place]

    def _agree(self, collective: Collective, root: int, size: int) -> AgreedPlan:
        key, what = f"{self._key}/{len(self._known)}", f"{collective} {root} {size}"
        if self._rank == 0:
            found = plan_collective(
                self.cluster, collective, self._ranks, root=self._ranks[root],
                size_bytes=3 << size >> 2,
            )  # fmt: skip
            self._store.set(f"{key}/for", what)
            self._store.set(key, dump_json(found.chosen.section.to_data()))
        data = parse_json(bytes(self._store.get(key)), "plan")
        if (other := self._store.get(f"{key}/for").decode()) != what:
            raise RunError(
                f"rank 0 is in {_told(other)}, this rank in {_told(what)}",
                hint="all ranks must call the same collectives with tensors of the same size",
            )
        problem = Problem(work=None, cluster=self.cluster)
        tuning = ChunkTuning(self._store, self._rank, len(self._ranks), key, 1 << size)
        return AgreedPlan(Communication.from_data(data, problem), self.cluster, tuning)
