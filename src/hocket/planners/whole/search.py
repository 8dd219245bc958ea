"""One search over the ways of sharing the samples of a step between devices and in time.

Every structure (who holds the model, alone or in stages) gets samples, microbatches and cuts by
closed forms; the best are simulated, as long as their closed form could still win; the winners are
improved by moving single samples, cuts and microbatches. What people do by hand stands beside them
under its name, and op placement of the unsplit batch is searched only where its bound allows it to
win. Deterministic; the effort is counted in simulated ops. O(structures) closed forms and
simulations of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.base.parts import even_parts
from hocket.plan.gradient_buckets import BUCKET_BYTES
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Replica, Shares
from hocket.plan.sections.shares import SHARE_SCHEDULES
from hocket.plan.words import in_words
from hocket.planners.candidates import Candidate
from hocket.planners.communication.collective import plan_collective
from hocket.planners.goal import Goal
from hocket.planners.placement.devices import workers
from hocket.planners.whole.budget import Budget
from hocket.planners.whole.divided_matrices import divided_devices, tables_for
from hocket.planners.whole.groups import DeviceGroup, even_sizes, group_of, shared_out
from hocket.planners.whole.least import least_s
from hocket.planners.whole.must import ANYTHING, Must
from hocket.planners.whole.relief import fitted
from hocket.planners.whole.structures import Structure, structures
from hocket.planners.whole.tables import Tables, tables_of
from hocket.simulate.shares.prices import best_ring

_STARTS = 4
"""Ways that are improved by small moves, each with other devices or stages."""
_WITHIN_REACH = 1.15
"""Ways that are longer than the best by more than this are not improved."""
_MOST_RANKS = 8
"""Replicas whose exchange is planned for their links."""
_HOPE = 0.97
"""A closed form may be too long by this much and its way is simulated still."""


@dataclass(frozen=True)
class Estimate:
    """A way of sharing and what the closed forms say of it."""

    shares: Shares
    seconds: float
    """Compute of the slowest group and what of the exchange it cannot hide."""

    @property
    def family(self) -> tuple[bool, bool, bool]:
        """Whether there are replicas, stages, and parts of matrices."""
        return len(self.shares.replicas) > 1, self.shares.is_staged, self.shares.tensor > 1


def shared_ways(
    problem: Problem, budget: Budget, goal: Goal = "time", must: Must = ANYTHING
) -> list[Candidate]:
    """Ways of sharing the batch that were simulated, the quickest first, that keep the limits."""
    tables, devices = tables_of(problem), workers(problem).tolist()
    found = _estimates(tables, devices, takes_all=must.num_replicas is not None)
    estimates = sorted(found, key=lambda e: (e.seconds, in_words(e.shares)))
    asked = [
        e for e in estimates
        if len(e.shares.devices) <= must.num_devices and must.allows(e.shares)
    ]  # fmt: skip
    best_s, families = np.inf, set[tuple[bool, bool, bool]]()
    for estimate in _families_first(asked):
        shares, family = estimate.shares, estimate.family
        is_hopeful = estimate.seconds * _HOPE <= best_s or goal != "time"
        # The best of each family stands in the table, also where it cannot win.
        if budget.is_left and (is_hopeful or family not in families):
            below_s = float(best_s) if goal == "time" and family in families else np.inf
            seen = fitted(tables_for(tables, shares), shares, budget, below_s=below_s)
            best_s = min(best_s, seen.step_s or np.inf)
            families |= {family} if seen.feasible else set()
    for start in _starts(budget, must):
        _shard(start, budget)
        _plan_exchange(tables, start, budget)
    for start in _starts(budget, must):
        _improve(tables, start, budget)
    for start in _starts(budget, must):
        turned = _turned_round(tables, start, budget)
        if turned is not None and turned.step_s is not None:
            _improve(tables, turned, budget)
    return _fitting(budget, must)


def _families_first(estimates: list[Estimate]) -> list[Estimate]:
    """The quickest of each family before all others, so that none is left when effort runs out."""
    first: dict[tuple[bool, bool, bool], Estimate] = {}
    for estimate in estimates:
        first.setdefault(estimate.family, estimate)
    chosen = {id(estimate) for estimate in first.values()}
    return [*first.values(), *(e for e in estimates if id(e) not in chosen)]


def _starts(budget: Budget, must: Must) -> list[Candidate]:
    """The quickest way of each structure, of the structures that small moves could make win."""
    first: dict[object, Candidate] = {}
    fitting = _fitting(budget, must)
    for way in fitting:
        assert way.plan is not None
        shares = way.plan[Shares]
        devices = frozenset(replica.devices for replica in shares.replicas)
        if (way.step_s or 0.0) <= _WITHIN_REACH * (fitting[0].step_s or 0.0):
            first.setdefault((devices, shares.sharded, shares.tensor), way)
    return list(first.values())[:_STARTS]


def _turned_round(tables: Tables, start: Candidate, budget: Budget) -> Candidate | None:
    """The same pipelines with their devices in the other order: closed forms hardly tell which.

    None where devices are alike, or where that does not fit.
    """
    assert start.plan is not None
    shares = start.plan[Shares]
    if not shares.is_staged or shares.tensor > 1 or not budget.is_left:
        return None
    number = {name: i for i, name in enumerate(tables.problem.cluster.device_names)}
    if len({tables.row(number[name]) for name in shares.devices}) == 1:
        return None
    turned = []
    for replica in shares.replicas:
        devices = tuple(number[name] for name in reversed(replica.devices))
        group = group_of(tables, devices, len(shares.replicas) > 1)
        if not np.isfinite(group.time_s[replica.num_samples]):
            return None
        turned.append(group.replica(tables, replica.num_samples))
    return fitted(tables, replace(shares, replicas=tuple(turned)), budget)


def _shard(start: Candidate, budget: Budget) -> None:
    """The same way with parameters and state in parts, where all take part in every gather."""
    assert start.plan is not None
    shares = start.plan[Shares]
    counts = {len(replica.microbatches) for replica in shares.replicas}
    is_flat = all(len(replica.devices) == 1 for replica in shares.replicas)
    if len(shares.replicas) > 1 and is_flat and len(counts) == 1 and budget.is_left:
        plain = (replace(r, recomputed=(), update="device") for r in shares.replicas)
        budget.simulated(replace(shares, replicas=tuple(plain), sharded=True))


def _plan_exchange(tables: Tables, start: Candidate, budget: Budget) -> None:
    """The same way with its exchange planned for the very links."""
    assert start.plan is not None
    shares, problem = start.plan[Shares], tables.problem
    if shares.sharded or shares.tensor > 1:
        return  # gathers and scatters are not planned, nor exchanges between parts
    ranks = tuple(replica.devices[0] for replica in shares.replicas)
    if len(ranks) < 2 or len(ranks) > _MOST_RANKS or not budget.is_left:
        return
    try:
        found = plan_collective(problem.cluster, "allreduce", ranks, size_bytes=BUCKET_BYTES)
    except NoFeasiblePlanError:
        return
    budget.simulated(shares, found.chosen.section)


def _fitting(budget: Budget, must: Must) -> list[Candidate]:
    fitting = [
        candidate
        for candidate in budget.seen.values()
        if candidate.step_s is not None and not must.broken_by(budget.problem, candidate)
    ]
    return sorted(fitting, key=lambda c: (c.step_s or 0.0, c.planner))


# ── closed forms ─────────────────────────────────────────────────────────────────────────────────


def _estimates(tables: Tables, devices: list[int], *, takes_all: bool) -> Iterator[Estimate]:
    for structure in structures(tables, devices):
        found = estimated(tables, structure, takes_all=takes_all)
        if found is not None:
            yield found
    for divided in divided_devices(tables, devices):
        for structure in structures(divided.tables, list(divided.groups)):
            found = estimated(divided.tables, structure, takes_all=takes_all)
            if found is not None:
                yield Estimate(divided.widened(found.shares), found.seconds)


def estimated(tables: Tables, structure: Structure, *, takes_all: bool = False) -> Estimate | None:
    """The structure with its best shares; None where they do not fit, or some group gets none.

    With ``takes_all`` every group gets a sample, also where the step is longer by that.
    """
    exchanges = len(structure) > 1
    groups = tuple(group_of(tables, devices, exchanges) for devices in structure)
    taken = shared_out(groups, tables.num_samples)
    if taken is not None and takes_all and len(groups) <= tables.num_samples:
        taken = _one_each(taken)
    if taken is None or not all(taken):
        return None
    replicas = tuple(
        group.replica(tables, count) for group, count in zip(groups, taken, strict=True)
    )
    longest_s = max(float(g.time_s[n]) for g, n in zip(groups, taken, strict=True))
    return Estimate(Shares(replicas=replicas), longest_s + _exposed_s(tables, groups, replicas))


def _one_each(taken: tuple[int, ...]) -> tuple[int, ...]:
    """The same number of samples, at least one of them with each."""
    found = list(taken)
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return tuple(found)


def _exposed_s(
    tables: Tables, groups: tuple[DeviceGroup, ...], replicas: tuple[Replica, ...]
) -> float:
    """Seconds of the exchange that no backward pass hides, about."""
    if len(groups) == 1:
        return 0.0
    ring = best_ring(tables.problem, tuple(group.devices[0] for group in groups))
    count = len(groups)
    per_byte_s = 2 * (count - 1) / count / ring.bandwidth_bps
    whole_s = tables.gradient_bytes * per_byte_s / min(len(g.devices) for g in groups)
    last_s = tables.largest_bucket_bytes * per_byte_s
    hidden_s = min(
        float(group.time_s[replica.microbatches[-1]]) * 2 / 3
        for group, replica in zip(groups, replicas, strict=True)
    )
    return max(min(last_s, whole_s) / 2, whole_s - hidden_s)


# ── small moves ──────────────────────────────────────────────────────────────────────────────────


def _improve(tables: Tables, start: Candidate, budget: Budget) -> None:
    """Go to the first better neighbour until there is none, or no simulations are left."""
    assert start.plan is not None
    best, tables = start, tables_for(tables, start.plan[Shares])
    moves: tuple[Callable[[Tables, Shares], Iterator[Shares]], ...] = (
        _other_schedules, _moved_samples, _moved_cuts, _other_microbatches, _less_relief,
    )  # fmt: skip
    improves = True
    while improves:
        improves = False
        for move in moves:
            assert best.plan is not None
            planned = best.plan.get(Communication)
            for neighbour in move(tables, best.plan[Shares]):
                if not budget.is_left:
                    return
                if least_s(tables, neighbour) >= (best.step_s or 0.0):
                    continue
                found = fitted(tables, neighbour, budget, planned, below_s=best.step_s or 0.0)
                if found.step_s is not None and found.step_s < (best.step_s or 0.0) * (1 - 1e-6):
                    best, improves = found, True
                    break


def _moved_samples(tables: Tables, shares: Shares) -> Iterator[Shares]:
    """One sample from a replica to another."""
    replicas = shares.replicas
    for giver, taker in ((i, j) for i in range(len(replicas)) for j in range(len(replicas))):
        least = len(replicas[giver].microbatches) if shares.sharded else 1
        if giver == taker or replicas[giver].num_samples <= least:
            continue
        if len(replicas) > 4 and abs(giver - taker) > 1:
            continue
        changed = list(replicas)
        changed[giver] = _resized(replicas[giver], -1)
        changed[taker] = _resized(replicas[taker], 1)
        yield replace(shares, replicas=tuple(changed))


def _resized(replica: Replica, change: int) -> Replica:
    """The replica with more or fewer samples in as many microbatches."""
    number = replica.num_samples + change
    count = min(len(replica.microbatches), number)
    return replace(replica, microbatches=even_parts(number, count))


def _other_schedules(tables: Tables, shares: Shares) -> Iterator[Shares]:
    """Gradients of weights put off, where a pipeline would wait at its end."""
    if shares.is_staged and not any(replica.recomputed for replica in shares.replicas):
        for name in SHARE_SCHEDULES:
            if name not in (shares.schedule, "gpipe"):
                yield replace(shares, schedule=name)


def _moved_cuts(tables: Tables, shares: Shares) -> Iterator[Shares]:
    """One cut of one pipeline a few places forward or back."""
    places = tables.cuts
    for index, replica in enumerate(shares.replicas):
        for cut, op in enumerate(replica.cuts):
            at = int(np.searchsorted(places, op))
            for step in (-1, 1, -4, 4):
                if not 0 < at + step < len(places) - 1:
                    continue
                cuts = [*replica.cuts]
                cuts[cut] = int(places[at + step])
                if sorted(set(cuts)) != cuts:
                    continue
                changed = replace(replica, cuts=tuple(cuts))
                yield _with(shares, index, changed)


def _other_microbatches(tables: Tables, shares: Shares) -> Iterator[Shares]:
    """One more, one fewer, or twice as many microbatches of one replica."""
    if shares.sharded:
        return  # all have equally many
    for index, replica in enumerate(shares.replicas):
        count, number = len(replica.microbatches), replica.num_samples
        for tried in (count - 1, count + 1, 2 * count):
            if 1 <= tried <= number:
                sizes = even_sizes(number, -(-number // tried))
                if sizes != replica.microbatches:
                    yield _with(shares, index, replace(replica, microbatches=sizes))


def _less_relief(tables: Tables, shares: Shares) -> Iterator[Shares]:
    """Fewer blocks recomputed, or none in smaller microbatches, or updates on the device."""
    kept = [replica.recomputed for replica in shares.replicas]
    if shares.sharded and any(kept):
        for fewer in (kept[0][: len(kept[0]) // 2], kept[0][:-1]):
            replicas = (replace(replica, recomputed=fewer) for replica in shares.replicas)
            yield replace(shares, replicas=tuple(replicas))
    for index, replica in enumerate(shares.replicas):
        if replica.update == "host":
            yield _with(shares, index, replace(replica, update="device"))
        if kept[index] and not shares.sharded:
            for fewer in (kept[index][: len(kept[index]) // 2], kept[index][:-1]):
                yield _with(shares, index, replace(replica, recomputed=fewer))
            for count in (len(replica.microbatches) + 1, 2 * len(replica.microbatches)):
                sizes = even_sizes(replica.num_samples, -(-replica.num_samples // count))
                yield _with(shares, index, replace(replica, microbatches=sizes, recomputed=()))


def _with(shares: Shares, index: int, replica: Replica) -> Shares:
    replicas = (*shares.replicas[:index], replica, *shares.replicas[index + 1 :])
    return replace(shares, replicas=replicas)
