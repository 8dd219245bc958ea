"""Throughput: the placement with the smallest load of the busiest device.

In a pipeline, steps can follow each other as fast as the busiest device allows; its load is the
time of its ops and of the tensors that cross its boundary (`hocket.simulate.load`). If
``problem.contiguous`` is set, no forward path may leave a device and return to it, and the optimum
is proven if the graph has few enough ideals (`contiguous`). Otherwise the contiguous split is the
start of a search over all placements (`scattered`). Bytes that stay on a device are limited by its
memory; if the simulated peak is larger, limits are lowered by the difference and the search is
repeated.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020;
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.base.joined import JoinedSets
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.devices import require_runnable
from hocket.planners.max_load.contiguous_split import (
    FoundPlacement,
    between_necks,
    by_order,
    contiguous,
    limits_by_device,
)
from hocket.planners.max_load.device_classes import (
    DeviceClasses,
    device_classes,
    dual_weights,
    least_weighted,
)
from hocket.planners.max_load.load_annealing import Annealed, Heat, annealed
from hocket.planners.max_load.load_bound import max_load_bound
from hocket.planners.max_load.load_pieces import Pieces, gathered, pieces_of
from hocket.simulate.engine import simulate
from hocket.simulate.load import link_times, max_load_s

# Placements that need not be contiguous: annealing from several starts, at several grains.
#
# One start is the best contiguous split. The others begin with clusters: pieces are joined along
# their costliest nets while the joint time stays below a part of the load that is aimed at, so that
# pieces that should stay together move together. The clusters are annealed first, then the pieces
# themselves. The best over all starts is annealed once more with little heat. Deterministic: tries
# are counted. O(starts · tries · nets per piece · devices).

_MANY = 5000
"""Number of pieces above which fewer starts are tried, with a low temperature.

