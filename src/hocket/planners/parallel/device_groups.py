"""Time of one model replica, on one device or on a pipeline, for any number of samples.

A single device runs its samples in as few microbatches as its memory allows. For a pipeline, the
model is cut for every microbatch size, and the best size is chosen for each number of samples: time
= through + (microbatches - 1) x slowest (the form of Alpa and of 1F1B with unequal stages). Samples
are distributed so that the slowest group is as fast as possible, by a search for the shortest time
in which the groups together can process the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.base.parts import even_parts
from hocket.plan.sections import Replica
from hocket.planners.parallel.closed_form import (
    Relief,
    Tables,
    at_size,
    block_edges,
    host_update_s,
    largest_size,
    peak_bytes,
)

# Where to cut the model into stages for unequal devices, by a dynamic program over places.
#
# The best cut for devices in a given order makes the slowest stage (or the slowest link between
# two) as quick as possible, with memory for what its passes in flight save (PipeDream's partition,
# Narayanan et al. 2019, for unequal devices and with memory). best[s][j], the least bottleneck of
# the first j places on the first s devices, is the minimum over i of max(best[s-1][i], stage(i,
# j)). O(stages x places²), numpy.


@dataclass(frozen=True)
class StageCut:
    """Stages of a pipeline for one microbatch size."""

    size: int
    places: tuple[int, ...]
    """First op of each stage but the first."""
    slowest_s: float
    """Seconds per microbatch of the slowest stage or link."""
    through_s: float
    """Seconds of one microbatch through all stages forward and backward."""


class StageLink(NamedTuple):
    """The link from one stage's device to the next."""

    bandwidth_bps: float
    latency_s: float


def best_cut(
    tables: Tables, devices: tuple[int, ...], links: tuple[StageLink, ...], size: int
) -> StageCut | None:
    """Cut the model into stages on devices in the given order; None if no cut fits into memory."""
    places = tables.cuts
    best = np.full(len(places), np.inf)
    best[0] = 0.0
    choices = []
    crossing = at_size(tables, tables.crossing_bytes, size)[places]
    link_s = [crossing / link.bandwidth_bps + link.latency_s for link in links]
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
    # Walk the choices backward from the last stage.
    at, found = len(places) - 1, []
    for choice in reversed(choices):
        at = int(choice[at])
        found.append(int(places[at]))
    cut = tuple(reversed(found[:-1]))
    return StageCut(size, cut, float(best[-1]), _through_s(tables, devices, links, size, cut))


def _stage_s(tables: Tables, device: int, size: int, in_flight: int) -> FloatArray:
    """[first place, end place]: seconds per microbatch of a stage; infinite if it is impossible."""
    places = tables.cuts
    before_s = tables.stage_s(device, size)[places]
    seconds: FloatArray = before_s[None, :] - before_s[:, None]
    state = tables.state_bytes[places].astype(np.float64)
    saved = at_size(tables, tables.saved_bytes, size)[places]
    held = (state[None, :] - state[:, None]) + in_flight * (saved[None, :] - saved[:, None])
    passing = max(0.0, _transient_bytes(tables, device, size))
    usable = float(tables.problem.memory_bytes[device])
    # If a stage holds too much, its blocks are recomputed and its updates done on the host.
    least = _eased_bytes(tables, size, in_flight)
    recompute = 1 + tables.forward_part(device, size)
    eased_s = np.where(least + passing > usable, np.inf, seconds * recompute)
    seconds = np.where(held + passing > usable, eased_s, seconds)
    # A stage must contain at least one place.
    seconds[places[None, :] <= places[:, None]] = np.inf
    return seconds


def _eased_bytes(tables: Tables, size: int, in_flight: int) -> FloatArray:
    """[first place, end place]: fewest bytes of a stage, with recomputation and host updates."""
    places, edges = tables.cuts, np.array(block_edges(tables.problem.graph))
    state = (tables.state_bytes - tables.optimizer_bytes)[places].astype(np.float64)
    inputs = at_size(tables, tables.crossing_bytes, size)[edges]
    kept_inputs = np.append(0.0, np.cumsum(inputs))[np.searchsorted(edges, places)]
    saved = at_size(tables, tables.saved_bytes, size)
    largest = float(np.diff(saved[edges]).max(initial=0.0))
    # Recompute holds all activations of one block at a time: the largest counts.
    held = (state[None, :] - state[:, None]) + largest
    found: FloatArray = held + in_flight * (kept_inputs[None, :] - kept_inputs[:, None])
    return found


