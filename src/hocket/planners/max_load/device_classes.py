"""Classes of equal devices, and weights per class that give lower bounds on the maximum load.

Every device has at most the maximum load. So for any weights per class, the sum over pieces of
their least weighted time is at most the maximum load times the sum of all devices' weights. The
best weights are the dual of the assignment in which pieces may be split fractionally (a small
linear programme).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.plan.problem import Problem
from hocket.planners.max_load.load_pieces import Pieces
from hocket.simulate.load import LinkTimes, link_times

_MAX_USAGES = 4096
"""Limit on device usages (devices used per class), above which similar classes are merged."""
_MAX_LP_PIECES = 2000
"""Number of pieces above which the linear programme uses sums over runs of pieces.

The bound stays valid, because any weights are valid.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceClasses:
    """Classes of devices with the same time for every piece and the same cost for every net."""

    devices: tuple[IntArray, ...]
    """Per class: its devices."""
    limit_bytes: LongArray
    latency_s: FloatArray
    """Per class: mean latency of a crossing tensor over other devices; 0 if transfers are free."""
    unit_s: FloatArray
    least_latency_s: FloatArray
    """Per class: latency of a crossing tensor to the nearest other device."""
    least_unit_s: FloatArray

    @property
    def counts(self) -> LongArray:
        """Per class: number of devices."""
        return np.array([len(devices) for devices in self.devices], dtype=np.int64)

    def piece_s(self, pieces: Pieces) -> FloatArray:
        """[class, piece]: seconds."""
        return pieces.seconds[[int(devices[0]) for devices in self.devices]]

    def net_s(self, pieces: Pieces) -> FloatArray:
        """[class, net]: seconds that a device pays if the net is cut."""
        return self.latency_s[:, None] * pieces.net_count + self.unit_s[:, None] * pieces.net_work

    def least_net_s(self, pieces: Pieces) -> FloatArray:
        """[class, net]: seconds that a device pays if the net is cut, with its nearest device."""
        latency_s, unit_s = self.least_latency_s[:, None], self.least_unit_s[:, None]
        return latency_s * pieces.net_count + unit_s * pieces.net_work

    def devices_of(self, class_of: IntArray) -> IntArray:
        """Per stage: a device of the stage's class; each device is used once, in order."""
        used = [0] * len(self.devices)
        chosen = np.zeros(len(class_of), dtype=np.int32)
        for stage, device_class in enumerate(class_of.tolist()):
            chosen[stage] = self.devices[device_class][used[device_class]]
            used[device_class] += 1
        return chosen


def device_classes(problem: Problem, limit_bytes: LongArray) -> DeviceClasses:
    """Group the devices of a problem whose usable bytes are ``limit_bytes``.

    If there are too many device usages, classes that differ only in memory or links are merged,
    with the least memory and the mean of the links.
    """
    links = link_times(problem)
    latency_s, unit_s = _means(links, links.latency_s), _means(links, links.unit_s)
    rows = problem.costs.device_row.tolist()
    keys = list(zip(rows, limit_bytes.tolist(), latency_s.tolist(), unit_s.tolist(), strict=True))
    found = _grouped(keys)
    # In floating point, because the product of integers may overflow.
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
    """Per item: least weighted time over the classes; infinite if no class can run it."""
    can_run = np.isfinite(seconds)
    # 0 times infinity would be NaN, so times are masked before they are weighted.
    weighted = weight[:, None] * np.where(can_run, seconds, 0.0)
    least: FloatArray = np.where(can_run, weighted, np.inf).min(axis=0, initial=np.inf)
    return least


def dual_weights(class_s: FloatArray, counts: LongArray) -> FloatArray:
    """Weights per class that maximise the lower bound; all 1 if there is no solution."""
    num_classes, num_pieces = class_s.shape
    if num_classes == 1 or num_pieces == 0:
        return np.ones(num_classes)
    if num_pieces > _MAX_LP_PIECES:
        # Runs of consecutive pieces stand for their sum.
        bounds = np.arange(_MAX_LP_PIECES) * num_pieces // _MAX_LP_PIECES
        return dual_weights(np.add.reduceat(class_s, bounds, axis=1), counts)
    return _solved(class_s, counts)


def _solved(class_s: FloatArray, counts: LongArray) -> FloatArray:
    """Maximise sum(z) subject to z[piece] <= weight[class] * seconds[class, piece].

    The weights of all devices sum to 1.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    num_classes, num_pieces = class_s.shape
    device_class, piece = np.nonzero(np.isfinite(class_s))
    seconds = class_s[device_class, piece]
    # The solver's tolerances are absolute, so times are scaled to at most 1.
    scale_s = seconds.max(initial=0.0) or 1.0
    rows = np.arange(len(device_class))
    matrix = coo_array(
        (
            np.concatenate((np.ones(len(device_class)), -seconds / scale_s)),
            (np.concatenate((rows, rows)), np.concatenate((piece, num_pieces + device_class))),
        ),
        (len(device_class), num_pieces + num_classes),
    )
    goal = np.concatenate((-np.ones(num_pieces), np.zeros(num_classes)))
    total = np.concatenate((np.zeros(num_pieces), counts))[None]
    result = linprog(
        goal, A_ub=matrix.tocsr(), b_ub=np.zeros(len(device_class)), A_eq=total, b_eq=[1.0]
    )
    if result.x is None:
        # Any weights give a valid bound, so a failed solve only weakens it.
        return np.ones(num_classes)
    weights: FloatArray = np.maximum(result.x[num_pieces:], 0.0)
    return weights


def _grouped(keys: Sequence[tuple[float, ...]]) -> list[IntArray]:
    """Group devices with equal keys, in the order in which the keys first appear."""
    found: dict[tuple[float, ...], list[int]] = {}
    for device, key in enumerate(keys):
        found.setdefault(key, []).append(device)
    return [np.array(devices, dtype=np.int32) for devices in found.values()]


def _least(links: LinkTimes, per_pair: FloatArray, classes: list[IntArray]) -> FloatArray:
    """Per class: least value between one of its devices and another; 0 if transfers are free."""
    apart = np.where(np.eye(len(per_pair), dtype=np.bool_), np.inf, per_pair)
    nearest = np.minimum(apart.min(axis=0), apart.min(axis=1))
    nearest = np.where(links.pays & np.isfinite(nearest), nearest, 0.0)
    return np.array([nearest[devices].min() for devices in classes])


def _means(links: LinkTimes, per_pair: FloatArray) -> FloatArray:
    """Per device: mean value over other devices, in and out; 0 if transfers are free."""
    others = max(len(per_pair) - 1, 1)
    both = (per_pair.sum(axis=0) + per_pair.sum(axis=1)) / (2 * others)
    return np.where(links.pays, both, 0.0)
