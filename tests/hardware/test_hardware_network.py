"""What each device of a cluster gets inside its host and between hosts."""

from __future__ import annotations

import time

import pytest

from hocket.base.errors import InputFileError
from hocket.cost.collectives import ring_path
from hocket.hardware.files import cluster_from_dict
from hocket.hardware.shorthand import cluster_from_text


@pytest.mark.parametrize(
    "text", ["2xdgx-a100-80g", "3xdgx-h100", "2xdgx2", "2xhgx-h200", "24xa100-80g"]
)
def test_network_agrees_with_all_pairs_routes(text: str) -> None:
    cluster = cluster_from_text(text)
    network = cluster.network
    per_host = network.devices_per_host
    inside = ring_path(cluster, range(per_host))
    assert network.inside_bps == pytest.approx(inside.bandwidth_bps)
    assert network.inside_latency_s == pytest.approx(inside.latency_s)
    routes = cluster.routes
    pairs = [(rank, per_host + rank) for rank in range(per_host)]
    crossed: dict[int, int] = {}
    for src, dst in pairs:
        for channel in routes.path(src, dst).tolist():
            crossed[channel] = crossed.get(channel, 0) + 1
    shares = [routes.channel_bandwidth_bps[c] / count for c, count in crossed.items()]
    assert network.between_bps == pytest.approx(min(shares))
    assert network.between_latency_s == pytest.approx(max(routes.latency_s[p] for p in pairs))


def test_four_thousand_devices_take_a_fraction_of_a_second() -> None:
    start_s = time.process_time()
    network = cluster_from_text("512xdgx-a100-80g").network
    assert time.process_time() - start_s < 2.0
    assert network.num_devices == 4096
    assert network.devices_per_host == 8
    assert network.inside_bps == 300e9
    # The adapters would give 25 GB/s; the PCIe link to them is slower.
    assert network.between_bps == 24e9


def test_networks_of_unequal_kinds_are_those_of_each_alone() -> None:
    cluster = cluster_from_text("2xdgx-h100+2xdgx-a100-80g")
    networks = cluster.networks
    assert networks["h100-80g"].inside_bps == 450e9
    assert networks["a100-80g"].inside_bps == 300e9
    assert cluster.network.inside_bps == 300e9


def test_one_device_needs_no_network() -> None:
    network = cluster_from_text("1xh100").network
    assert network.devices_per_host == 1
    assert network.inside_bps == float("inf")


def test_unreachable_devices_are_refused() -> None:
    cluster = cluster_from_dict(
        {
            "hosts": ["a", "b"],
            "devices": [{"kind": "l4", "host": "a"}, {"kind": "l4", "host": "b"}],
            "links": [
                {"ends": ["gpu0", "a"], "bandwidth": "10GB/s", "latency": "1us"},
                {"ends": ["gpu1", "b"], "bandwidth": "10GB/s", "latency": "1us"},
            ],
        }
    )
    with pytest.raises(InputFileError, match="no path from 'gpu0' to 'gpu1'"):
        assert cluster.network
