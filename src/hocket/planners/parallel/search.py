"""Search parallel configs jointly: the split of a batch over devices and microbatches.

A structure is a set of device groups that each hold the model, on one device or in stages. Every
structure gets samples, microbatches and cuts by closed forms. The best are simulated as long as
their closed form could still win, and the winners are improved by other schedules and by moving
single samples and cuts. Deterministic; the effort is counted in simulated ops. O(structures) closed
forms, and simulations of the best.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.base.parts import even_parts
from hocket.cost.collectives import ring_all_reduce_s
from hocket.plan.gradient_buckets import BUCKET_BYTES
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Parallel, Replica
from hocket.plan.sections.parallel import GRAPH_SCHEDULES
from hocket.planners.candidates import SimulatedCandidate
from hocket.planners.devices import workers
from hocket.planners.goal import Goal
from hocket.planners.parallel.closed_form import Tables, tables_of
from hocket.planners.parallel.constraints import NO_CONSTRAINTS, Constraints
from hocket.planners.parallel.device_groups import DeviceGroup, group_of, split_batch
from hocket.planners.parallel.memory_relief import fitted
from hocket.planners.parallel.simulated import Budget
from hocket.simulate.parallel.batch_costs import best_ring, priced_at
from hocket.simulate.parallel.stage_order import places_of
from hocket.simulate.parallel.tensor_parallel import degrees_of, one_part, regions_of

# Tensor parallelism: devices of one type that shard every matrix count as one faster device.
#
# For each degree that heads and widths allow, neighbouring devices of one type in the cluster form
# groups. The work of one device of a group is a problem of its own: the same graph with a shard of
# every matrix. Replicas and pipelines of groups are then found by the same closed forms as for
# single devices, with the exposed time of the all-reduces added (Megatron-LM, Shoeybi et al. 2019;
# with pipelines, Narayanan et al. 2021). O(degrees x structures).


@dataclass(frozen=True, eq=False)
class TensorGroups:
    """Tensor-parallel groups of devices, each represented by its first device."""

    degree: int
    tables: Tables
    """Closed forms of one part of the model, including the all-reduces of a group."""
    groups: dict[int, tuple[int, ...]]
    """All devices of a group, by its first device."""

    def widened(self, parallel: Parallel) -> Parallel:
        """Replace each first device of a config by its tensor-parallel group."""
        names = self.tables.problem.cluster.device_names
        of_name = {names[first]: tuple(names[d] for d in g) for first, g in self.groups.items()}
        replicas = (
            # Only first devices are in the closed form, so each name stands for its group.
            replace(r, devices=tuple(name for first in r.devices for name in of_name[first]))
            for r in parallel.replicas
        )
        return replace(parallel, replicas=tuple(replicas), tensor=self.degree)


def tensor_groups(tables: Tables, devices: Sequence[int]) -> Iterator[TensorGroups]:
    """Yield every tensor degree, with the groups that devices of equal type and memory form."""
    for degree in degrees_of(tables.problem.graph):
        groups = [
            tuple(alike[i : i + degree])
            for alike in _alike(tables, devices)
            for i in range(0, len(alike) - degree + 1, degree)
        ]
        if groups:
            part = tables_of(one_part(tables.problem, degree))
            summed = replace(part, passes_s=part.passes_s + _sums_s(part, groups))
            yield TensorGroups(degree, summed, {group[0]: group for group in groups})


def tables_for(tables: Tables, parallel: Parallel) -> Tables:
    """Closed forms of one device under a config: of the full model or of a tensor-parallel part."""
    return tables if parallel.tensor == 1 else _part_tables(tables, parallel.tensor)


@lru_cache(maxsize=16)
def _part_tables(tables: Tables, degree: int) -> Tables:
    return tables_of(one_part(tables.problem, degree))


def _alike(tables: Tables, devices: Sequence[int]) -> list[list[int]]:
    """Devices grouped by type and memory, in the order of the cluster."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for device in devices:
        found[tables.row(device), int(tables.problem.memory_bytes[device])].append(device)
    return list(found.values())


