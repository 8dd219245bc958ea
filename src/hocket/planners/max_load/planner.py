"""Throughput: the placement with the smallest load of the busiest device.

In a pipeline, steps can follow each other as fast as the busiest device allows; its load is the
time of its ops and of the tensors that cross its boundary (`hocket.simulate.load`). With
``problem.contiguous`` no forward path leaves a device and comes back, and the optimum is proven
where the graph has few enough ideals (`contiguous`). Otherwise the contiguous split is the start
of a search over all placements (`scattered`). Bytes that stay on a device count against its memory;
where the simulator finds more at the peak, limits are lowered by that and the search runs again.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020;
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.base.joined import JoinedSets
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.max_load.bound import max_load_bound
from hocket.planners.max_load.classes import (
    DeviceClasses,
    device_classes,
    dual_weights,
    least_weighted,
)
from hocket.planners.max_load.contiguous import (
    between_necks,
    by_order,
    contiguous,
    limits_by_device,
)
from hocket.planners.max_load.moves import Annealed, Heat, annealed
from hocket.planners.max_load.pieces import Pieces, gathered, is_uniform, merged_nets, pieces_of
from hocket.simulate.engine import simulate
from hocket.simulate.load import link_times, max_load_s

# Placements that need not be contiguous: annealing from several starts, at several grains.
#
# One start is the best contiguous split. The others begin with clusters: pieces are joined along
# their costliest nets while the joint time stays below a part of the load that is aimed at, so that
# pieces that should stay together move together. A coarse placement is annealed first, then refined
# on smaller clusters and on the pieces themselves. The best over all starts is annealed once more
# with little heat. Deterministic: tries are counted. O(starts · tries · nets per piece · devices).

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
        """Annealed placements, one for each start."""
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


# Which of several equal devices gets which part, where links between them differ.
#
# Starting from the given numbering, the two devices whose exchange lowers the maximum load most are
# exchanged until none does. O(rounds · devices² · cut nets).

_NUMBERING_ROUNDS = 8
_NO_MOVES = Heat(num_tries=0)


def renumbered(
    problem: Problem, pieces: Pieces, classes: DeviceClasses, device_of: IntArray
) -> IntArray:
    """The same parts, on devices of the same classes."""
    used, part_of = np.unique(device_of, return_inverse=True)
    parts = gathered(pieces, part_of.astype(np.int32), merge=False)
    limit_bytes = problem.memory_bytes

    def load_s(chosen: IntArray) -> float:
        return annealed(problem, parts, chosen, _NO_MOVES, limit_bytes=limit_bytes).max_load_s

    device_of_part = used.astype(np.int32)
    best_s = load_s(device_of_part)
    for _ in range(_NUMBERING_ROUNDS):
        tried = [(load_s(other), other) for other in _exchanges(classes, device_of_part)]
        if not tried:
            break
        least_s, chosen = min(tried, key=lambda pair: pair[0])
        if least_s >= best_s:
            break
        best_s, device_of_part = least_s, chosen
    return device_of_part[part_of]


def _exchanges(classes: DeviceClasses, device_of_part: IntArray) -> list[IntArray]:
    """All numberings in which two devices of a class have changed places."""
    found = []
    for devices in classes.devices:
        for first, second in combinations(devices.tolist(), 2):
            has_first, has_second = device_of_part == first, device_of_part == second
            if has_first.any() or has_second.any():
                changed = np.where(has_first, second, np.where(has_second, first, device_of_part))
                found.append(changed.astype(np.int32))
    return found


# A placement that fits, whatever its loads: where no contiguous split does, a search starts here.
#
# Largest pieces first, each on the device with most free bytes that can run it. O(pieces ·
# devices).


def packed(pieces: Pieces, limit_bytes: LongArray) -> IntArray | None:
    """A device for each piece; None where a piece fits on no device."""
    free = limit_bytes.astype(np.float64)
    device_of = np.zeros(pieces.num_pieces, dtype=np.int32)
    for piece in np.argsort(-pieces.memory_bytes, kind="stable"):
        can_run = np.isfinite(pieces.seconds[:, piece])
        device = int(np.argmax(np.where(can_run, free, -np.inf)))
        free[device] -= pieces.memory_bytes[piece]
        if free[device] < 0 or not can_run[device]:
            return None
        device_of[piece] = device
    return device_of


_MAX_ROUNDS = 5
"""Maximum number of times that memory limits are lowered after a simulation."""
_EXACT = 1e-5
"""A load this close to its bound, relatively, is proven."""


@dataclass(frozen=True, eq=False)
class _Case:
    """A problem in pieces, with the bytes that each device may hold."""

    problem: Problem
    pieces: Pieces
    is_alike: bool
    """True if all links are equal, so that loads depend on sets of pieces alone."""
    limit_bytes: LongArray

    @cached_property
    def classes(self) -> DeviceClasses:
        return device_classes(self.problem, self.limit_bytes)

    @property
    def bound_s(self) -> float:
        """Lower bound on the maximum load of any placement, independent of ``limit_bytes``."""
        return max_load_bound(self.problem)

    @property
    def memory_is_exact(self) -> bool:
        """True if the sums of bytes that stay are all that memory can forbid."""
        holds_all = int(self.pieces.memory_bytes.sum()) <= int(self.limit_bytes.min())
        return holds_all or self.problem.cluster.uses_stated_times


@dataclass(frozen=True, eq=False)
class _Answer:
    device_of: IntArray
    """Per piece."""
    is_proven: bool = False


def throughput(problem: Problem, plan: Plan) -> Plan:
    """Place every op so that the busiest device has as little to do as possible."""
    return _planned(problem, plan, _contiguous if problem.contiguous else _scattered)


def dpl(problem: Problem, plan: Plan) -> Plan:
    """Cut a topological order into stages, as well as that order allows."""
    return _planned(problem, plan, _by_order)


def pipedream(problem: Problem, plan: Plan) -> Plan:
    """Cut the model into stages where a single piece connects what is before to what is after.

    PipeDream's partition of a chain of layers, without replicas: branches stay on one device.
    """
    return _planned(problem, plan, _between_necks)


def _planned(problem: Problem, plan: Plan, search: Callable[[_Case], _Answer | None]) -> Plan:
    pieces = pieces_of(problem)
    _require_runnable(problem, pieces)
    case = _Case(problem, pieces, is_uniform(link_times(problem)), problem.memory_bytes)
    for _ in range(_MAX_ROUNDS):
        answer = search(case)
        if answer is None:
            break
        placed = _with_answer(case, plan, answer)
        over = simulate(problem, placed).peak_bytes - problem.memory_bytes
        if not np.any(over > 0):
            return placed
        limits = case.limit_bytes - np.maximum(over, 0)
        case = replace(case, limit_bytes=np.maximum(limits, 0))
    raise NoFeasiblePlanError(
        "no split was found in which every device can hold its part",
        hint="use more or larger devices, or another planner",
    )


def _with_answer(case: _Case, plan: Plan, answer: _Answer) -> Plan:
    device_of = answer.device_of[case.pieces.piece_of].astype(np.int32)
    load_s = max_load_s(case.problem, device_of)
    bound = min(case.bound_s, load_s)
    return plan.having(Placement(device_of)).claiming(
        max_load_s=load_s,
        load_bound_s=load_s if answer.is_proven else bound,
        proven=answer.is_proven or load_s <= bound * (1 + _EXACT),
    )


def _contiguous(case: _Case) -> _Answer | None:
    found = contiguous(case.problem, case.pieces, case.classes, is_alike=case.is_alike)
    if found is None:
        return None
    answer = _Answer(
        _renumbered(case, found.device_of), is_proven=found.is_proven and case.memory_is_exact
    )
    if case.is_alike:
        return answer
    # Where links differ, the search works with their means, and the best of it need not be best.
    first = _by_order(case)
    answers = [answer] if first is None else [answer, first]
    return min(
        answers,
        key=lambda tried: max_load_s(case.problem, tried.device_of[case.pieces.piece_of]),
    )


def _by_order(case: _Case) -> _Answer | None:
    found = by_order(case.pieces, case.classes, is_alike=case.is_alike)
    return None if found is None else _Answer(_renumbered(case, found.device_of))


def _between_necks(case: _Case) -> _Answer | None:
    found = between_necks(case.pieces, case.classes, is_alike=case.is_alike)
    return None if found is None else _Answer(_renumbered(case, found.device_of))


def _scattered(case: _Case) -> _Answer | None:
    limit_bytes = limits_by_device(case.problem, case.classes)
    found = _contiguous(case)
    start = packed(case.pieces, limit_bytes) if found is None else found.device_of
    if start is None:
        return None
    best = scattered(
        case.problem, case.pieces, case.classes, start,
        limit_bytes=limit_bytes, is_alike=case.is_alike, good_s=case.bound_s * (1 + _EXACT),
    )  # fmt: skip
    return _Answer(best.device_of)


def _renumbered(case: _Case, device_of: IntArray) -> IntArray:
    """Which of equal devices has which part matters only where links differ."""
    if case.is_alike:
        return device_of
    return renumbered(case.problem, case.pieces, case.classes, device_of)


def _require_runnable(problem: Problem, pieces: Pieces) -> None:
    stuck = np.flatnonzero(~np.isfinite(pieces.seconds).any(axis=0))
    if len(stuck):
        name = problem.graph.op_names[int(np.flatnonzero(pieces.piece_of == stuck[0])[0])]
        raise NoFeasiblePlanError(
            f"no device can run op {name!r} with the ops that must sit with it",
            hint="add a device of a kind that can run it",
        )
