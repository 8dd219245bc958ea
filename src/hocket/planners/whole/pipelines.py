"""Where to cut the model into stages for unequal devices, by a dynamic program over places.

The best cut for devices in a given order makes the slowest stage (or the slowest link between two)
as quick as possible, with room for what its passes in flight keep (PipeDream's partition,
Narayanan et al. 2019, for unequal devices and with memory). best[s][j], the least bottleneck of the
first j places on the first s devices, is the minimum over i of max(best[s-1][i], stage(i, j)).
O(stages x places²), numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.planners.whole.tables import Tables, at_size, block_edges, peak_bytes


@dataclass(frozen=True)
class StageCut:
    """Stages for one size of microbatch."""

    size: int
    places: tuple[int, ...]
    """The op with which each stage but the first begins."""
    slowest_s: float
    """Seconds per microbatch of the slowest stage or link."""
    through_s: float
    """Seconds of one microbatch through all stages and back."""


def best_cut(tables: Tables, devices: tuple[int, ...], size: int) -> StageCut | None:
    """Stages on devices in their order; None where memory does not suffice for any."""
    places = tables.cuts
    best = np.full(len(places), np.inf)
    best[0] = 0.0
    choices = []
    link_s = _links_s(tables, devices, size)
    for stage, device in enumerate(devices):
        cost = _stage_s(tables, device, size, in_flight=len(devices) - stage)
        if stage:
            cost = np.maximum(cost, link_s[stage - 1][:, None])
        through = np.maximum(best[:, None], cost)
        choice = through.argmin(axis=0)
        choices.append(choice)
        best = through[choice, np.arange(len(places))]
    if not np.isfinite(best[-1]):
        return None
    at, found = len(places) - 1, []
    for choice in reversed(choices):
        at = int(choice[at])
        found.append(int(places[at]))
    cut = tuple(reversed(found[:-1]))
    return StageCut(size, cut, float(best[-1]), _through_s(tables, devices, size, cut))


def _stage_s(tables: Tables, device: int, size: int, in_flight: int) -> FloatArray:
    """[first place, place after the last]: seconds per microbatch; infinite where not possible."""
    places = tables.cuts
    before_s = tables.stage_s(device, size)[places]
    seconds: FloatArray = before_s[None, :] - before_s[:, None]
    state = tables.state_bytes[places].astype(np.float64)
    saved = at_size(tables, tables.saved_bytes, size)[places]
    held = (state[None, :] - state[:, None]) + in_flight * (saved[None, :] - saved[:, None])
    passing = max(0.0, _transient_bytes(tables, device, size))
    usable = float(tables.problem.memory_bytes[device])
    # Where too much is held, blocks are recomputed and updates done on the host.
    least = _eased_bytes(tables, size, in_flight)
    again = 1 + tables.forward_part(device, size)
    eased_s = np.where(least + passing > usable, np.inf, seconds * again)
    seconds = np.where(held + passing > usable, eased_s, seconds)
    seconds[places[None, :] <= places[:, None]] = np.inf
    return seconds


def _eased_bytes(tables: Tables, size: int, in_flight: int) -> FloatArray:
    """[first place, place after the last]: what a stage holds at least."""
    places, edges = tables.cuts, np.array(block_edges(tables.problem.graph))
    state = (tables.state_bytes - tables.optimizer_bytes)[places].astype(np.float64)
    inputs = at_size(tables, tables.crossing_bytes, size)[edges]
    kept_inputs = np.append(0.0, np.cumsum(inputs))[np.searchsorted(edges, places)]
    saved = at_size(tables, tables.saved_bytes, size)
    largest = float(np.diff(saved[edges]).max(initial=0.0))
    held = (state[None, :] - state[:, None]) + largest
    found: FloatArray = held + in_flight * (kept_inputs[None, :] - kept_inputs[:, None])
    return found


def _transient_bytes(tables: Tables, device: int, size: int) -> float:
    """What a pass holds besides state and saved activations, as one device alone has it."""
    alone = peak_bytes(tables.problem, tables.twin(device), size, True)
    saved = float(at_size(tables, tables.saved_bytes, size)[-1])
    return alone - float(tables.state_bytes[-1]) - saved


def _links_s(tables: Tables, devices: tuple[int, ...], size: int) -> list[FloatArray]:
    """Per boundary and place, the seconds that a microbatch takes over the link, one way."""
    routes = tables.problem.costs.routes
    crossing = at_size(tables, tables.crossing_bytes, size)[tables.cuts]
    return [
        crossing / float(routes.bandwidth_bps[src, dst]) + float(routes.latency_s[src, dst])
        for src, dst in pairwise(devices)
    ]


def _through_s(tables: Tables, devices: tuple[int, ...], size: int, cut: tuple[int, ...]) -> float:
    bounds = (0, *cut, tables.problem.graph.num_ops)
    routes, total = tables.problem.costs.routes, 0.0
    crossing = at_size(tables, tables.crossing_bytes, size)
    for stage, device in enumerate(devices):
        before_s = tables.stage_s(device, size)
        total += float(before_s[bounds[stage + 1]] - before_s[bounds[stage]])
        if stage:
            src = devices[stage - 1]
            bandwidth = float(routes.bandwidth_bps[src, device])
            total += 2 * float(crossing[bounds[stage]]) / bandwidth
    return total
