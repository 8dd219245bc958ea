"""The cluster that a graph file states."""

import pytest

from hocket.base.errors import UsageError
from hocket.hardware import cluster_from_dict, cluster_to_dict, stated_cluster

META = {"cluster": {"accelerators": 3, "accelerator_memory_bytes": 16e9, "cpus": 1}}


def test_stated_cluster_has_accelerators_and_processors_around_one_host():
    cluster = stated_cluster(META)
    assert cluster.device_names == ("acc0", "acc1", "acc2", "cpu0")
    assert [d.kind.name for d in cluster.devices] == ["accelerator"] * 3 + ["cpu"]
    assert [d.kind.is_cpu for d in cluster.devices] == [False] * 3 + [True]
    assert [d.memory_bytes for d in cluster.devices] == [16 * 10**9] * 3 + [2**50]
    assert cluster.uses_stated_times
    assert cluster.meta["from"] == "file"
    assert (cluster.routes.latency_s == 0).all()
    assert cluster.routes.hops[0, 3] == 2
    assert (cluster.routes.send_queue != cluster.routes.receive_queue).all()


def test_stated_cluster_round_trips():
    cluster = stated_cluster(META)
    again = cluster_from_dict(cluster_to_dict(cluster))
    assert again.uses_stated_times
    assert again.content_hash == cluster.content_hash


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "states no devices"),
        ({"cluster": 3}, "states no devices"),
        ({"cluster": {}}, "states no devices"),
        ({"cluster": {"accelerators": -1}}, "accelerators is '-1'"),
        ({"cluster": {"accelerators": float("nan")}}, "accelerators"),
        ({"cluster": {"accelerators": float("inf")}}, "accelerators"),
        ({"cluster": {"accelerators": True}}, "accelerators"),
        ({"cluster": {"accelerators": 10**6}}, "at most 1024"),
        ({"cluster": {"accelerators": 1, "accelerator_memory_bytes": 1.5}}, "whole number"),
    ],
)
def test_stated_cluster_refuses_what_it_cannot_use(meta, message):
    with pytest.raises(UsageError, match=message) as caught:
        stated_cluster(meta, "graph.json")
    assert caught.value.where == "graph.json"
