"""Times of collectives by rounds, held against the event engine that knows nothing of them.

A round ends for all at once; the engine lets a send go when its data are there and shares a link
among all that are on it, so that later levels may run ahead or be in the way. Where one send
follows the other and leaves no choice both agree; elsewhere they are within a factor of two, and
never is a link faster than it is.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.problems import costs_of

from hocket.api.collectives import plan_collective
from hocket.cost.collectives import ring_all_reduce_s, ring_path
from hocket.graph.build import GraphBuilder
from hocket.hardware.cluster import Cluster
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections.communication import Communication
from hocket.simulate.collective import CollectiveTimes, levels_of
from hocket.simulate.engine import simulate


def engine_s(section: Communication, cluster: Cluster, size_bytes: int) -> float:
    """Every receipt is an op that takes no time, every send the transfer of a tensor.

    One chunk per tree: the engine shares a link among all that is there and would not let chunks of
    one tree follow each other.
    """
    builder, device_of = GraphBuilder("collective"), []
    number = {name: index for index, name in enumerate(cluster.device_names)}

    def op(rank: str, reads: list[int], size: int) -> int:
        made = builder.op(f"{rank} {len(device_of)}", reads=sorted(set(reads)))
        device_of.append(number[rank])
        return builder.tensor(f"t{made}", size, producer=made)

    for tree in section.trees:
        size = round(float(tree.share) * size_bytes)
        held = {rank: op(rank, [], size) for rank in section.ranks}
        for send in tree.reduce:
            held[send.dst] = op(send.dst, [held[send.dst], held[send.src]], size)
        for send in tree.broadcast:
            held[send.dst] = op(send.dst, [held[send.src]], size)
    graph = builder.build()
    costs = costs_of(graph, cluster, np.zeros((len(cluster.kinds), graph.num_ops)))
    problem = Problem(work=graph, cluster=cluster, op_costs=costs, transfers="shared")
    place = {name: device for name, device in zip(
        (o["name"] for o in builder.ops), device_of, strict=True)}  # fmt: skip
    placement = np.array([place[name] for name in graph.op_names], dtype=np.int32)
    return simulate(problem, Plan().placing(placement)).makespan_s


def has_one_send_at_a_time(section: Communication) -> bool:
    """One tree that is a path from its one end to the other."""
    levels = [level for tree in section.trees for level, _ in levels_of(tree)]
    return len(set(levels)) == len(levels)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.sets(st.integers(0, 7), min_size=2, max_size=6),
    st.sampled_from(["broadcast", "reduce", "allreduce", "allgather", "reducescatter"]),
)
def test_rounds_and_engine_agree_on_single_paths_and_stay_close_elsewhere(gpus, collective) -> None:
    cluster = cluster_from_text("dgx1-v100")
    plan = plan_collective(cluster, collective, gpus=",".join(map(str, sorted(gpus))))
    if not plan.fabric.is_peer_only:
        return  # the engine chooses its own way through the host
    for offer in plan.offers:
        if offer.name == "ring over PCIe":
            continue
        size = 10_000_000
        found_s = engine_s(offer.section, cluster, size)
        rounds_s = CollectiveTimes(offer.section, cluster).time_s(size, 1)
        assert size / float(offer.rate_bps) <= found_s * (1 + 1e-5), offer.name
        assert 0.5 * rounds_s <= found_s <= 2.0 * rounds_s, offer.name
        if has_one_send_at_a_time(offer.section):
            assert found_s == pytest.approx(rounds_s, rel=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_formula_of_a_ring_is_the_ring_of_rounds(num_ranks) -> None:
    """One model: what is priced by the closed form is what planned trees are timed by."""
    cluster, size = cluster_from_text("8xa100-80g"), 10_000_000
    gpus = range(num_ranks)
    plan = plan_collective(cluster, "allreduce", gpus=",".join(map(str, gpus)))
    ring = next(offer for offer in plan.offers if offer.name == "ring")
    path = ring_path(cluster, gpus)
    formula_s = ring_all_reduce_s(size, num_ranks, path.latency_s, path.bandwidth_bps)
    assert CollectiveTimes(ring.section, cluster).time_s(size, 1) == pytest.approx(float(formula_s))
