"""Placements that need not be contiguous: annealing from several starts, at several grains.

One start is the best contiguous split. The others begin with clusters: pieces are joined along
their costliest nets while the joint time stays below a part of the load that is aimed at, so that
what should not be cut moves as a whole. A coarse placement is annealed first, then refined on
smaller clusters and on the pieces themselves. The best over all starts is annealed once more with
little heat. Deterministic: tries are counted. O(starts · tries · nets per piece · devices).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.base.joined import JoinedSets
from hocket.plan.problem import Problem
from hocket.planners.max_load.classes import DeviceClasses, dual_weights, least_weighted
from hocket.planners.max_load.moves import Annealed, Heat, annealed
from hocket.planners.max_load.pieces import Pieces, gathered, merged_nets
from hocket.simulate.load import link_times

_MANY = 5000
"""Pieces above which fewer starts are tried and pieces are moved with little heat: they are so many
that heat would spoil more than the tries that there is time for could mend."""
_MAX_TRIES, _TRIES_PER_PIECE, _MAX_UPDATES = 600_000, 5000, 15_000_000
"""Of one annealing: tries, and tries times the loads that a moved piece touches."""
_GRAINS = ((0.3, 0.1), (0.12,), (0.06,), (0.2,))
"""Per start, the largest time of a cluster as parts of the load aimed at, coarse to fine."""
_WARM = (0.01, 0.03)
"""Heats from which the contiguous split is annealed."""
_HOT, _MILD, _LAST = 0.05, 0.005, 0.001
"""Heats of the coarsest clusters, of finer ones, and of the best placement at the end."""


@dataclass(frozen=True, eq=False)
class _Search:
    problem: Problem
    pieces: Pieces
    classes: DeviceClasses
    limit_bytes: LongArray
    is_alike: bool

    def results(self, start: IntArray) -> Iterator[Annealed]:
        """What each start leads to."""
        is_large = self.pieces.num_pieces > _MANY
        for seed, heat in enumerate(_WARM[:1] if is_large else _WARM):
            yield self.anneal(self.pieces, start, heat, seed)
        for seed, parts in enumerate(_GRAINS[:1] if is_large else _GRAINS):
            yield self.from_clusters(parts, seed)

    def anneal(self, grain: Pieces, device_of: IntArray, heat: float, seed: int) -> Annealed:
        nets_per_piece = len(grain.net_pieces) / max(grain.num_pieces, 1)
        updates_per_try = (1 + nets_per_piece) * self.problem.cluster.num_devices
        most = min(_MAX_TRIES, _TRIES_PER_PIECE * grain.num_pieces)
        settings = Heat(num_tries=int(min(_MAX_UPDATES / updates_per_try, most)), start=heat)
        if grain.num_pieces > _MANY:
            settings = settings._replace(start=min(heat, _LAST))
        return annealed(
            self.problem, grain, device_of, settings, limit_bytes=self.limit_bytes, seed=seed
        )

    def from_clusters(self, parts: tuple[float, ...], seed: int) -> Annealed:
        """Anneal ever smaller clusters and at last the pieces."""
        labels = self._labels(parts)
        coarsest = self._grain(labels[0])
        device_of = self.anneal(coarsest, self._spread(coarsest), _HOT, seed).device_of[labels[0]]
        for label in labels[1:]:
            grain = self._grain(label)
            begin = np.zeros(grain.num_pieces, dtype=np.int32)
            begin[label] = device_of
            device_of = self.anneal(grain, begin, _MILD, seed).device_of[label]
        return self.anneal(self.pieces, device_of, _MILD, seed)

    def _grain(self, label: IntArray) -> Pieces:
        grain = gathered(self.pieces, label, merge=self.is_alike)
        return grain if self.is_alike else merged_nets(grain, keep_maker=True)

    def _labels(self, parts: tuple[float, ...]) -> list[IntArray]:
        """The cluster of each piece, coarsest first; each level is made of clusters of the next."""
        labels: list[IntArray] = []
        grain, label = self.pieces, np.arange(self.pieces.num_pieces, dtype=np.int32)
        for part in sorted(parts):
            label = _clusters(grain, self.classes, part)[label]
            grain = self._grain(label)
            labels.insert(0, label)
        return labels

    def _spread(self, grain: Pieces) -> IntArray:
        """Equal stretches on all devices that pay for transfers, or where a cluster can run."""
        workers = np.flatnonzero(link_times(self.problem).pays)
        numbers = np.arange(grain.num_pieces)
        device_of = workers[numbers * len(workers) // max(grain.num_pieces, 1)]
        can_run = np.isfinite(grain.seconds[device_of, numbers])
        return np.where(can_run, device_of, grain.seconds.argmin(axis=0)).astype(np.int32)


def scattered(
    problem: Problem,
    pieces: Pieces,
    classes: DeviceClasses,
    start: IntArray,
    *,
    limit_bytes: LongArray,
    is_alike: bool,
    good_s: float,
) -> Annealed:
    """The best placement found, never worse than ``start``; stops at a load of ``good_s``."""
    search = _Search(problem, pieces, classes, limit_bytes, is_alike)
    best = Annealed(start, np.inf)
    for found in search.results(start):
        best = min(best, found, key=lambda result: result.max_load_s)
        if best.max_load_s <= good_s:
            return best
    return search.anneal(pieces, best.device_of, _LAST / 2, len(_GRAINS))


def _clusters(pieces: Pieces, classes: DeviceClasses, part: float) -> IntArray:
    """Join pieces along nets, costliest first, up to ``part`` of an even share of the work.

    A cluster that no device can run is never made: only pieces that run on the same devices join.
    """
    class_s = classes.piece_s(pieces)
    weight = dual_weights(class_s, classes.counts)
    weighted_s = least_weighted(weight, class_s)
    most = part * float(weighted_s.sum()) / float(classes.counts.sum())
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
