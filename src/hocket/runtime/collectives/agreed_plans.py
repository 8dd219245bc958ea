"""Plans of collectives that all ranks use: rank 0 plans, the other ranks read its plan.

Plans are exchanged through the store at which the ranks rendezvous, and cached by collective, root
and message size. If every rank planned separately, the work would be repeated, and plans could
differ, for example because of another solver version.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hocket.base.errors import RunError
from hocket.base.jsonfile import dump_json, parse_json
from hocket.hardware.cluster import Cluster
from hocket.plan.problem import Problem
from hocket.plan.sections.communication import Collective, Communication
from hocket.planners.communication.collective import plan_collective


class AgreedPlan(NamedTuple):
    """The trees of a collective, and their total rate on the links in bytes per second."""

    section: Communication
    rate_bps: float


class AgreedPlans:
    """Plans by collective, root and message size (rounded up to a power of two)."""

    def __init__(self, store: Any, rank: int, cluster: Cluster, num_ranks: int, key: str) -> None:
        self.cluster = cluster
        self._store, self._rank, self._key = store, rank, f"{key}/plan"
        self._ranks = cluster.device_names[:num_ranks]
        self._known: dict[tuple[str, int, int], AgreedPlan] = {}

    def plan(self, collective: Collective, root: int, num_bytes: int) -> AgreedPlan:
        """Return the plan for a message; all ranks must request the same plans in the same
        order."""
        size = max(num_bytes, 1).bit_length()
        place = (collective, root, size)
        if place not in self._known:
            self._known[place] = self._agree(collective, root, size)
        return self._known[place]

    def _agree(self, collective: Collective, root: int, size: int) -> AgreedPlan:
        key, what = f"{self._key}/{len(self._known)}", f"{collective} {root} {size}"
        if self._rank == 0:
            # Three quarters of the power of two: the middle of the sizes that share the plan.
            found = plan_collective(
                self.cluster, collective, self._ranks, root=self._ranks[root],
                size_bytes=3 << size >> 2,
            )  # fmt: skip
            # Other ranks compare this with their own call, to detect a different order of calls.
            self._store.set(f"{key}/for", what)
            self._store.set(key, dump_json(found.chosen.section.to_data()))
        data = parse_json(bytes(self._store.get(key)), "plan")
        if (other := self._store.get(f"{key}/for").decode()) != what:
            raise RunError(
                f"rank 0 called {_described(other)}, this rank {_described(what)}",
                hint="all ranks must call the same collectives with tensors of the same size",
            )
        section = Communication.from_data(data, Problem(work=None, cluster=self.cluster))
        return AgreedPlan(section, float(section.rate_bps(self.cluster)))


def _described(what: str) -> str:
    collective, root, size = what.split()
    of_root = f" from rank {root}" if collective == "broadcast" else ""
    return f"{collective}{of_root} of less than {1 << int(size)} bytes"