def _transient_bytes(tables: Tables, device: int, size: int) -> float:
    """Peak bytes beyond state and saved activations, from a simulation of one device."""
    alone = peak_bytes(tables.problem, tables.twin(device), size, True)
    saved = float(at_size(tables, tables.saved_bytes, size)[-1])
    return alone - float(tables.state_bytes[-1]) - saved


def _through_s(
    tables: Tables,
    devices: tuple[int, ...],
    links: tuple[StageLink, ...],
    size: int,
    cut: tuple[int, ...],
) -> float:
    """Seconds of one microbatch through all stages forward and backward, with its transfers."""
    bounds = (0, *cut, tables.problem.graph.num_ops)
    crossing, total = at_size(tables, tables.crossing_bytes, size), 0.0
    for stage, device in enumerate(devices):
        before_s = tables.stage_s(device, size)
        total += float(before_s[bounds[stage + 1]] - before_s[bounds[stage]])
    for link, place in zip(links, cut, strict=True):
        # Forward activations and backward gradients cross the link.
        total += 2 * float(crossing[place]) / link.bandwidth_bps
    return total


_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Microbatch sizes that are tried for pipelines."""
_MOST_MICROBATCHES = 64


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Devices in the order of their stages, with the closed form of their time."""

    devices: tuple[int, ...]
    time_s: FloatArray
    """[samples]: seconds including updates; infinite if that many samples are impossible."""
    size: LongArray
    """[samples]: largest microbatch."""
    cuts: dict[int, StageCut]
    """Stages by microbatch size; empty for one device."""
    is_hosted: BoolArray | None = None
    """[samples]: True if the optimizer runs on the host; None if it never does."""

    def replica(self, tables: Tables, num_samples: int) -> Replica:
        """The group as a replica that processes ``num_samples`` samples."""
        names = tables.problem.cluster.device_names
        size = int(self.size[num_samples])
        cut = self.cuts.get(size)
        is_hosted = self.is_hosted is not None and bool(self.is_hosted[num_samples])
        return Replica(
            devices=tuple(names[device] for device in self.devices),
            microbatches=even_sizes(num_samples, size),
            cuts=() if cut is None else cut.places,
            update="host" if is_hosted else "device",
        )


