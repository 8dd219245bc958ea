import pytest

from hocket.hardware.cluster import Cluster, Device, Link
from hocket.hardware.host_route import HostRoute, host_route, with_host_route
from hocket.plan.make import find_cluster


def test_a_card_reaches_its_host_at_the_rate_of_its_own_link():
    cluster = find_cluster("1xh200")
    found = host_route(cluster, cluster.devices[0])
    assert found.out_bps == found.in_bps == cluster.links[0].bandwidth_bps
    assert found.latency_s == cluster.links[0].latency_s


@pytest.mark.parametrize(("duplex", "part"), [("full", 1), ("half", 2)])
def test_the_narrowest_link_of_the_widest_way_counts(duplex, part):
    kind = find_cluster("1xh200").devices[0].kind
    cluster = Cluster(
        name="two ways",
        devices=(Device(name="gpu", kind=kind, host="host", memory_bytes=kind.memory_bytes),),
        hosts=("host",),
        switches=("switch",),
        links=(
            Link(name="slow", ends=("gpu", "host"), bandwidth_bps=1e9, latency_s=1e-6),
            Link(name="up", ends=("gpu", "switch"), bandwidth_bps=8e9, latency_s=1e-6,
                 duplex=duplex),
            Link(name="on", ends=("switch", "host"), bandwidth_bps=6e9, latency_s=2e-6),
        ),
    )  # fmt: skip
    found = host_route(cluster, cluster.devices[0])
    assert found.out_bps == min(8e9 / part, 6e9)
    assert found.latency_s == 3e-6


def test_every_preset_has_a_way_to_the_host():
    for name in ("dgx-h100", "dgx1-v100", "mixed-desktop", "gb200-nvl72"):
        cluster = find_cluster(name)
        assert host_route(cluster, cluster.devices[0]).in_bps > 1e9


@pytest.mark.parametrize("name", ["1xh200", "dgx-h100", "dgx1-v100", "mixed-desktop"])
def test_another_way_to_the_host_is_that_of_one_device_alone(name):
    cluster = find_cluster(name)
    first, rest = cluster.devices[0], cluster.devices[1:]
    route = HostRoute(out_bps=48.2e9, in_bps=42.5e9, latency_s=7e-6)
    found = with_host_route(cluster, first, route)
    assert host_route(found, first) == route
    assert [host_route(found, d) for d in rest] == [host_route(cluster, d) for d in rest]
    between = [link for link in cluster.links if {*link.ends} <= {*cluster.device_names}]
    assert [link for link in found.links if {*link.ends} <= {*cluster.device_names}] == between
