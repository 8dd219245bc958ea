"""Rates of a host with all that training from its memory needs at work."""

import pytest
import torch
from runtime.budget_loops import CPU

from hocket.base.errors import RunError
from hocket.hardware.host_route import host_route
from hocket.plan.make import find_cluster
from hocket.runtime.offload import host_bandwidth as host_rates
from hocket.runtime.offload.host_bandwidth import (
    HostBandwidth,
    measure_host_bandwidth,
    with_measured_host,
)


def test_rates_are_what_was_done_over_the_time_that_it_took(monkeypatch):
    """By a clock that stands still but for updates and rests; copies are done at once."""
    now, took = [0.0], []
    monkeypatch.setattr(host_rates.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(host_rates.time, "sleep", lambda rest_s: now.append(now.pop() + rest_s))
    for name, value in {
        "COPY_BYTES": 1000, "NUM_ELEMENTS": 100, "NUM_PARAMETERS": 2, "NUM_PASSES": 9,
        "MAX_MEASURED_S": 7, "COPIES_ALONE_S": 100,
    }.items():  # fmt: skip
        monkeypatch.setattr(host_rates, f"_{name}", value)

    def update():
        # Every second one takes twice as long; when copies are over, all take half a second.
        now[0] += 1 + len(took) % 2 if len(took) < 8 else 0.5
        took.append(torch.get_num_threads())

    monkeypatch.setattr(host_rates, "_update_of", lambda num_numbers: update)
    before = torch.get_num_threads()
    measure_host_bandwidth.cache_clear()
    found = measure_host_bandwidth(CPU)
    measure_host_bandwidth.cache_clear()
    assert took == (8 + 16) * [max(1, before - 1)]
    assert torch.get_num_threads() == before
    # Six copies each way in nine seconds, then a hundred in as many; three slower updates in six,
    # then eight in four.
    copied = pytest.approx(0.95 * (667 + 1000) / 2, rel=0.01)
    assert found == (copied, copied, pytest.approx(0.85 * (1400 + 5600) / 2, rel=0.01))


def test_an_update_is_made_as_blocks_at_home_are_updated():
    update = host_rates._update_of(2**10)
    assert update() in (True, None)


def test_plans_for_this_machine_go_by_them(monkeypatch):
    monkeypatch.setattr(
        host_rates, "measure_host_bandwidth", lambda device: HostBandwidth(40e9, 50e9, 70e9)
    )
    cluster = find_cluster("1xh200")
    assert with_measured_host(cluster, CPU) is cluster
    found = with_measured_host(cluster, torch.device("cuda"))
    route = host_route(found, found.devices[0])
    assert (route.in_bps, route.out_bps, found.host_update_bps) == (40e9, 50e9, 70e9)
    assert route.latency_s == pytest.approx(host_route(cluster, cluster.devices[0]).latency_s)


def test_a_host_that_locks_no_memory_is_rated_as_it_was_detected(monkeypatch):
    def measure(device):
        raise RunError("the host does not lock 1 GiB in place")

    monkeypatch.setattr(host_rates, "measure_host_bandwidth", measure)
    cluster = find_cluster("1xh200")
    assert with_measured_host(cluster, torch.device("cuda")) is cluster
