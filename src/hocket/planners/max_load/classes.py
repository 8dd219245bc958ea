"""Classes of equal devices, and weights that bound loads from below.

For any weights per class, the sum over pieces of their least weighted time is at most the maximum
load times the weights of all devices: each device has at most the maximum load. The best weights
are the dual of the assignment in which pieces may be split fractionally (a small linear programme).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.plan.problem import Problem
from hocket.planners.max_load.pieces import Pieces
from hocket.simulate.load import LinkTimes, link_times

_MAX_USAGES = 4096
"""Above so many device usages (devices used per class), similar classes are merged."""
_MAX_MASKED = 4
"""Up to so many classes, each set of classes that may be left gets weights of its own."""
_MAX_LP_PIECES = 2000
"""Weights for more pieces are found on sums of stretches of them: any weights are valid."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceClasses:
    """Devices of one class run every piece in the same time and pay the same for every net."""

    devices: tuple[IntArray, ...]
    """Per class."""
    limit_bytes: LongArray
    latency_s: FloatArray
    """Per class: what a crossing tensor costs on average over the others; 0 if it pays nothing."""
    unit_s: FloatArray
    least_latency_s: FloatArray
    """As `latency_s`, over the nearest other."""
    least_unit_s: FloatArray

    @property
    def counts(self) -> LongArray:
        """Devices per class."""
        return np.array([len(devices) for devices in self.devices], dtype=np.int64)

    def piece_s(self, pieces: Pieces) -> FloatArray:
        """[class, piece]: seconds."""
        return pieces.seconds[[int(devices[0]) for devices in self.devices]]

    def net_s(self, pieces: Pieces) -> FloatArray:
        """[class, net]: seconds that a device pays for having the net cut."""
        return self.latency_s[:, None] * pieces.net_count + self.unit_s[:, None] * pieces.net_work

    def least_net_s(self, pieces: Pieces) -> FloatArray:
        """As `net_s`, if every device talked to its nearest."""
        latency_s, unit_s = self.least_latency_s[:, None], self.least_unit_s[:, None]
        return latency_s * pieces.net_count + unit_s * pieces.net_work

    def weights(self, class_s: FloatArray) -> tuple[FloatArray, LongArray]:
        """Weights [row, class] for bounds on what is left, and the row for each set of classes.

        A set is a bit mask. Infinite for a class that the row does not count. With many classes one
        row of equal weights serves all sets.
        """
        num = len(self.devices)
        if num > _MAX_MASKED:
            return np.ones((1, num)), np.zeros(1 << num, dtype=np.int64)
        rows = [np.ones(num)]
        for mask in range(1, 1 << num):
            counted = np.array([bool(mask >> kind & 1) for kind in range(num)])
            row = np.full(num, np.inf)
            row[counted] = dual_weights(class_s[counted], self.counts[counted])
            rows.append(row)
        return np.array(rows), np.arange(1 << num)

    def devices_of(self, class_of: IntArray) -> IntArray:
        """A device for each stage, given their classes: those of a class in order."""
        used = [0] * len(self.devices)
        chosen = np.zeros(len(class_of), dtype=np.int32)
        for stage, kind in enumerate(class_of.tolist()):
            chosen[stage] = self.devices[kind][used[kind]]
            used[kind] += 1
        return chosen


def device_classes(problem: Problem, limit_bytes: LongArray) -> DeviceClasses:
    """Group the devices of a problem whose usable bytes are ``limit_bytes``.

    On clusters with many different devices, classes that differ in memory or links alone become one
    with the least memory and the mean of the links.
    """
    links = link_times(problem)
    latency_s, unit_s = _means(links, links.latency_s), _means(links, links.unit_s)
    rows = problem.costs.device_row.tolist()
    keys = list(zip(rows, limit_bytes.tolist(), latency_s.tolist(), unit_s.tolist(), strict=True))
    found = _grouped(keys)
    if np.prod([len(devices) + 1.0 for devices in found]) > _MAX_USAGES:
        found = _grouped([(row, pays) for row, pays in zip(rows, links.pays.tolist(), strict=True)])
    return DeviceClasses(
        devices=tuple(found),
        limit_bytes=np.array([limit_bytes[devices].min() for devices in found], dtype=np.int64),
        latency_s=np.array([latency_s[devices].mean() for devices in found]),
        unit_s=np.array([unit_s[devices].mean() for devices in found]),
        least_latency_s=_least(links, links.latency_s, found),
        least_unit_s=_least(links, links.unit_s, found),
    )


