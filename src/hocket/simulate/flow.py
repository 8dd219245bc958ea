"""Transfers that share channels, each channel divided equally among those that flow on it.

Transfers over the same channels always flow at the same rate, so each such route keeps one clock of
work done per transfer: a transfer ends when the clock shows what it showed at its start plus the
work. A change of rates then touches routes, not transfers.
O(log transfers + routes that share a channel · (path + log routes)) per start or end.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.kernels import kernel
from hocket.kernels.heaps import mark, pop, push
from hocket.simulate.instructions import RouteTable
from hocket.simulate.state import Flow


@kernel
def _count(flow: Flow, routes: RouteTable, route: int, change: int | np.int64) -> None:
    """Count one transfer more or less on each channel of a route."""
    flow.is_stale[route] = True
    for index in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        flow.num_on[routes.path[index]] += change
        mark(flow.changed, routes.path[index])


@kernel
def _activate(flow: Flow, routes: RouteTable, route: int) -> None:
    """Enter a route at the channels that it crosses."""
    for hop in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        channel = routes.path[hop]
        at = routes.on_ptr[channel] + flow.num_active[channel]
        flow.active[at] = hop
        flow.position[hop] = at
        flow.num_active[channel] += 1


@kernel
def _deactivate(flow: Flow, routes: RouteTable, route: int) -> None:
    """Strike a route out at the channels that it crosses; the last entry takes its position."""
    for hop in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        channel, at = routes.path[hop], flow.position[hop]
        flow.num_active[channel] -= 1
        last = flow.active[routes.on_ptr[channel] + flow.num_active[channel]]
        flow.active[at] = last
        flow.position[last] = at


@kernel
def begin_flow(
    flow: Flow, routes: RouteTable, route: int, transfer: int, work: float, now: float
) -> None:
    """A transfer begins to flow."""
    if flow.heaps.size[route] == 0:
        flow.clock[route], flow.rate[route], flow.since_s[route] = 0.0, 0.0, now
        _activate(flow, routes, route)
    clock = flow.clock[route] + flow.rate[route] * (now - flow.since_s[route])
    push(flow.heaps, route, clock + work, transfer)
    _count(flow, routes, route, np.int64(1))


@kernel
def end_flow(flow: Flow, routes: RouteTable, route: int) -> int:
    """Take the transfer of a route that ends first."""
    transfer = pop(flow.heaps, route)
    _count(flow, routes, route, np.int64(-1))
    if flow.heaps.size[route] == 0:
        _deactivate(flow, routes, route)
    return transfer


@kernel
def flow_end_s(flow: Flow, route: int) -> float:
    """When the next transfer of a route ends at the present rate."""
    left = flow.heaps.key[flow.heaps.ptr[route]] - flow.clock[route]
    end_s: float = flow.since_s[route] + left / flow.rate[route]
    return end_s


@kernel
def set_next(next_s: FloatArray, route: int, time_s: float) -> None:
    """Set the time of the next end on a route."""
    at = (len(next_s) >> 1) + route
    next_s[at] = time_s
    while at > 1:
        at >>= 1
        smaller = min(next_s[2 * at], next_s[2 * at + 1])
        if next_s[at] == smaller:
            break
        next_s[at] = smaller


@kernel
def next_route(next_s: FloatArray) -> int:
    """The lowest route among those with the next end."""
    at, num_leaves = 1, len(next_s) >> 1
    while at < num_leaves:
        at = 2 * at if next_s[2 * at] == next_s[at] else 2 * at + 1
    return at - num_leaves


@kernel
def _set_rate(flow: Flow, routes: RouteTable, route: int, now: float) -> None:
    rate = np.inf
    for index in range(routes.path_ptr[route], routes.path_ptr[route + 1]):
        rate = min(rate, flow.share[routes.path[index]])
    if rate != flow.rate[route]:
        flow.clock[route] += flow.rate[route] * (now - flow.since_s[route])
        flow.since_s[route] = now
        flow.rate[route] = rate
    elif not flow.is_stale[route]:
        return
    flow.is_stale[route] = False
    set_next(flow.next_s, route, max(now, flow_end_s(flow, route)))


@kernel
def share_channels(flow: Flow, routes: RouteTable, now: float) -> None:
    """Divide each channel among the transfers that flow on it, where their number changed."""
    for index in range(flow.changed.size[0]):
        channel = flow.changed.item[index]
        flow.changed.has[channel] = False
        flow.share[channel] = routes.capacity[channel] / flow.num_on[channel]
    for index in range(flow.changed.size[0]):
        channel = flow.changed.item[index]
        first = routes.on_ptr[channel]
        for at in range(first, first + flow.num_active[channel]):
            _set_rate(flow, routes, routes.hop_route[flow.active[at]], now)
    flow.changed.size[0] = 0