def _sums_s(part: Tables, groups: Sequence[tuple[int, ...]]) -> FloatArray:
    """[device type, size, place]: exposed seconds of the all-reduces before a place.

    Ops between the op that makes a partial sum and the first reader of the total hide the
    all-reduce: in a backward pass, the weight gradients.
    """
    graph = part.problem.graph
    regions = regions_of(graph)
    assert regions is not None
    makers = np.array([each.maker for each in regions.sums])
    readers = np.array([each.readers.min() for each in regions.sums])
    tensors = [each.tensor for each in regions.sums]
    place, found = places_of(graph)[makers], np.zeros_like(part.passes_s)
    # The first group of a device type represents all.
    for group in {part.row(group[0]): group for group in reversed(groups)}.values():
        ring, row = best_ring(part.problem, group), part.row(group[0])
        for index, size in enumerate(part.sizes.tolist()):
            sized = priced_at(part.problem, size)
            sizes = sized.graph.tensor_bytes[tensors]
            sums_s = ring_all_reduce_s(sizes, len(group), ring.latency_s, ring.bandwidth_bps)
            before_s = np.append(0.0, np.cumsum(sized.costs.op_s[row]))
            # Work between maker and reader overlaps with the all-reduce.
            hidden_s = before_s[readers] - before_s[makers + 1]
            exposed_s = np.maximum(sums_s - hidden_s, 0.0)
            at = np.bincount(place + 1, exposed_s, graph.num_ops + 1)
            found[row, index] = np.cumsum(at)
    return found


# Groups of devices that hold the model: all groupings of few devices, the sensible ones of many.
#
# A structure is a set of groups of devices; each group holds the model once, its devices in the
# order of their stages. Devices of one type with the same links are exchangeable, so of structures
# that differ only by them the first is kept.

Structure = tuple[tuple[int, ...], ...]
FEW_DEVICES = 4
"""Largest number of devices for which every set of groups in every order is considered."""
_MOST_STAGES = 8


def structures(tables: Tables, devices: list[int]) -> list[Structure]:
    """Sets of device groups without duplicates up to exchangeable devices, small ones first."""
    found = _all_sets(devices) if len(devices) <= FEW_DEVICES else _sensible(tables, devices)
    alike = {device: _class_of(tables, device) for device in devices}
    seen: dict[object, Structure] = {}
    for structure in found:
        if structure:
            key = tuple(sorted(tuple(alike[d] for d in group) for group in structure))
            seen.setdefault(key, structure)
    return sorted(seen.values(), key=lambda s: (sum(map(len, s)), len(s), s))


def _class_of(tables: Tables, device: int) -> tuple[object, ...]:
    problem = tables.problem
    # Devices of one type may have different links: these are not interchangeable.
    bandwidth = sorted(problem.costs.routes.bandwidth_bps[device].tolist())
    return tables.row(device), int(problem.memory_bytes[device]), tuple(bandwidth)


def _all_sets(devices: list[int]) -> Iterator[Structure]:
    """Yield every set of ordered groups of some of the devices."""
    if not devices:
        yield ()
        return
    last = devices[-1]
    for rest in _all_sets(devices[:-1]):
        yield rest
        yield (*rest, (last,))
        for index, group in enumerate(rest):
            for at in range(len(group) + 1):
                grown = (*group[:at], last, *group[at:])
                yield (*rest[:index], grown, *rest[index + 1 :])


