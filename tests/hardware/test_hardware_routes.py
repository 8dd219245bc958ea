"""Routes: the fastest paths of networkx, ties, channels and queues."""

import time

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError
from hocket.hardware import Cluster, Device, DeviceKind, Link, cluster_from_text
from hocket.hardware.routes import MAX_DEVICES, REFERENCE_BYTES, find_routes

KIND = DeviceKind(name="k", memory_bytes=2**30, peak_flops={}, memory_bandwidth_bps=1e11)


def cluster_of(num_devices: int, switches: tuple[str, ...], links: tuple[Link, ...]) -> Cluster:
    devices = tuple(
        Device(name=f"gpu{i}", kind=KIND, host="host", memory_bytes=2**30)
        for i in range(num_devices)
    )
    return Cluster(name="c", devices=devices, hosts=("host",), switches=switches, links=links)


def link(name: str, *ends: str, bandwidth_bps=1e9, latency_s=0.0, duplex="full") -> Link:
    return Link(
        name=name, ends=ends, bandwidth_bps=bandwidth_bps, latency_s=latency_s, duplex=duplex
    )


@st.composite
def clusters(draw) -> Cluster:
    num_devices = draw(st.integers(2, 5))
    switches = tuple(f"sw{i}" for i in range(draw(st.integers(0, 3))))
    places = [*(f"gpu{i}" for i in range(num_devices)), "host", *switches]
    links = [
        link(
            f"l{index}",
            *draw(st.lists(st.sampled_from(places), min_size=2, max_size=4, unique=True)),
            bandwidth_bps=draw(st.sampled_from([1e8, 1e9, 5e9, 2e10])),
            latency_s=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
            duplex=draw(st.sampled_from(["full", "half"])),
        )
        for index in range(draw(st.integers(1, 10)))
    ]
    return cluster_of(num_devices, switches, tuple(links))


def reference_s(crossed: Link) -> float:
    return crossed.latency_s + REFERENCE_BYTES / crossed.bandwidth_bps


def shortest_s(cluster: Cluster, src: str, dst: str) -> float | None:
    graph = nx.MultiDiGraph()
    graph.add_nodes_from([src, dst])
    for crossed in cluster.links:
        for one in crossed.ends:
            for other in crossed.ends:
                if one != other:
                    graph.add_edge(one, other, weight=reference_s(crossed))
    others = set(cluster.device_names) - {src, dst}
    graph.remove_nodes_from(others)
    try:
        return nx.dijkstra_path_length(graph, src, dst)
    except nx.NetworkXNoPath:
        return None


@given(clusters())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_routes_are_the_shortest_paths_that_no_device_forwards(cluster):
    names = cluster.device_names
    oracle = {(a, b): shortest_s(cluster, a, b) for a in names for b in names if a != b}
    if None in oracle.values():
        with pytest.raises(InputFileError, match="no path from"):
            find_routes(cluster)
        return
    routes = find_routes(cluster)
    by_name = {crossed.name: crossed for crossed in cluster.links}
    for src, first in enumerate(names):
        for dst, last in enumerate(names):
            channels = [routes.channel_names[c] for c in routes.path(src, dst)]
            crossed = [by_name[channel.split(" ")[0]] for channel in channels]
            assert routes.hops[src, dst] == len(crossed)
            assert routes.latency_s[src, dst] == pytest.approx(sum(x.latency_s for x in crossed))
            if src == dst:
                assert not crossed
                assert np.isinf(routes.bandwidth_bps[src, dst])
                continue
            assert routes.bandwidth_bps[src, dst] == min(x.bandwidth_bps for x in crossed)
            assert sum(map(reference_s, crossed)) == pytest.approx(oracle[first, last])
            assert _leads(cluster, channels, first, last)


def _leads(cluster: Cluster, channels: list[str], first: str, last: str) -> bool:
    """Whether the channels form a way from one device to the other, in their directions."""
    ends = {crossed.name: set(crossed.ends) for crossed in cluster.links}
    at = {first}
    for number, channel in enumerate(channels):
        name, _, direction = channel.partition(" ")
        if direction:
            src, dst = direction.split("→")
            at = {dst} if src in at else set()
        else:
            at = ends[name] if at & ends[name] else set()
        if number < len(channels) - 1:
            at = at - set(cluster.device_names)
    return last in at


def test_routes_prefer_fewer_links_then_the_first_in_the_file():
    half = REFERENCE_BYTES * 2.0
    cluster = cluster_of(
        2,
        (),
        (
            link("up", "gpu0", "host", bandwidth_bps=half),
            link("down", "host", "gpu1", bandwidth_bps=half),
            link("direct", "gpu0", "gpu1", bandwidth_bps=half / 2),
            link("twin", "gpu0", "gpu1", bandwidth_bps=half / 2),
        ),
    )
    routes = find_routes(cluster)
    assert [routes.channel_names[c] for c in routes.path(0, 1)] == ["direct gpu0→gpu1"]
    assert [routes.channel_names[c] for c in routes.path(1, 0)] == ["direct gpu1→gpu0"]


def test_full_duplex_has_a_channel_per_direction_and_others_have_one():
    links = (
        link("full", "gpu0", "host"),
        link("half", "gpu1", "host", duplex="half"),
        link("bus", "gpu2", "gpu3", "host"),
    )
    routes = find_routes(cluster_of(4, (), links))
    assert routes.channel_names == ("full gpu0→host", "full host→gpu0", "half", "bus")
    assert list(routes.path(2, 3)) == list(routes.path(3, 2)) == [3]
    assert list(routes.path(0, 1)) == [0, 2]
    assert list(routes.path(1, 0)) == [2, 1]


def test_queues_are_one_only_where_a_device_cannot_send_and_receive_at_once():
    links = (
        link("full", "gpu0", "host"),
        link("half", "gpu1", "host", duplex="half"),
        link("both", "gpu2", "host", duplex="half"),
        link("more", "gpu2", "gpu0"),
    )
    routes = find_routes(cluster_of(3, (), links))
    assert list(routes.send_queue) == [0, 2, 4]
    assert list(routes.receive_queue) == [1, 2, 5]


def test_routes_refuse_unreachable_pairs_and_too_many_devices():
    chain = (link("a", "gpu0", "gpu1"), link("b", "gpu1", "gpu2"))
    with pytest.raises(InputFileError, match="no path from 'gpu0' to 'gpu2'") as caught:
        find_routes(cluster_of(3, (), chain))
    assert "devices do not forward" in caught.value.hint
    with pytest.raises(InputFileError, match=str(MAX_DEVICES)):
        find_routes(cluster_from_text("512xdgx-a100-80g"))


def test_routes_of_64_devices_take_a_fraction_of_a_second():
    cluster = cluster_from_text("8xdgx1-v100")
    start = time.process_time()
    routes = find_routes(cluster)
    assert time.process_time() - start < 1.0
    assert routes.hops.shape == (64, 64)


def test_routes_are_the_same_every_time():
    first, second = (find_routes(cluster_from_text("2xdgx1-v100+1xdgx2")) for _ in range(2))
    assert first.channel_names == second.channel_names
    assert np.array_equal(first.path_channels, second.path_channels)
