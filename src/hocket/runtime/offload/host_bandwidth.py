"""What a host does per second in steps that train from its memory.

Copies to a GPU, copies from it and updates of parameters share one memory: each is slower beside
the others than alone, by how much differs from machine to machine (of 49.5 GB/s to an H200 alone
42.5 were left, of updates at 112 GB/s 73), and which of them is the slowest decides how blocks are
best shared out between host and device. So all three are measured at once: one parameter is updated
after the other, out of more memory than caches hold. In a step each of them rests for a part of the
time: copies are measured without updates, too, and updates without copies, and all are rated below
the middle of both (`_SPARED`, `_SPARED_COPIES`): on hosts of H200s that came to 59 GB/s of updates
beside copies that never rest, steps did 77 and 87.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from hocket.base.errors import RunError
from hocket.hardware.cluster import Cluster
from hocket.hardware.detect import available_bytes
from hocket.hardware.host_route import HostRoute, host_route, with_host_route
from hocket.runtime.offload.copy_streams import CopyEngines, Ticket, host_buffer
from hocket.runtime.offload.host_adam import update_rounded
from hocket.runtime.offload.host_optimizer import threads_for_updates

_COPY_BYTES = 2**26
_NUM_WAITING = 64
"""Copies of each direction that are asked for ahead: an update takes as long as many."""
_NUM_ROOMS = 8
"""That copies take turns in on the host, as caches would hold one."""
_NUM_NUMBERS = 2**25
"""Of a parameter."""
_NUM_PARAMETERS = 8
_NUM_PASSES, _ENOUGH_S = 6, 1.0
"""Over all parameters, after one that is not counted; no more are begun after so long."""
_BYTES_HELD, _BYTES_TOUCHED = 16, 28
"""For each number."""
_SPARED = 0.85
"""Of what updates do in the middle, what they are rated at: a step waits where a host was rated
too high, and only copies more where it was rated too low. Simulated for 4.2 B parameters within
8 GiB (``benchmarks/memory/host_ratings.py``): planned for 85 GB/s where there are 60, a step takes
18 % longer than it could, planned for 65 where there are 90 it takes 6 % longer."""
_SPARED_COPIES = 0.95
"""The same of copies, whose rates differ less from step to step."""
_COPIES_ALONE_S = 0.3
_PART_OF_FREE = 4
"""Of the host's free memory at most one in so many bytes is taken."""


class HostRates(NamedTuple):
    """Bytes per second, as they are in a step."""

    in_bps: float
    out_bps: float
    update_bps: float


def rated_here(cluster: Cluster, device: torch.device) -> Cluster:
    """This machine's cluster with the rates of its host as they are in a step; as it is
    where there is no GPU, or no room to measure: such a plan may need none of them."""
    if device.type != "cuda":
        return cluster
    try:
        first, rates = cluster.devices[0], measure_host_rates(device)
    except (RunError, torch.OutOfMemoryError):
        return cluster
    latency_s = host_route(cluster, first).latency_s
    route = HostRoute(out_bps=rates.out_bps, in_bps=rates.in_bps, latency_s=latency_s)
    return replace(with_host_route(cluster, first, route), host_update_bps=rates.update_bps)


