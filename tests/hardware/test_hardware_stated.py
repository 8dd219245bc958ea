"""The cluster that a graph file states, and clusters in notebooks."""

import pytest

from hocket.base.errors import UsageError
from hocket.hardware import cluster_from_dict, cluster_from_text, cluster_to_dict, stated_cluster
from hocket.hardware.cluster import Cluster, Device, DeviceKind

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
        ({}, "states no hardware"),
        ({"cluster": 3}, "states no hardware"),
        ({"cluster": {}}, "without devices"),
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


def test_repr_html_escapes_names_and_counts_devices():
    kind = DeviceKind(name="k", memory_bytes=2**30, peak_flops={}, memory_bandwidth_bps=1e9)
    device = Device(name="d", kind=kind, host="<script>", memory_bytes=2**30)
    html = Cluster(name="<b>&", devices=(device,), hosts=("<script>",))._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "&lt;b&gt;&amp;" in html
    html = cluster_from_text("dgx1-v100")._repr_html_()
    assert "<td>8</td><td>v100-16g</td>" in html
    assert "25 GB/s" in html


def test_repr_html_of_many_hosts_stays_short():
    html = cluster_from_text("512xdgx-a100-80g")._repr_html_()
    assert len(html) < 10_000
    assert "488 more rows" in html
