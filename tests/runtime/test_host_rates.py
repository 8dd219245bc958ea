"""Rates of a host with all that training from its memory needs at work."""

import pytest
import torch
from runtime.budget_loops import CPU

from hocket.api import find_cluster
from hocket.hardware.host_route import host_route
from hocket.runtime.memory import host_rates
from hocket.runtime.memory.host_rates import measure_host_rates, rated_here


def test_rates_are_what_was_done_over_the_time_that_it_took(monkeypatch):
    """A clock that stands still but for updates, which take a second; copies are done at once."""
    now, took = [0.0], []
    monkeypatch.setattr(host_rates.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(host_rates, "_COPY_BYTES", 1000)
    monkeypatch.setattr(host_rates, "_NUM_COPIES", 3)

    def update():
        now[0] += 1
        took.append(torch.get_num_threads())

    monkeypatch.setattr(host_rates, "_update_of", lambda num_numbers: update)
    before = torch.get_num_threads()
    measure_host_rates.cache_clear()
    monkeypatch.setattr(host_rates, "_NUM_NUMBERS", 100)
    assert measure_host_rates(CPU) == (3000, 3000, 2800)
    measure_host_rates.cache_clear()
    assert took == [max(1, before - 1)]
    assert torch.get_num_threads() == before


def test_an_update_is_made_as_blocks_at_home_are_updated():
    update = host_rates._update_of(2**10)
    assert update() in (True, None)


def test_plans_for_this_machine_go_by_them(monkeypatch):
    monkeypatch.setattr(host_rates, "measure_host_rates", lambda device: (40e9, 50e9, 70e9))
    cluster = find_cluster("1xh200")
    assert rated_here(cluster, CPU) is cluster
    found = rated_here(cluster, torch.device("cuda"))
    route = host_route(found, found.devices[0])
    assert (route.in_bps, route.out_bps, found.host_update_bps) == (40e9, 50e9, 70e9)
    assert route.latency_s == pytest.approx(host_route(cluster, cluster.devices[0]).latency_s)
