"""Plan collectives over the links of a cluster, with their bounds and certificates.

`CollectiveRequest` checks the names in a request and plans it; `collective_classes` compares plans
with NCCL's rings for all device subsets of a machine; `predict_propagation` predicts the step time
of data parallelism with a planned all-reduce.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hocket.base.errors import unknown_name
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.make import find_cluster, make_problem
from hocket.plan.sections.communication import COLLECTIVES, Collective
from hocket.planners.communication.classes import connected_classes
from hocket.planners.communication.collective import CollectivePlan, Offer
from hocket.planners.communication.collective import plan_collective as plan_on_ranks
from hocket.planners.communication.fabric import (
    LINK_CHOICES,
    LinkChoice,
    chosen_device,
    chosen_ranks,
    fabric_of,
)
from hocket.planners.communication.priority import (
    PropagationChoice,
    choose_propagation,
    layers_of,
)
from hocket.planners.communication.schedule import bound_of
from hocket.simulate.gradients import GradientChannel


@dataclass(frozen=True, kw_only=True)
class CollectiveRequest:
    """A collective on devices of a cluster."""

    on: str | Path | Cluster
    collective: str
    gpus: str | None = None
    """Devices in the order of the ranks, such as ``0-3`` or names; None for all devices."""
    root: str | None = None
    """Root of a broadcast or reduce; None for the best one."""
    relay: bool = False
    """True if devices that are not ranks may forward data."""
    links: str = "auto"
    """``peer`` for direct links between devices only, ``all`` for all links, or ``auto``."""
    size_bytes: int | None = None

    def plan(self, *, max_trees: int | None = None, with_blink: bool = False) -> CollectivePlan:
        """Return the best schedule with its bound, and common schedules for comparison.

        The best schedule is verified to be legal on the cluster.
        """
        kind, choice, cluster, ranks, root = self._resolved()
        found = plan_on_ranks(
            cluster, kind, ranks, root=root, size_bytes=self.size_bytes, relay=self.relay,
            links=choice, max_trees=max_trees, with_blink=with_blink,
        )  # fmt: skip
        found.chosen.section.require_legal(cluster)
        return found

    def bound(self) -> dict[str, Any]:
        """Return an upper bound of the collective's rate, with its certificate."""
        kind, choice, cluster, ranks, root = self._resolved()
        start_s = time.process_time()
        fabric = fabric_of(cluster, ranks, relay=self.relay, links=choice)
        certificate = bound_of(fabric, kind, ranks.index(root or ranks[0]))
        plan_s = time.process_time() - start_s
        return {
            "collective": kind,
            "ranks": list(ranks),
            "bound_bps": float(certificate.bound * fabric.unit_bps),
            "bound": str(certificate.bound * fabric.unit_bps),
            "certificate": {"unit_bps": fabric.unit_bps, **certificate.to_data()},
            "plan_seconds": plan_s,
        }

    def _resolved(self) -> tuple[Collective, LinkChoice, Cluster, tuple[str, ...], str | None]:
        """Resolve and check the names of the request: kind, links, cluster, ranks, root."""
        if self.collective not in COLLECTIVES:
            raise unknown_name("collective", self.collective, COLLECTIVES)
        if self.links not in LINK_CHOICES:
            raise unknown_name("choice of links", self.links, LINK_CHOICES)
        cluster = find_cluster(self.on)
        ranks = chosen_ranks(cluster, self.gpus)
        root = None if self.root is None else chosen_device(cluster, self.root)
        if root is not None and root not in ranks:
            raise unknown_name("root", root, ranks)
        return self.collective, self.links, cluster, ranks, root


def plan_collective(on: str | Path | Cluster, collective: str, **request: Any) -> CollectivePlan:
    """Plan a collective; the options are the fields of `CollectiveRequest`."""
    return CollectiveRequest(on=on, collective=collective, **request).plan()


def collective_classes(
    on: str | Path | Cluster, collective: str, *, size_bytes: int | None = None
) -> list[dict[str, Any]]:
    """Return one entry per class of isomorphic connected sets of at least three devices.

    Each entry compares the chosen schedule with the rings of NCCL, and with the better of rings and
    chains, between which newer versions of NCCL choose. If the peer links of a set contain no ring,
    rings over PCIe are used, as in Blink's evaluation.
    """
    from hocket.view.collective import as_dict

    cluster = find_cluster(on)
    request = CollectiveRequest(
        on=cluster, collective=collective, links="peer", size_bytes=size_bytes
    )
    entries = []
    for fabric, count in connected_classes(cluster, range(3, cluster.num_devices + 1)):
        plan = replace(request, gpus=",".join(fabric.places[: fabric.num_ranks])).plan()
        shown = as_dict(plan)
        kept = ("ranks", "algorithm", "rate_bps", "bound_bps", "gap", "num_trees", "offers")
        entries.append({key: shown[key] for key in kept} | {"num_sets": count} | _speedups(plan))
    return entries


def _speedups(plan: CollectivePlan) -> dict[str, float | None]:
    """Return the speed-up over rings, and over the better of rings and chains."""
    offers = {offer.name: offer for offer in plan.offers}

    def seconds(offer: Offer) -> float:
        size = plan.size_bytes
        return float(1 / offer.rate_bps) if size is None else offer.times.time_s(size)

    rings = offers.get("ring", offers.get("ring over PCIe"))
    if rings is None:
        return {"speedup_over_rings": None, "speedup_over_rings_and_chains": None}
    best_s, rings_s = seconds(plan.chosen), seconds(rings)
    usual_s = min(rings_s, seconds(offers["chain"])) if "chain" in offers else rings_s
    return {
        "speedup_over_rings": rings_s / best_s,
        "speedup_over_rings_and_chains": usual_s / best_s,
    }


def predict_propagation(graph: Graph, plan: CollectivePlan) -> PropagationChoice:
    """Predict a data-parallel step of a model whose gradients use a planned all-reduce."""
    cluster, chosen = plan.cluster, plan.chosen
    costs = make_problem(graph, cluster).costs
    # All ranks wait for the slowest device.
    devices = [cluster.device_names.index(rank) for rank in chosen.section.ranks]
    op_s = np.max([costs.op_s[costs.device_row[device]] for device in devices], axis=0)
    channel = GradientChannel(float(chosen.rate_bps), latency_s=chosen.latency_s)
    return choose_propagation(layers_of(graph, op_s), channel)