def even_sizes(num_samples: int, largest: int) -> tuple[int, ...]:
    """Sizes of the fewest microbatches of at most ``largest`` samples, as equal as possible."""
    return even_parts(num_samples, -(-num_samples // largest))


def group_of(tables: Tables, devices: tuple[int, ...], exchanges: bool) -> DeviceGroup:
    """Closed form of a group; ``exchanges`` is True if other groups hold the model too.

    Groups of equal devices on equal links use one cached closed form, so thousands of groups cost
    as much as one.
    """
    alike = tuple(tables.alike[device] for device in devices)
    if len(devices) == 1:
        return replace(_alone(tables, alike[0], exchanges), devices=devices)
    routes = tables.problem.costs.routes
    links = tuple(
        StageLink(float(routes.bandwidth_bps[pair]), float(routes.latency_s[pair]))
        for pair in pairwise(devices)
    )
    return replace(_pipeline(tables, alike, links), devices=devices)


@lru_cache(maxsize=1024)
def _alone(tables: Tables, device: int, exchanges: bool) -> DeviceGroup:
    plain = _on_one(tables, device, exchanges, "none")
    if np.isfinite(plain.time_s).all() and int(plain.size[-1]) == tables.num_samples:
        return plain
    options = [plain, *(_on_one(tables, device, exchanges, relief) for relief in ("host", "all"))]
    time_s = np.stack([candidate.time_s for candidate in options])
    best = time_s.argmin(axis=0)
    size = np.choose(best, [candidate.size for candidate in options])
    # More samples never take less time, which the binary search over samples relies on.
    least_s = np.maximum.accumulate(time_s.min(axis=0))
    # For sizes that need recompute, the simulator finds out how many blocks suffice.
    return DeviceGroup((device,), least_s, size, {}, best == 1)


def _on_one(tables: Tables, device: int, exchanges: bool, relief: Relief) -> DeviceGroup:
    """Time of one device with one way to save memory: none, host updates, or recomputation too."""
    spare = tables.largest_bucket_bytes if exchanges else 0
    largest = partial(largest_size, tables, device, spare_bytes=spare, relief=relief)
    once = largest(is_repeated=False)
    often = largest(is_repeated=True) if once else 0
    row, pass_s = tables.row(device), tables.pass_s(device)
    if relief == "all":
        pass_s = pass_s + tables.forward_pass_s(device)
    numbers = np.arange(tables.num_samples + 1)
    counts = np.where(numbers <= once, 1, -(-numbers // max(often, 1)))
    share, rest = np.divmod(numbers, np.maximum(counts, 1))
    # Some microbatches have one sample more than the others.
    more = np.minimum(share + 1, tables.num_samples)
    seconds = (counts - rest) * pass_s[share] + rest * pass_s[more]
    seconds += np.maximum(counts - 1, 0) * tables.accumulate_s[row] + tables.update_s[row, -1]
    if relief != "none":
        seconds += host_update_s(tables, device)
    seconds[(numbers > once) & (often == 0)] = np.inf
    if once == 0:
        seconds[:] = np.inf
    seconds[0] = 0.0
    sizes = np.where(numbers <= once, numbers, -(-numbers // np.maximum(counts, 1)))
    return DeviceGroup((device,), np.maximum.accumulate(seconds), np.maximum(sizes, 1), {})


@lru_cache(maxsize=1024)
def _pipeline(
    tables: Tables, devices: tuple[int, ...], links: tuple[StageLink, ...]
) -> DeviceGroup:
    numbers = np.arange(tables.num_samples + 1)
    best = np.full(len(numbers), np.inf)
    size = np.ones(len(numbers), dtype=np.int64)
    cuts: dict[int, StageCut] = {}
    for tried in _SIZES:
        if tried > tables.num_samples:
            break
        cut = best_cut(tables, devices, links, tried)
        if cut is None:
            continue
        cuts[tried] = cut
        counts = -(-numbers // tried)
        added = [float(tables.accumulate_s[tables.row(d)]) for d in devices]
        seconds = cut.through_s + (counts - 1) * (cut.slowest_s + max(added) / len(devices))
        # Updates of the stages run at the same time, each on its part of the parameters.
        seconds += max(float(tables.update_s[tables.row(d), -1]) for d in devices) / len(devices)
        better = (seconds < best) & (counts <= _MOST_MICROBATCHES)
        best, size = np.where(better, seconds, best), np.where(better, tried, size)
    best[0] = 0.0
    return DeviceGroup(devices, np.maximum.accumulate(best), size, cuts)


def split_batch(groups: tuple[DeviceGroup, ...], num_samples: int) -> tuple[int, ...] | None:
    """Samples per group that minimize the slowest group's time; None if not all samples fit."""
    # Equal groups share one array.
    distinct = {id(group.time_s): group.time_s for group in groups}.values()
    # The shortest time in which all samples fit is one of the groups' times.
    times = np.unique(np.concatenate(list(distinct)))
    times = times[np.isfinite(times)]
    low, high = 0, len(times) - 1
    if _taken(groups, float(times[high])).sum() < num_samples:
        return None
    while low < high:
        middle = (low + high) // 2
        if _taken(groups, float(times[middle])).sum() >= num_samples:
            high = middle
        else:
            low = middle + 1
    taken = _taken(groups, float(times[low]))
    # Too many samples fit in that time: remove them where they take longest.
    while taken.sum() > num_samples:
        last = [float(g.time_s[n]) if n else -1.0 for g, n in zip(groups, taken, strict=True)]
        taken[int(np.argmax(last))] -= 1
    return tuple(int(n) for n in taken)


def _taken(groups: tuple[DeviceGroup, ...], seconds: float) -> LongArray:
    """Number of samples that each group can process in ``seconds``."""
    known: dict[int, int] = {}
    for group in groups:
        if id(group.time_s) not in known:
            number = np.searchsorted(group.time_s, seconds, side="right")
            known[id(group.time_s)] = int(number) - 1
    return np.array([known[id(group.time_s)] for group in groups], dtype=np.int64)