def _sensible(tables: Tables, devices: list[int]) -> Iterator[Structure]:
    """Yield the fastest devices as replicas, as one pipeline, and as replicas of pipelines.

    The same is done for the devices in cluster order and for those with the most memory.
    """
    quickest = sorted(devices, key=lambda d: (tables.passes_s[tables.row(d), -1, -1], d))
    by_memory = sorted(devices, key=lambda d: (-int(tables.problem.memory_bytes[d]), d))
    for order in (quickest, devices, by_memory):
        for count in sensible_counts(len(devices)):
            some = order[:count]
            yield tuple((device,) for device in some)
            if 1 < count <= _MOST_STAGES:
                yield (tuple(some),)
                yield (tuple(reversed(some)),)
            for stages in range(2, min(count // 2, _MOST_STAGES) + 1):
                if count % stages == 0:
                    yield _chunks(some, stages)
                    yield tuple(tuple(some[i :: count // stages]) for i in range(count // stages))


def _chunks(devices: list[int], stages: int) -> Structure:
    return tuple(tuple(devices[i : i + stages]) for i in range(0, len(devices), stages))


def sensible_counts(most: int) -> list[int]:
    """The counts 1, 2, 3, 4, 6, 8, 12, … up to ``most``, and ``most`` itself."""
    found, power = {1, 3, most}, 2
    while power <= most:
        found |= {power, power * 3 // 2}
        power *= 2
    return sorted(count for count in found if count <= most)


# Lower bound on the step of a parallel config, from the compute of its busiest device.
#
# A device computes one op after the other, so no step is shorter than all that one device does. The
# first microbatch must have passed the stages before a stage, and its last one must pass them in
# the backward pass. Exchanges, copies and waiting count nothing. O(replicas x stages) differences
# of sums.

_SLACK = 0.995
"""Factor on the lower bound, since times between the computed sizes are interpolated."""


def least_s(tables: Tables, parallel: Parallel) -> float:
    """Lower bound on the step time of a parallel config."""
    num_shards = len(parallel.replicas) if parallel.sharded else 1
    # One device of each group is enough, since the tables are those of a part.
    stages = (
        parallel.part_by_part().replicas
    )  # one device of each, whose tables are those of a part
    return _SLACK * max(_replica_s(tables, replica, num_shards) for replica in stages)


def _replica_s(tables: Tables, replica: Replica, num_shards: int) -> float:
    number = tables.problem.cluster.number_of
    bounds = (0, *replica.cuts, tables.problem.graph.num_ops)
    sizes = Counter(replica.microbatches)
    longest_s = before_s = 0.0
    for stage, name in enumerate(replica.devices):
        device, first, stop = number[name], bounds[stage], bounds[stage + 1]
        passes_s = sum(
            count * _stage_s(tables, device, size, first, stop) for size, count in sizes.items()
        )
        update_s = tables.update_s[tables.row(device)]
        updates_s = float(update_s[stop] - update_s[first]) / num_shards
        longest_s = max(longest_s, passes_s + max(before_s, updates_s))
        # The smallest microbatch passes the stages before in the shortest time, so the bound holds.
        before_s += _stage_s(tables, device, min(sizes), first, stop)
    return longest_s


def _stage_s(tables: Tables, device: int, size: int, first: int, stop: int) -> float:
    """Forward and backward seconds of one microbatch on one stage."""
    along_s = tables.stage_s(device, size)
    return float(along_s[stop] - along_s[first])


_STARTS = 4
"""Number of candidates that small moves improve, each with other devices or stages."""
_WITHIN_REACH = 1.15
"""Candidates slower than the best by more than this factor are not improved."""
_MOST_RANKS = 8
"""Largest number of replicas for which collectives are planned."""
_HOPE = 0.97
"""Factor on closed forms, which may overestimate: candidates that could win with it are simulated.
"""


@dataclass(frozen=True)
class Estimate:
    """A parallel config with its step time by the closed forms."""

    parallel: Parallel
    seconds: float
    """Compute of the slowest group plus the exposed part of the gradient exchange."""

    @property
    def family(self) -> tuple[bool, bool, bool]:
        """Parallelism in use: (data, pipeline, tensor)."""
        return len(self.parallel.replicas) > 1, self.parallel.is_staged, self.parallel.tensor > 1


def search_parallel(
    problem: Problem, budget: Budget, goal: Goal = "time", must: Constraints = NO_CONSTRAINTS
) -> list[SimulatedCandidate]:
    """Search parallel configs that keep the limits; returns simulated ones, fastest first."""
    tables, devices = tables_of(problem), workers(problem).tolist()
    found = _estimates(tables, devices, takes_all=must.num_replicas is not None)
    estimates = sorted(found, key=lambda e: e.seconds)
    requested = [
        e for e in estimates
        if len(e.parallel.devices) <= must.num_devices and must.allows(e.parallel)
    ]  # fmt: skip
    best_s, families = np.inf, set[tuple[bool, bool, bool]]()
    for estimate in _families_first(requested):
        parallel, family = estimate.parallel, estimate.family
        is_hopeful = estimate.seconds * _HOPE <= best_s or goal != "time"
        # The best of each family is listed in the table, even if it cannot win.
        if budget.is_left and (is_hopeful or family not in families):
            below_s = float(best_s) if goal == "time" and family in families else np.inf
            seen = fitted(tables_for(tables, parallel), parallel, budget, below_s=below_s)
            best_s = min(best_s, seen.step_s or np.inf)
            families |= {family} if seen.feasible else set()
    for start in _starts(budget, must):
        _shard(start, budget)
        _plan_exchange(tables, start, budget)
    for start in _starts(budget, must):
        _improve(tables, start, budget)
    return _fitting(budget, must)


def _families_first(estimates: list[Estimate]) -> list[Estimate]:
    """Sort the fastest estimate of each family first, so that every family is simulated."""
    first: dict[tuple[bool, bool, bool], Estimate] = {}
    for estimate in estimates:
        first.setdefault(estimate.family, estimate)
    chosen = {id(estimate) for estimate in first.values()}
    return [*first.values(), *(e for e in estimates if id(e) not in chosen)]


def _starts(budget: Budget, must: Constraints) -> list[SimulatedCandidate]:
    """The fastest candidate of each structure that is near enough to the best to be improved."""
    first: dict[object, SimulatedCandidate] = {}
    fitting = _fitting(budget, must)
    for candidate in fitting:
        parallel = candidate.plan[Parallel]
        devices = frozenset(replica.devices for replica in parallel.replicas)
        if (candidate.step_s or 0.0) <= _WITHIN_REACH * (fitting[0].step_s or 0.0):
            first.setdefault((devices, parallel.sharded, parallel.tensor), candidate)
    return list(first.values())[:_STARTS]


def _shard(start: SimulatedCandidate, budget: Budget) -> None:
    """Simulate the same config with parameters and state sharded over all ranks."""
    parallel = start.plan[Parallel]
    counts = {len(replica.microbatches) for replica in parallel.replicas}
    is_flat = all(len(replica.devices) == 1 for replica in parallel.replicas)
    if len(parallel.replicas) > 1 and is_flat and len(counts) == 1 and budget.is_left:
        plain = (replace(r, recomputed=(), update="device") for r in parallel.replicas)
        budget.simulated(replace(parallel, replicas=tuple(plain), zero=3))


def _plan_exchange(tables: Tables, start: SimulatedCandidate, budget: Budget) -> None:
    """Simulate the same config with collectives planned for its links."""
    parallel, problem = start.plan[Parallel], tables.problem
    if parallel.sharded or parallel.tensor > 1:
        return  # gathers and scatters are not planned, nor exchanges between parts
    from hocket.planners.communication.collective import plan_collective

    ranks = tuple(replica.devices[0] for replica in parallel.replicas)
    if len(ranks) < 2 or len(ranks) > _MOST_RANKS or not budget.is_left:
        return
    try:
        found = plan_collective(problem.cluster, "allreduce", ranks, size_bytes=BUCKET_BYTES)
    except NoFeasiblePlanError:
        return
    budget.simulated(parallel, found.chosen.section)


def _fitting(budget: Budget, must: Constraints) -> list[SimulatedCandidate]:
    fitting = [
        candidate
        for candidate in budget.seen.values()
        if isinstance(candidate, SimulatedCandidate)
        and candidate.feasible
        and not must.broken_by(budget.problem, candidate)
    ]
    return sorted(fitting, key=lambda c: (c.step_s or 0.0, c.planner))


# ── closed forms ─────────────────────────────────────────────────────────────────────────────────


def _estimates(tables: Tables, devices: list[int], *, takes_all: bool) -> Iterator[Estimate]:
    for structure in structures(tables, devices):
        found = estimated(tables, structure, takes_all=takes_all)
        if found is not None:
            yield found
    for divided in tensor_groups(tables, devices):
        for structure in structures(divided.tables, list(divided.groups)):
            found = estimated(divided.tables, structure, takes_all=takes_all)
            if found is not None:
                yield Estimate(divided.widened(found.parallel), found.seconds)


def estimated(tables: Tables, structure: Structure, *, takes_all: bool = False) -> Estimate | None:
    """The structure with its best split of samples.

    None if it does not fit or a group gets no samples.

    With ``takes_all`` every group gets a sample, even if that makes the step longer.
    """
    exchanges = len(structure) > 1
    groups = tuple(group_of(tables, devices, exchanges) for devices in structure)
    taken = split_batch(groups, tables.num_samples)
    if taken is not None and takes_all and len(groups) <= tables.num_samples:
        taken = _one_each(taken)
    if taken is None or not all(taken):
        return None
    replicas = tuple(
        group.replica(tables, count) for group, count in zip(groups, taken, strict=True)
    )
    longest_s = max(float(g.time_s[n]) for g, n in zip(groups, taken, strict=True))
    return Estimate(Parallel(replicas=replicas), longest_s + _exposed_s(tables, groups, replicas))


def _one_each(taken: tuple[int, ...]) -> tuple[int, ...]:
    """Shift samples between groups so that each has at least one."""
    found = list(taken)
    while 0 in found:
        # The largest gives, since it loses least by one sample.
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return tuple(found)


def _exposed_s(
    tables: Tables, groups: tuple[DeviceGroup, ...], replicas: tuple[Replica, ...]
) -> float:
    """Approximate seconds of the gradient exchange that no backward pass hides."""
    if len(groups) == 1:
        return 0.0
    ring = best_ring(tables.problem, tuple(group.devices[0] for group in groups))
    count = len(groups)
    per_byte_s = 2 * (count - 1) / count / ring.bandwidth_bps
    total_s = tables.gradient_bytes * per_byte_s / min(len(g.devices) for g in groups)
    last_s = tables.largest_bucket_bytes * per_byte_s
    hidden_s = min(
        # A backward pass takes about two thirds of both passes.
        float(group.time_s[replica.microbatches[-1]]) * 2 / 3
        for group, replica in zip(groups, replicas, strict=True)
    )
    # The last bucket is ready only at the end, so about half of it is always exposed.
    return max(min(last_s, total_s) / 2, total_s - hidden_s)


# ── small moves ──────────────────────────────────────────────────────────────────────────────────


def _improve(tables: Tables, start: SimulatedCandidate, budget: Budget) -> None:
    """Move to the first better neighbour until there is none or the simulation budget is spent."""
    best, tables = start, tables_for(tables, start.plan[Parallel])
    moves: tuple[Callable[[Tables, Parallel], Iterator[Parallel]], ...] = (
        _other_schedules, _moved_samples, _moved_cuts,
    )  # fmt: skip
    improves = True
    while improves:
        improves = False
        for move in moves:
            planned = best.plan.get(Communication)
            for neighbour in move(tables, best.plan[Parallel]):
                if not budget.is_left:
                    return
                if least_s(tables, neighbour) >= (best.step_s or 0.0):
                    continue
                found = fitted(tables, neighbour, budget, planned, below_s=best.step_s or 0.0)
                if not isinstance(found, SimulatedCandidate) or found.step_s is None:
                    continue
                # Gains below rounding would let the search run in circles.
                if found.step_s < (best.step_s or 0.0) * (1 - 1e-6):
                    best, improves = found, True
                    break


def _moved_samples(tables: Tables, parallel: Parallel) -> Iterator[Parallel]:
    """Neighbours with one sample moved from a replica to another."""
    replicas = parallel.replicas
    for giver, taker in ((i, j) for i in range(len(replicas)) for j in range(len(replicas))):
        least = len(replicas[giver].microbatches) if parallel.sharded else 1
        if giver == taker or replicas[giver].num_samples <= least:
            continue
        # Among many replicas only neighbours exchange samples, to limit the moves.
        if len(replicas) > 4 and abs(giver - taker) > 1:
            continue
        changed = list(replicas)
        changed[giver] = _resized(replicas[giver], -1)
        changed[taker] = _resized(replicas[taker], 1)
        yield replace(parallel, replicas=tuple(changed))


def _resized(replica: Replica, change: int) -> Replica:
    """The replica with ``change`` more samples in as many microbatches."""
    number = replica.num_samples + change
    count = min(len(replica.microbatches), number)
    return replace(replica, microbatches=even_parts(number, count))


def _other_schedules(tables: Tables, parallel: Parallel) -> Iterator[Parallel]:
    """Neighbours with another schedule, such as one that delays weight gradients."""
    if parallel.is_staged and not any(replica.recomputed for replica in parallel.replicas):
        for name in GRAPH_SCHEDULES:
            # GPipe is never shorter than 1F1B and holds more.
            if name not in (parallel.schedule, "gpipe"):
                yield replace(parallel, schedule=name)


def _moved_cuts(tables: Tables, parallel: Parallel) -> Iterator[Parallel]:
    """Neighbours with one cut of one pipeline moved a few places."""
    places = tables.cuts
    for index, replica in enumerate(parallel.replicas):
        for cut, op in enumerate(replica.cuts):
            at = int(np.searchsorted(places, op))
            # Small steps refine a cut, larger ones leave a local optimum.
            for step in (-1, 1, -4, 4):
                if not 0 < at + step < len(places) - 1:
                    continue
                cuts = [*replica.cuts]
                cuts[cut] = int(places[at + step])
                if sorted(set(cuts)) != cuts:
                    continue
                changed = replace(replica, cuts=tuple(cuts))
                yield _with(parallel, index, changed)


def _with(parallel: Parallel, index: int, replica: Replica) -> Parallel:
    replicas = (*parallel.replicas[:index], replica, *parallel.replicas[index + 1 :])
    return replace(parallel, replicas=replicas)
