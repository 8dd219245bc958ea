"""Schedules of collectives on given links, their bounds and certificates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.api.planned import find_cluster
from hocket.base.errors import unknown_name
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import COLLECTIVES, Collective

if TYPE_CHECKING:
    from hocket.graph.graph import Graph
    from hocket.planners.communication.collective import CollectivePlan, Offer
    from hocket.planners.communication.fabric import LinkChoice
    from hocket.planners.communication.priority import PropagationChoice

__all__ = [
    "COLLECTIVES",
    "collective_bound",
    "collective_classes",
    "plan_collective",
    "predict_propagation",
]


def plan_collective(
    on: str | Path | Cluster,
    collective: str,
    *,
    gpus: str | None = None,
    root: str | None = None,
    size_bytes: int | None = None,
    relay: bool = False,
    links: str = "auto",
    max_trees: int | None = None,
    with_blink: bool = False,
) -> CollectivePlan:
    """The best schedule of a collective on these links, its bound and the common schedules.

    The chosen schedule is verified before it is returned.
    """
    from hocket.planners.communication.collective import plan_collective as planned
    from hocket.planners.communication.fabric import chosen_ranks

    kind, choice = _known(collective, links)
    cluster = find_cluster(on)
    ranks = chosen_ranks(cluster, gpus)
    found = planned(
        cluster, kind, ranks, root=_root(cluster, ranks, root), size_bytes=size_bytes,
        relay=relay, links=choice, max_trees=max_trees, with_blink=with_blink,
    )  # fmt: skip
    found.chosen.section.require_legal(cluster)
    return found


def _known(collective: str, links: str) -> tuple[Collective, LinkChoice]:
    from hocket.planners.communication.fabric import LINK_CHOICES

    kind = next((name for name in COLLECTIVES if name == collective), None)
    if kind is None:
        raise unknown_name("collective", collective, COLLECTIVES)
    choice = next((name for name in LINK_CHOICES if name == links), None)
    if choice is None:
        raise unknown_name("choice of links", links, LINK_CHOICES)
    return kind, choice


def _root(cluster: Cluster, ranks: Sequence[str], root: str | None) -> str | None:
    from hocket.planners.communication.fabric import chosen_device

    if root is None:
        return None
    name = chosen_device(cluster, root)
    if name not in ranks:
        raise unknown_name("root", name, ranks)
    return name


def collective_classes(
    on: str | Path | Cluster, collective: str, *, size_bytes: int | None = None
) -> list[dict[str, Any]]:
    """One entry per class of connected sets of three devices or more of a machine.

    Each entry compares the chosen schedule with the rings of NCCL (rings over PCIe where the peer
    links of the set close no ring, as in Blink's evaluation) and with the better of rings and
    chains, which is what newer versions of NCCL choose from.
    """
    from hocket.planners.communication.classes import connected_classes
    from hocket.view.collective import as_dict

    cluster = find_cluster(on)
    found = connected_classes(cluster, range(3, cluster.num_devices + 1))
    entries = []
    for fabric, count in found:
        ranks = ",".join(fabric.places[: fabric.num_ranks])
        plan = plan_collective(cluster, collective, gpus=ranks, size_bytes=size_bytes, links="peer")
        shown = as_dict(plan)
        kept = ("ranks", "algorithm", "rate_bps", "bound_bps", "gap", "num_trees", "offers")
        entry = {**{key: shown[key] for key in kept}, "num_sets": count}
        entries.append({**entry, **_speedups(plan)})
    return entries


def _speedups(plan: CollectivePlan) -> dict[str, float | None]:
    """Speed-up of the chosen schedule over rings, and over the better of rings and chains."""
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


def collective_bound(
    on: str | Path | Cluster,
    collective: str,
    *,
    gpus: str | None = None,
    root: str | None = None,
    relay: bool = False,
    links: str = "auto",
) -> dict[str, Any]:
    """Upper bound of the rate of a collective, with its certificate."""
    import time

    from hocket.planners.communication.fabric import chosen_ranks, fabric_of
    from hocket.planners.communication.schedule import bound_of

    kind, choice = _known(collective, links)
    cluster = find_cluster(on)
    ranks = chosen_ranks(cluster, gpus)
    at = ranks.index(_root(cluster, ranks, root) or ranks[0])
    start_s = time.process_time()
    fabric = fabric_of(cluster, ranks, relay=relay, links=choice)
    certificate = bound_of(fabric, kind, at)
    plan_s = time.process_time() - start_s
    return {
        "collective": kind,
        "ranks": list(ranks),
        "bound_bps": float(certificate.bound * fabric.unit_bps),
        "bound": str(certificate.bound * fabric.unit_bps),
        "certificate": {"unit_bps": fabric.unit_bps, **certificate.to_data()},
        "plan_seconds": plan_s,
    }


def predict_propagation(graph: Graph, plan: CollectivePlan) -> PropagationChoice:
    """A data-parallel step of a model whose gradients travel by a planned all-reduce."""
    import numpy as np

    from hocket.api.planned import make_problem
    from hocket.planners.communication.priority import choose_propagation, layers_of
    from hocket.simulate.gradients import GradientChannel

    cluster = plan.cluster
    costs = make_problem(graph, cluster).costs
    # All ranks wait for the slowest.
    numbers = [cluster.device_names.index(rank) for rank in plan.chosen.section.ranks]
    op_s = np.max([costs.op_s[costs.device_row[number]] for number in numbers], axis=0)
    chosen = plan.chosen
    channel = GradientChannel(float(chosen.rate_bps), latency_s=chosen.latency_s)
    return choose_propagation(layers_of(graph, op_s), channel)