@functools.cache
def measure_host_rates(device: torch.device) -> HostRates:
    """Rates to two digits: more would be noise. Measured once in a process, so that what is planned
    twice is planned alike."""
    count = min(_NUM_PARAMETERS, available_bytes() // (_PART_OF_FREE * _BYTES_HELD * _NUM_NUMBERS))
    with threads_for_updates():
        updates = [_update_of(_NUM_NUMBERS) for _ in range(max(1, count))]
        copies = _Copies(device)
        _rounds(updates, copies.ask, num_passes=1)
        mark = copies.mark()
        updates_beside_bps = _rounds(updates, copies.ask, _NUM_PASSES)
        beside, mark = copies.rates_since(mark), copies.mark()
        copies.go_on()
        alone = copies.rates_since(mark)
        copies.wait()
        updates_alone_bps = _rounds(updates, lambda: None, _NUM_PASSES)
    update_bps = _SPARED * (updates_beside_bps + updates_alone_bps) / 2
    in_bps, out_bps = (
        _SPARED_COPIES * (one + other) / 2 for one, other in zip(beside, alone, strict=True)
    )
    return HostRates(*(_two_digits(bps) for bps in (in_bps, out_bps, update_bps)))


def _rounds(
    updates: Sequence[Callable[[], object]], ask: Callable[[], None], num_passes: int
) -> float:
    """Bytes per second that the slower half of updates touches, of some passes over all."""
    began_s, taken_s = time.perf_counter(), list[float]()
    for _ in range(num_passes):
        for update in updates:
            ask()
            start_s = time.perf_counter()
            update()
            taken_s.append(time.perf_counter() - start_s)
        if time.perf_counter() - began_s > _ENOUGH_S:
            break
    slower_s = sorted(taken_s)[len(taken_s) // 2 :]
    return _BYTES_TOUCHED * _NUM_NUMBERS * len(slower_s) / sum(slower_s)


class _Mark(NamedTuple):
    """Where copies stood at a time."""

    num_done: tuple[int, int]
    """To the device, and from it."""
    at_s: float


class _Copies:
    """Copies both ways that never end."""

    def __init__(self, device: torch.device) -> None:
        is_real = device.type == "cuda"
        self._engines = CopyEngines(device, is_real=is_real)
        self._here = host_buffer(2 * _NUM_ROOMS * _COPY_BYTES, pinned=is_real).view(2, -1)
        self._there = torch.empty((2, _COPY_BYTES), dtype=torch.uint8, device=device)
        self._asked: tuple[list[Ticket], list[Ticket]] = ([], [])

    def ask(self) -> None:
        """Have so many ahead."""
        coming, leaving = self._asked
        for tickets, copy in ((coming, self._fetch), (leaving, self._send)):
            while sum(not ticket.is_done for ticket in tickets[-_NUM_WAITING:]) < _NUM_WAITING:
                room = len(tickets) % _NUM_ROOMS
                tickets.append(copy(slice(room * _COPY_BYTES, (room + 1) * _COPY_BYTES)))
                if tickets[-1].is_done:
                    break

    def go_on(self) -> None:
        """With nothing beside them, for a while."""
        until_s = time.perf_counter() + _COPIES_ALONE_S
        while time.perf_counter() < until_s:
            self.ask()
            time.sleep(_COPIES_ALONE_S / 100)

    def mark(self) -> _Mark:
        """Where they stand."""
        coming, leaving = (sum(each.is_done for each in tickets) for tickets in self._asked)
        return _Mark((coming, leaving), time.perf_counter())

    def rates_since(self, before: _Mark) -> list[float]:
        """Bytes per second to the device, and from it."""
        now = self.mark()
        return [
            max(1, last - first) * _COPY_BYTES / (now.at_s - before.at_s)
            for last, first in zip(now.num_done, before.num_done, strict=True)
        ]

    def _fetch(self, room: slice) -> Ticket:
        return self._engines.fetch([(self._there[0], self._here[0, room])])

    def _send(self, room: slice) -> Ticket:
        return self._engines.send([(self._here[1, room], self._there[1])])

    def wait(self) -> None:
        """Until all have come."""
        for tickets in self._asked:
            tickets[-1].synchronize()


def _two_digits(number: float) -> float:
    return float(f"{number:.2g}")


def _update_of(num_numbers: int) -> Callable[[], object]:
    """A step of AdamW on the host, as parameters at home there are updated."""
    parameter = nn.Parameter(torch.zeros(num_numbers))
    parameter.grad = torch.ones(num_numbers)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    gradient = torch.ones(num_numbers, dtype=torch.bfloat16)
    one_pass = functools.partial(
        update_rounded, optimizer.param_groups[0], optimizer.state[parameter], parameter, gradient,
        torch.empty_like(gradient),
    )  # fmt: skip
    if not one_pass():
        return optimizer.step
    parameter.grad = None
    return one_pass
