"""What a host does per second while everything that training from its memory needs is at work.

Copies to a GPU, copies from it and updates of parameters share one memory: each is slower beside
the others than alone, by how much differs from machine to machine (of 49.5 GB/s to an H200 alone
42.5 were left, of updates at 112 GB/s 73), and which of them is the slowest decides how blocks are
best shared out between host and device. So all three are measured at once, for a third of a second.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from hocket.hardware.cluster import Cluster
from hocket.hardware.host_route import HostRoute, host_route, with_host_route
from hocket.runtime.memory.copies import DONE, CopyEngines, host_buffer
from hocket.runtime.memory.one_pass import update_rounded
from hocket.runtime.memory.updates import threads_for_updates

_COPY_BYTES = 2**26
_NUM_COPIES = 192
"""In each direction."""
_NUM_NUMBERS = 2**24
"""That an update changes: more bytes than caches hold."""
_BYTES_PER_NUMBER = 28


def rated_here(cluster: Cluster, device: torch.device) -> Cluster:
    """This machine's cluster with the rates of its host as they are beside each other; as it is
    where there is no GPU."""
    if device.type != "cuda":
        return cluster
    first = cluster.devices[0]
    in_bps, out_bps, update_bps = measure_host_rates(device)
    latency_s = host_route(cluster, first).latency_s
    route = HostRoute(out_bps=out_bps, in_bps=in_bps, latency_s=latency_s)
    return replace(with_host_route(cluster, first, route), host_update_bps=update_bps)


@functools.cache
def measure_host_rates(device: torch.device) -> tuple[float, float, float]:
    """Bytes per second to the device, from it, and of updates, all at once, to two digits: more
    would be noise. Measured once in a process, so that what is planned twice is planned alike."""
    is_real = device.type == "cuda"
    engines = CopyEngines(device, is_real=is_real)
    here = [host_buffer(_COPY_BYTES, pinned=is_real) for _ in range(2)]
    there = [torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    with threads_for_updates():
        update, num_updates = _update_of(_NUM_NUMBERS), 0
        began_s = time.perf_counter()
        coming = [engines.fetch([(there[0], here[0])], DONE) for _ in range(_NUM_COPIES)]
        leaving = [engines.send([(here[1], there[1])]) for _ in range(_NUM_COPIES)]
        while not num_updates or not (coming[-1].is_done or leaving[-1].is_done):
            update()
            num_updates += 1
        took_s = time.perf_counter() - began_s
        copied = [sum(ticket.is_done for ticket in tickets) for tickets in (coming, leaving)]
    coming[-1].synchronize()
    leaving[-1].synchronize()
    in_bps, out_bps = (_rate(max(1, count) * _COPY_BYTES, took_s) for count in copied)
    return in_bps, out_bps, _rate(num_updates * _BYTES_PER_NUMBER * _NUM_NUMBERS, took_s)


def _rate(num_bytes: int, took_s: float) -> float:
    return float(f"{num_bytes / took_s:.2g}")


def _update_of(num_numbers: int) -> Callable[[], object]:
    """A step of AdamW on the host, as blocks at home there are updated."""
    parameter = nn.Parameter(torch.zeros(num_numbers))
    parameter.grad = torch.ones(num_numbers)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    gradient = torch.ones(num_numbers, dtype=torch.bfloat16)
    one_pass = functools.partial(
        update_rounded, optimizer.param_groups[0], optimizer.state[parameter], parameter, gradient,
        torch.empty_like(gradient),
    )  # fmt: skip
    return one_pass if one_pass() else optimizer.step
