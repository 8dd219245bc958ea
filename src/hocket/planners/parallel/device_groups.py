"""A group of devices that hold the model once: what any number of samples takes there.

One device runs its samples in as few microbatches as its memory allows. Several are stages of a
pipeline, for which every size of microbatch is cut and the best taken for each number of samples:
time = through + (microbatches - 1) x slowest (the form of Alpa and of 1F1B with unequal stages).
Samples are shared out between groups so that the slowest group is as quick as possible: the least
time at which the numbers that each group can take by then add up to the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

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
    recompute = 1 + tables.forward_part(device, size)
    eased_s = np.where(least + passing > usable, np.inf, seconds * recompute)
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
    """Memory of a pass besides state and saved activations, as one device alone has it."""
    alone = peak_bytes(tables.problem, tables.twin(device), size, True)
    saved = float(at_size(tables, tables.saved_bytes, size)[-1])
    return alone - float(tables.state_bytes[-1]) - saved


def _links_s(tables: Tables, devices: tuple[int, ...], size: int) -> list[FloatArray]:
    """Per boundary and place, the seconds to send a microbatch over the link in one direction."""
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


_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Microbatches that pipelines are tried with."""
_MOST_MICROBATCHES = 64


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """Devices in the order of their stages, and the closed form of their time."""

    devices: tuple[int, ...]
    time_s: FloatArray
    """[samples]: seconds with updates; infinite where not possible."""
    size: LongArray
    """[samples]: of a microbatch, at most."""
    cuts: dict[int, StageCut]
    """By size of microbatch; empty for one device."""
    is_hosted: BoolArray | None = None
    """[samples]: whether the optimizer is on the host; nowhere by default."""

    def replica(self, tables: Tables, num_samples: int) -> Replica:
        """The group with its samples."""
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
    """As few microbatches of at most a size as it takes, alike but for one sample."""
    return even_parts(num_samples, -(-num_samples // largest))


@lru_cache(maxsize=4096)
def group_of(tables: Tables, devices: tuple[int, ...], exchanges: bool) -> DeviceGroup:
    """The closed form of a group; ``exchanges``: whether others hold the model besides."""
    if len(devices) == 1:
        return _alone(tables, devices[0], exchanges)
    return _pipeline(tables, devices)


def _alone(tables: Tables, device: int, exchanges: bool) -> DeviceGroup:
    plain = _on_one(tables, device, exchanges, "none")
    if np.isfinite(plain.time_s).all() and int(plain.size[-1]) == tables.num_samples:
        return plain
    options = [plain, *(_on_one(tables, device, exchanges, relief) for relief in ("host", "all"))]
    time_s = np.stack([candidate.time_s for candidate in options])
    best = time_s.argmin(axis=0)
    size = np.choose(best, [candidate.size for candidate in options])
    least_s = np.maximum.accumulate(time_s.min(axis=0))
    # Of what recomputes, the simulator will say how many blocks it takes and whether more.
    return DeviceGroup((device,), least_s, size, {}, best == 1)


def _on_one(tables: Tables, device: int, exchanges: bool, relief: Relief) -> DeviceGroup:
    """One device that keeps everything, or all but the optimizer's state, or recomputes besides."""
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


def _pipeline(tables: Tables, devices: tuple[int, ...]) -> DeviceGroup:
    numbers = np.arange(tables.num_samples + 1)
    best = np.full(len(numbers), np.inf)
    size = np.ones(len(numbers), dtype=np.int64)
    cuts: dict[int, StageCut] = {}
    for tried in _SIZES:
        if tried > tables.num_samples:
            break
        cut = best_cut(tables, devices, tried)
        if cut is None:
            continue
        cuts[tried] = cut
        counts = -(-numbers // tried)
        added = [float(tables.accumulate_s[tables.row(d)]) for d in devices]
        seconds = cut.through_s + (counts - 1) * (cut.slowest_s + max(added) / len(devices))
        seconds += max(float(tables.update_s[tables.row(d), -1]) for d in devices) / len(devices)
        better = (seconds < best) & (counts <= _MOST_MICROBATCHES)
        best, size = np.where(better, seconds, best), np.where(better, tried, size)
    best[0] = 0.0
    return DeviceGroup(devices, np.maximum.accumulate(best), size, cuts)


def shared_out(groups: tuple[DeviceGroup, ...], num_samples: int) -> tuple[int, ...] | None:
    """Samples of each group, so that the slowest is as quick as can be; None where none can."""
    times = np.unique(np.concatenate([group.time_s for group in groups]))
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
    while taken.sum() > num_samples:
        last = [float(g.time_s[n]) if n else -1.0 for g, n in zip(groups, taken, strict=True)]
        taken[int(np.argmax(last))] -= 1
    return tuple(int(n) for n in taken)


def _taken(groups: tuple[DeviceGroup, ...], seconds: float) -> LongArray:
    """Number of samples that each group can process in ``seconds``."""
    found = [int(np.searchsorted(g.time_s, seconds, side="right")) - 1 for g in groups]
    return np.array(found, dtype=np.int64)