def least_weighted(weight: FloatArray, seconds: FloatArray) -> FloatArray:
    """Per item: the least weighted time over the classes; infinite where none can run it."""
    can_run = np.isfinite(seconds)
    weighted = weight[:, None] * np.where(can_run, seconds, 0.0)
    least: FloatArray = np.where(can_run, weighted, np.inf).min(axis=0, initial=np.inf)
    return least


def dual_weights(class_s: FloatArray, counts: LongArray) -> FloatArray:
    """Weights per class that make the bound as large as they can; all 1 where that is unclear."""
    num_classes, num_pieces = class_s.shape
    if num_classes == 1 or num_pieces == 0:
        return np.ones(num_classes)
    if num_classes == 2:
        return _two_weights(class_s, counts)
    if num_pieces > _MAX_LP_PIECES:
        bounds = np.arange(_MAX_LP_PIECES) * num_pieces // _MAX_LP_PIECES
        return dual_weights(np.add.reduceat(class_s, bounds, axis=1), counts)
    return _solved(class_s, counts)


def _two_weights(class_s: FloatArray, counts: LongArray) -> FloatArray:
    """Of two classes: 1 and the best of the ratios at which a piece changes sides, or 0 and 1."""
    first, second = class_s
    can_first, can_second = np.isfinite(first), np.isfinite(second)
    only_first_s = first[can_first & ~can_second].sum()
    only_second_s = second[can_second & ~can_first].sum()
    both = can_first & can_second & (second > 0)
    ratio = first[both] / second[both]
    order = np.argsort(ratio, kind="stable")
    tried = np.append(ratio[order], 0.0)
    stays = np.searchsorted(ratio[order], tried, side="right")
    first_s = np.concatenate(([0.0], np.cumsum(first[both][order])))[stays] + only_first_s
    second_s = np.append(np.cumsum(second[both][order][::-1])[::-1], 0.0)[stays] + only_second_s
    bound_s = (first_s + tried * second_s) / (counts[0] + tried * counts[1])
    best = int(np.argmax(bound_s))
    if only_second_s / counts[1] > bound_s[best]:
        return np.array([0.0, 1.0])
    return np.array([1.0, tried[best]])


def _solved(class_s: FloatArray, counts: LongArray) -> FloatArray:
    """Maximise the sum of z, with z[piece] <= w[class] * seconds and the devices' weights 1."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    num_classes, num_pieces = class_s.shape
    kind, piece = np.nonzero(np.isfinite(class_s))
    seconds = class_s[kind, piece]
    scale_s = seconds.max(initial=0.0) or 1.0
    rows = np.arange(len(kind))
    matrix = coo_array(
        (
            np.concatenate((np.ones(len(kind)), -seconds / scale_s)),
            (np.concatenate((rows, rows)), np.concatenate((piece, num_pieces + kind))),
        ),
        (len(kind), num_pieces + num_classes),
    )
    goal = np.concatenate((-np.ones(num_pieces), np.zeros(num_classes)))
    total = np.concatenate((np.zeros(num_pieces), counts))[None]
    result = linprog(goal, A_ub=matrix.tocsr(), b_ub=np.zeros(len(kind)), A_eq=total, b_eq=[1.0])
    if result.x is None:
        return np.ones(num_classes)
    weights: FloatArray = np.maximum(result.x[num_pieces:], 0.0)
    return weights


def _grouped(keys: Sequence[tuple[float, ...]]) -> list[IntArray]:
    """Devices with equal keys, in the order in which the keys first come."""
    found: dict[tuple[float, ...], list[int]] = {}
    for device, key in enumerate(keys):
        found.setdefault(key, []).append(device)
    return [np.array(devices, dtype=np.int32) for devices in found.values()]


def _least(links: LinkTimes, per_pair: FloatArray, classes: list[IntArray]) -> FloatArray:
    """Per class: the least over pairs of a device of it and another; 0 where it pays nothing."""
    apart = np.where(np.eye(len(per_pair), dtype=np.bool_), np.inf, per_pair)
    nearest = np.minimum(apart.min(axis=0), apart.min(axis=1))
    nearest = np.where(links.pays & np.isfinite(nearest), nearest, 0.0)
    return np.array([nearest[devices].min() for devices in classes])


def _means(links: LinkTimes, per_pair: FloatArray) -> FloatArray:
    """Per device: the mean over its partners, in and out; 0 where it pays nothing."""
    others = max(len(per_pair) - 1, 1)
    both = (per_pair.sum(axis=0) + per_pair.sum(axis=1)) / (2 * others)
    return np.where(links.pays, both, 0.0)
