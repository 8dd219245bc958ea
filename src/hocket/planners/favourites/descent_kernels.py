"""Rounds of the descent on the soft longest path, compiled; what they do stands in `descent`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.kernels import kernel
from hocket.planners.favourites.match_kernels import match_heaviest
from hocket.planners.favourites.net import ReaderPairs

_FAR = 30.0
"""Temperatures by which a path must be shorter to get no flow: its share would be below 1e-13."""
_NO_FLOW = 1e-9
"""Flow through an op below which what leads there is left alone."""


class Descent(NamedTuple):
    """What the rounds write."""

    favour: FloatArray
    """Per edge: how much the reader is the producer's favourite; at most 1 in all at either end."""
    weight: FloatArray
    """Per edge: its share in the longest path of its reader, then seconds that a favour saves."""
    start_s: FloatArray
    """Per op: soft longest path to its start."""
    flow: FloatArray
    """Per op: the part of the long paths that run through it."""
    chosen: IntArray
    """Per op: the matched edge that begins there, or -1."""
    taken: IntArray
    """Per op: the matched edge that ends there, or -1."""


@kernel
def _spread(net: ReaderPairs, descent: Descent, temperature_s: float) -> float:
    """Soft longest paths to every op, and the share of each edge in that of its reader."""
    start_s, share = descent.start_s, descent.weight
    longest_s = 0.0
    for op in range(len(net.op_s)):
        first, stop = net.in_ptr[op], net.in_ptr[op + 1]
        latest_s = 0.0
        for edge in range(first, stop):
            src = net.src[edge]
            sent_s = net.cost_s[edge] * (1.0 - descent.favour[edge])
            share[edge] = start_s[src] + net.op_s[src] + sent_s
            latest_s = max(latest_s, share[edge])
        total = 0.0
        for edge in range(first, stop):
            below = (share[edge] - latest_s) / temperature_s
            share[edge] = np.exp(below) if below > -_FAR else 0.0
            total += share[edge]
        for edge in range(first, stop):
            share[edge] /= total
        start_s[op] = latest_s + temperature_s * np.log(total) if total > 1.0 else latest_s
        longest_s = max(longest_s, start_s[op] + net.op_s[op])
    return longest_s


@kernel
def _flow_into_ends(
    net: ReaderPairs, descent: Descent, longest_s: float, temperature_s: float
) -> None:
    """Divide one unit of flow among the ops that nobody reads from."""
    flow, total = descent.flow, 0.0
    for op in range(len(net.op_s)):
        flow[op] = 0.0
        if net.out_ptr[op] == net.out_ptr[op + 1]:
            below = (descent.start_s[op] + net.op_s[op] - longest_s) / temperature_s
            flow[op] = np.exp(below) if below > -_FAR else 0.0
            total += flow[op]
    for op in range(len(net.op_s)):
        flow[op] /= total


@kernel
def _flow_back(net: ReaderPairs, descent: Descent) -> float:
    """Turn shares into the seconds that favours would save; returns the mean edges of a path."""
    flow, weight = descent.flow, descent.weight
    num_edges = 0.0
    for op in range(len(net.op_s) - 1, -1, -1):
        through = flow[op] if flow[op] > _NO_FLOW else 0.0
        for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
            part = through * weight[edge]
            flow[net.src[edge]] += part
            num_edges += part
            weight[edge] = part * net.cost_s[edge]
    return num_edges


@kernel
def _step(net: ReaderPairs, descent: Descent, step: float) -> None:
    """Move towards the matching, but only at the ops that it covers."""
    favour = descent.favour
    for op in range(len(net.op_s)):
        mine = descent.taken[op]
        for edge in range(net.in_ptr[op], net.in_ptr[op + 1]):
            if mine >= 0 or descent.chosen[net.src[edge]] >= 0:
                favour[edge] *= 1.0 - step
        if mine >= 0:
            favour[mine] += step


@kernel
def descend(
    net: ReaderPairs, descent: Descent, edge_s: float, temperatures: FloatArray, steps: FloatArray
) -> None:
    """One round per temperature, in mean lengths of an edge, and step.

    ``edge_s`` is a guess of that length, for the first round.
    """
    for index in range(len(temperatures)):
        temperature_s = temperatures[index] * edge_s
        longest_s = _spread(net, descent, temperature_s)
        if longest_s <= 0.0:
            return
        _flow_into_ends(net, descent, longest_s, temperature_s)
        edge_s = longest_s / max(_flow_back(net, descent), 1.0)
        match_heaviest(net, descent.weight, descent.chosen, descent.taken)
        _step(net, descent, steps[index])