With so many pieces a high temperature would do more damage than the affordable tries can repair.
"""
_MAX_TRIES, _TRIES_PER_PIECE, _MAX_UPDATES = 600_000, 5000, 15_000_000
"""Limits of one annealing: tries, tries per piece, and load updates over all tries."""
_GRAINS = (0.3, 0.12, 0.06, 0.2)
"""Per start: maximum time of a cluster, as a fraction of an even load."""
_WARM = (0.01, 0.03)
"""Initial temperatures for annealing the contiguous split."""
_HOT, _MILD, _LAST = 0.05, 0.005, 0.001
"""Temperatures for clusters, for the pieces after them, and for the best placement at the end."""


@dataclass(frozen=True, eq=False)
class _Search:
    problem: Problem
    pieces: Pieces
    classes: DeviceClasses
    limit_bytes: LongArray

    def results(self, start: IntArray) -> Iterator[Annealed]:
        """Yield one annealed placement per start."""
        is_large = self.pieces.num_pieces > _MANY
        for seed, heat in enumerate(_WARM[:1] if is_large else _WARM):
            yield self.anneal(self.pieces, start, heat, seed)
        for seed, part in enumerate(_GRAINS[:1] if is_large else _GRAINS):
            yield self.from_clusters(part, seed)

    def anneal(self, grain: Pieces, device_of: IntArray, heat: float, seed: int) -> Annealed:
        nets_per_piece = len(grain.net_pieces) / max(grain.num_pieces, 1)
        updates_per_try = (1 + nets_per_piece) * self.problem.cluster.num_devices
        most = min(_MAX_TRIES, _TRIES_PER_PIECE * grain.num_pieces)
        settings = Heat(num_tries=int(min(_MAX_UPDATES / updates_per_try, most)), start=heat)
        if grain.num_pieces > _MANY:
            # A hot start would destroy what the few affordable tries per piece cannot repair.
            settings = settings._replace(start=min(heat, _LAST))
        return annealed(
            self.problem, grain, device_of, settings, limit_bytes=self.limit_bytes, seed=seed
        )

    def from_clusters(self, part: float, seed: int) -> Annealed:
        """Anneal clusters of up to ``part`` of an even load, then the pieces."""
        label = _clusters(self.pieces, self.classes, part)
        clusters = gathered(self.pieces, label)
        coarse = self.anneal(clusters, self._spread(clusters), _HOT, seed)
        return self.anneal(self.pieces, coarse.device_of[label], _MILD, seed)

    def _spread(self, grain: Pieces) -> IntArray:
        """Give each device that pays for transfers an equal run of clusters.

        A cluster that cannot run there goes to its fastest device.
        """
        workers = np.flatnonzero(link_times(self.problem).pays)
        numbers = np.arange(grain.num_pieces)
        device_of = workers[numbers * len(workers) // max(grain.num_pieces, 1)]
        can_run = np.isfinite(grain.seconds[device_of, numbers])
        return np.where(can_run, device_of, grain.seconds.argmin(axis=0)).astype(np.int32)


def scattered(problem: Problem, pieces: Pieces, classes: DeviceClasses) -> FoundPlacement | None:
    """Return the best placement found from several starts; None if no start fits.

    It is never worse than the best contiguous split, because annealing returns the best placement
    met; the search ends early at the lower bound.
    """
    search = _Search(problem, pieces, classes, limits_by_device(problem, classes))
    split = contiguous(pieces, classes)
    start = packed(pieces, search.limit_bytes) if split is None else split.device_of
    if start is None:
        return None
    # No placement is better than the bound, so the search may stop there.
    best, good_s = Annealed(start, np.inf), max_load_bound(problem) * (1 + _EXACT)
    for found in search.results(start):
        best = min(best, found, key=lambda result: result.max_load_s)
        if best.max_load_s <= good_s:
            return FoundPlacement(best.device_of, is_proven=False)
    best = search.anneal(pieces, best.device_of, _LAST / 2, len(_GRAINS))
    return FoundPlacement(best.device_of, is_proven=False)


def _clusters(pieces: Pieces, classes: DeviceClasses, part: float) -> IntArray:
    """Join pieces along nets, costliest first, up to ``part`` of an even load.

    Only pieces that run on the same devices are joined, so that every cluster can run somewhere.
    """
    class_s = classes.piece_s(pieces)
    weight = dual_weights(class_s, classes.counts)
    weighted_s = least_weighted(weight, class_s)
    most = part * float(weighted_s.sum()) / float(classes.counts.sum())
    # A joined cluster must have a device that runs all of its pieces.
    runs_on = [tuple(column) for column in np.isfinite(class_s).T.tolist()]
    clusters, size = JoinedSets(pieces.num_pieces), weighted_s.tolist()
    bounds, members = pieces.net_ptr.tolist(), pieces.net_pieces.tolist()
    for net in np.argsort(-classes.net_s(pieces).max(axis=0), kind="stable").tolist():
        first = clusters.find(members[bounds[net]])
        for piece in members[bounds[net] + 1 : bounds[net + 1]]:
            other = clusters.find(piece)
            fits = other != first and size[first] + size[other] <= most
            if fits and runs_on[first] == runs_on[other]:
                clusters.join(first, other)
                size[first] += size[other]
    roots = np.array([clusters.find(piece) for piece in range(pieces.num_pieces)])
    _, label = np.unique(roots, return_inverse=True)
    return label.astype(np.int32)


# A placement that fits, whatever its loads: where no contiguous split does, a search starts here.
#
# Largest pieces first, each on the device with most free bytes that can run it. O(pieces ·
# devices).


def packed(pieces: Pieces, limit_bytes: LongArray) -> IntArray | None:
    """Place each piece, largest first, on the device with most free bytes; None if it fails."""
    free = limit_bytes.astype(np.float64)
    device_of = np.zeros(pieces.num_pieces, dtype=np.int32)
    for piece in np.argsort(-pieces.memory_bytes, kind="stable"):
        can_run = np.isfinite(pieces.seconds[:, piece])
        # -inf excludes devices that cannot run the piece, unless there is no other.
        device = int(np.argmax(np.where(can_run, free, -np.inf)))
        free[device] -= pieces.memory_bytes[piece]
        if free[device] < 0 or not can_run[device]:
            return None
        device_of[piece] = device
    return device_of


_MAX_ROUNDS = 5
"""Maximum number of times that memory limits are lowered after a simulation."""
_EXACT = 1e-5
"""Relative distance from its lower bound up to which a load counts as proven optimal."""


def throughput(problem: Problem, plan: Plan) -> Plan:
    """Place every op so that the load of the busiest device is as small as possible."""
    return _planned(
        problem, plan, contiguous if problem.contiguous else partial(scattered, problem)
    )


def dpl(problem: Problem, plan: Plan) -> Plan:
    """Cut a topological order into stages with the smallest maximum load for that order."""
    return _planned(problem, plan, by_order)


def pipedream(problem: Problem, plan: Plan) -> Plan:
    """Cut the model into stages where a single piece connects the parts before and after it.

    PipeDream's partition of a chain of layers, without replicas: branches stay on one device.
    """
    return _planned(problem, plan, between_necks)


def _planned(
    problem: Problem,
    plan: Plan,
    search: Callable[[Pieces, DeviceClasses], FoundPlacement | None],
) -> Plan:
    pieces, limit_bytes = pieces_of(problem), problem.memory_bytes
    require_runnable(problem, pieces.piece_of)
    for _ in range(_MAX_ROUNDS):
        found = search(pieces, device_classes(problem, limit_bytes))
        if found is None:
            break
        # The proof ignores the simulated peak, so it holds only where limits on bytes cannot bind.
        is_exact = int(pieces.memory_bytes.sum()) <= int(limit_bytes.min())
        is_exact |= problem.cluster.uses_stated_times
        device_of = found.device_of[pieces.piece_of].astype(np.int32)
        placed = _claimed(problem, plan, device_of, is_proven=found.is_proven and is_exact)
        over = simulate(problem, placed).peak_bytes - problem.memory_bytes
        if not np.any(over > 0):
            # The peak also has temporary tensors; the excess is taken off the limit for staying
            # bytes.
            return placed
        limit_bytes = np.maximum(limit_bytes - np.maximum(over, 0), 0)
    raise NoFeasiblePlanError(
        "no split was found in which every device can hold its part",
        hint="use more or larger devices, or another planner",
    )


def _claimed(problem: Problem, plan: Plan, device_of: IntArray, *, is_proven: bool) -> Plan:
    load_s = max_load_s(problem, device_of)
    bound_s = min(max_load_bound(problem), load_s)
    return plan.having(Placement(device_of)).claiming(
        max_load_s=load_s,
        load_bound_s=load_s if is_proven else bound_s,
        proven=is_proven or load_s <= bound_s * (1 + _EXACT),
    )
