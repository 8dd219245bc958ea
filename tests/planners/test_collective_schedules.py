"""Collectives: every schedule meets its bound exactly, bounds are those of brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from planners.certificate_checker import check_certificate
from planners.communication_cases import (
    a100_boxes,
    brute_broadcast,
    brute_gather,
    brute_strength,
    cluster_of,
    mi250_boxes,
    random_cluster,
)

from hocket.base.errors import CheckError
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.problem import Problem
from hocket.plan.sections.communication import Communication, Tree
from hocket.planners.communication.classes import canonical_form, connected_classes
from hocket.planners.communication.collective import blink, many_trees, plan_collective
from hocket.planners.communication.cuts import LinkCut, best_root, broadcast_bound, gather_bound
from hocket.planners.communication.fabric import fabric_of
from hocket.planners.communication.schedule import best_bundles, best_schedule

COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
ORACLE = Path(__file__).parents[3] / "shared/data/communication/dgx1_subset_oracle.json"


def exact(cluster, fabric, collective, root=0):
    """A schedule, proven: it is legal, meets its bound, and the bound is certified."""
    found = best_schedule(fabric, collective, root)
    found.section.require_legal(cluster)
    check_certificate(fabric, collective, root, found.certificate)
    assert found.section.rate_bps(cluster) == found.certificate.bound * fabric.unit_bps
    return found


@pytest.mark.parametrize("switches", [0, 1, 2])
def test_every_schedule_meets_its_certified_bound_on_random_clusters(switches):
    for seed in range(12):
        cluster = random_cluster(100 * switches + seed, switches=switches)
        fabric = fabric_of(cluster, cluster.device_names, links="all")
        for collective in COLLECTIVES:
            found = exact(cluster, fabric, collective)
            # Column generation knows nothing of cuts, splitting or packing.
            mix = best_bundles(fabric, collective, 0)
            times = fabric.num_ranks if collective in ("allgather", "reducescatter") else 1
            assert mix.value * times == found.certificate.bound, (seed, collective)


def test_bounds_are_those_of_brute_force():
    for seed in range(25):
        cluster = random_cluster(seed, switches=seed % 3)
        fabric = fabric_of(cluster, cluster.device_names, links="all")
        assert gather_bound(fabric).bound == brute_gather(fabric)
        assert broadcast_bound(fabric, 0).bound == brute_broadcast(fabric, 0)
        if not fabric.has_switches:
            found = best_schedule(fabric, "allreduce", 0).certificate
            assert found.bound == brute_strength(fabric)


def test_shared_and_one_way_links_are_planned_to_their_certified_bound():
    bus = cluster_from_text("rtx2080x4")
    odd = cluster_of(3, 0, [("gpu0", "gpu1", 2.0), ("gpu1", "gpu2", 3.0), ("gpu0", "gpu2", 1.0)])
    mixed = replace(
        odd,
        links=(
            replace(odd.links[0], duplex="half"),
            replace(odd.links[1], duplex="one-way"),
            replace(odd.links[1], duplex="one-way", name="back", ends=("gpu2", "gpu1")),
            odd.links[2],
        ),
    )
    for cluster in (bus, mixed):
        fabric = fabric_of(cluster, cluster.device_names)
        for collective in COLLECTIVES:
            found = exact(cluster, fabric, collective)
            rate_bps = found.section.rate_bps(cluster)
            assert rate_bps == found.certificate.bound * fabric.unit_bps, collective


@pytest.mark.parametrize(
    ("cluster", "gbps"),
    [
        (a100_boxes(1), 342.857),
        (a100_boxes(2), 346.667),
        (mi250_boxes(1), 342.857),
        (mi250_boxes(2), 354.133),
    ],
    ids=["a100", "2 a100", "mi250", "2 mi250"],
)
def test_published_gather_rates_come_out_with_whole_schedules(cluster, gbps):
    fabric = fabric_of(cluster, cluster.device_names)
    found = exact(cluster, fabric, "allgather")
    assert float(found.section.rate_bps(cluster)) / 1e9 == pytest.approx(gbps, abs=5e-4)


def test_the_bound_of_a_thousand_gpus_is_exact():
    fabric = fabric_of(a100_boxes(128), tuple(f"gpu{n}" for n in range(1024)))
    # One box takes in 8 x 25 GB/s and needs the shares of the 1016 other GPUs.
    assert gather_bound(fabric).bound * fabric.unit_bps == Fraction(1024 * 200 * 10**9, 1016)


@pytest.mark.parametrize(("name", "classes"), [("dgx1-v100", 46), ("dgx1-p100", 14)])
def test_connected_allocations_of_a_dgx1_fall_into_the_known_classes(name, classes):
    found = connected_classes(cluster_from_text(name), range(3, 9))
    assert len(found) == classes
    assert sum(count for _, count in found) == 181


@pytest.mark.skipif(not ORACLE.exists(), reason="shared data is not here")
@pytest.mark.parametrize(
    ("key", "name", "link_bps"), [("dgx1v", "dgx1-v100", 25e9), ("dgx1p", "dgx1-p100", 20e9)]
)
def test_all_classes_of_a_dgx1_have_the_known_optima(key, name, link_bps):
    cluster = cluster_from_text(name)
    many_trees, gain = 0, 1.0
    rows = json.loads(ORACLE.read_text())[key]
    for row in rows:
        fabric = fabric_of(cluster, [f"gpu{n}" for n in row["subset"]], links="peer")
        root = best_root(fabric)
        rate = {
            collective: float(exact(cluster, fabric, collective, root).section.rate_bps(cluster))
            for collective in ("broadcast", "allgather", "allreduce")
        }
        assert rate["broadcast"] / link_bps == pytest.approx(row["bcast"])
        assert rate["allgather"] / link_bps == pytest.approx(row["allgather_opt"], abs=1e-5)
        assert rate["allreduce"] / link_bps == pytest.approx(row["allreduce_opt"], abs=1e-5)
        trees = best_schedule(fabric, "allreduce", 0).section.trees
        many_trees += len(trees) > 6
        # Reduce-scatter and all-gather one after the other, each at its optimum.
        gain *= (rate["allreduce"] * 2 / rate["allgather"]) ** (1 / len(rows))
    assert many_trees <= 1
    assert gain >= (1.35 if key == "dgx1v" else 1.2)


def test_six_trees_keep_95_percent_on_the_whole_dgx1():
    cluster = cluster_from_text("dgx1-v100")
    plan = plan_collective(cluster, "allreduce", cluster.device_names, max_trees=6)
    packed = plan.offers[0]
    assert len(packed.section.trees) <= 6
    assert packed.rate_bps >= Fraction(95, 100) * plan.bound_bps
    packed.section.require_legal(cluster)


def test_sets_of_devices_with_equal_links_are_one_class():
    cluster = cluster_from_text("dgx1-v100")
    first = fabric_of(cluster, ("gpu0", "gpu1", "gpu2", "gpu3"))
    second = fabric_of(cluster, ("gpu5", "gpu4", "gpu6", "gpu7"))
    assert canonical_form(first) == canonical_form(second)
    assert canonical_form(first) != canonical_form(fabric_of(cluster, ("gpu0", "gpu1", "gpu2")))


def test_relays_help_and_are_used_only_when_allowed():
    cluster = cluster_from_text("dgx1-v100")
    ranks = ("gpu0", "gpu1", "gpu2")
    alone = plan_collective(cluster, "allreduce", ranks)
    helped = plan_collective(cluster, "allreduce", ranks, relay=True)
    assert helped.bound_bps > 2 * alone.bound_bps
    helped.offers[0].section.require_legal(cluster)
    assert all(place in ranks for place in alone.fabric.places)


def test_multiplicative_weights_need_more_trees_for_no_more_rate():
    cluster = cluster_from_text("dgx1-v100")
    fabric = fabric_of(cluster, cluster.device_names)
    spread = many_trees(fabric, 0, epsilon=0.2)
    section = blink(fabric, "broadcast", 0, epsilon=0.2)
    section.require_legal(cluster)
    assert 0.7 * 6 < sum(spread.values()) <= 6
    assert len(section.trees) <= 6 < len(spread)
    assert section.rate_bps(cluster) <= broadcast_bound(fabric, 0).bound * fabric.unit_bps


# ── certificates and sections that are wrong ─────────────────────────────────────────────────────


def test_a_certificate_that_claims_too_little_is_refused():
    cluster = cluster_from_text("dgx1-v100")
    fabric = fabric_of(cluster, cluster.device_names)
    for collective in COLLECTIVES:
        honest = best_schedule(fabric, collective, 0).certificate
        with pytest.raises(CheckError):
            check_certificate(fabric, collective, 0, replace(honest, bound=honest.bound / 2))
    with pytest.raises(CheckError, match="separate"):
        check_certificate(fabric, "allgather", 0, LinkCut(Fraction(1), fabric.places, 0))


def test_the_interpreter_refuses_what_does_not_deliver():
    cluster = cluster_from_text("dgx1-v100")
    fabric = fabric_of(cluster, cluster.device_names)
    section = best_schedule(fabric, "allreduce", 0).section
    tree = section.trees[0]
    broken = {
        "never get": replace(tree, broadcast=tree.broadcast[:-1]),
        "never gets the part": replace(tree, reduce=tree.reduce[:-1]),
        "gets the same twice": replace(tree, broadcast=(*tree.broadcast, tree.broadcast[-1])),
        "does not have yet": replace(tree, broadcast=tree.broadcast[::-1]),
        "shares are positive": replace(tree, share=Fraction(0)),
    }
    for message, wrong in broken.items():
        with pytest.raises(CheckError, match=message):
            replace(section, trees=(wrong, *section.trees[1:])).require_legal(cluster)
    with pytest.raises(CheckError, match="add up"):
        replace(section, trees=section.trees[1:]).require_legal(cluster)
    hop = replace(tree.broadcast[0], hops=(("nowhere", "gpu0", "gpu1"),))
    with pytest.raises(CheckError, match="no link"):
        replace(section, trees=(replace(tree, broadcast=(hop,)),)).require_legal(cluster)


def test_sections_survive_their_data():
    cluster = cluster_from_text("2xdgx-a100-40g")
    section = best_schedule(fabric_of(cluster, cluster.device_names), "allgather", 0).section
    again = Communication.from_data(
        json.loads(json.dumps(section.to_data())), Problem(work=None, cluster=cluster)
    )
    assert again == section
    assert isinstance(again.trees[0], Tree)
