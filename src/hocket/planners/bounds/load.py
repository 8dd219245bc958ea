"""Load: the work of all ops shared out as evenly as times and memory allow.

Give every class k of devices a weight w_k per second of each device, so that the weights of all
devices add up to 1, and a price m_k per byte. In any plan that fits, the busiest device works at
least as long as the weighted mean of all devices, and at least as long as that plus the prices of
the bytes held less the prices of all memory, which is not positive. Unit by unit that is at least

    sum over units of min over k (w_k · seconds on k + m_k · bytes)  -  sum over k of m_k · memory

whatever the weights and prices are: any choice proves a bound. The best choice is the dual of the
linear programme that splits units between classes; it is approached by Kelley's cutting planes:
each step prices the units, sees which class each would choose, and solves a tiny programme over all
choices seen. O(steps · classes · units).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.planners.bounds.classes import BoundClasses
from hocket.planners.bounds.units import BoundUnits

_MAX_STEPS = 60
_CLOSE = 1e-4
"""Stop when the programme promises less than this share more."""
_MAX_PRICE = 1e4
"""Of all held bytes together, in units of the work of all ops: keeps the first steps finite."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Load:
    """The bounds from load, and the weights that prove the first of them."""

    work_s: float
    """The work of all devices together."""
    memory_s: float
    """The same with memory counted; 0 where memory cannot matter."""
    crowd_s: float
    """More long units than devices: some device runs several of them."""
    weight: FloatArray
    """Per class: the weight of a second of each of its devices."""


def find_load(units: BoundUnits, classes: BoundClasses) -> Load:
    """The bounds from load."""
    seconds = np.array([np.bincount(units.of_op, row, units.count) for row in classes.op_s])
    held_bytes, memory_bytes = units.held_bytes, classes.memory_bytes
    nothing = np.zeros_like(held_bytes)
    work_s, weight = _best_weights(seconds, nothing, np.zeros_like(memory_bytes), classes)
    memory_s = 0.0
    total = held_bytes.sum()
    if memory_bytes.min() < total <= memory_bytes.sum() and len(seconds) > 1:
        memory_s, _ = _best_weights(seconds, held_bytes, memory_bytes, classes)
    crowd_s = _crowd_s(seconds.min(axis=0), int(classes.num_devices.sum()))
    return Load(work_s=work_s, memory_s=memory_s, crowd_s=crowd_s, weight=weight)


def shared_work_s(op_s: FloatArray, weight: FloatArray) -> FloatArray:
    """Per op: what it adds, at least, to the weighted mean of the devices' work."""
    shared: FloatArray = _weighted(op_s, weight).min(axis=0)
    return shared


def _weighted(seconds: FloatArray, weight: FloatArray) -> FloatArray:
    # Infinite times stay infinite where the weight is 0.
    return np.where(np.isfinite(seconds), seconds, 0.0) * weight[:, None] + np.where(
        np.isfinite(seconds), 0.0, np.inf
    )


def _best_weights(
    seconds: FloatArray, held_bytes: LongArray, memory_bytes: LongArray, classes: BoundClasses
) -> tuple[float, FloatArray]:
    """The largest bound found, in seconds, and its weights."""
    num_devices = classes.num_devices.astype(np.float64)
    num_classes = len(seconds)
    scale_s = float(seconds.min(axis=0).sum())
    total = float(held_bytes.sum())
    weight = np.full(num_classes, 1.0 / num_devices.sum())
    price = np.zeros(num_classes)
    best, best_weight = 0.0, weight
    cuts: list[FloatArray] = []
    while scale_s > 0:
        cut = _cut(seconds / scale_s, held_bytes, memory_bytes, total, weight, price)
        cuts.append(cut)
        value = float(cut @ np.concatenate((weight, price)))
        if value > best:
            best, best_weight = value, weight
        if num_classes == 1 or len(cuts) == _MAX_STEPS:
            break
        promised, weight, price = _programme(np.array(cuts), num_devices, total > 0)
        if promised <= best * (1 + _CLOSE):
            break
    return best * scale_s, best_weight


def _cut(
    seconds: FloatArray,
    held_bytes: LongArray,
    memory_bytes: LongArray,
    total: float,
    weight: FloatArray,
    price: FloatArray,
) -> FloatArray:
    """Work per class, then bytes per class less its memory, when each unit takes the cheapest."""
    num_classes = len(weight)
    share = held_bytes / total if total else held_bytes.astype(np.float64)
    choice = (_weighted(seconds, weight) + price[:, None] * share).argmin(axis=0)
    chosen_s = seconds[choice, np.arange(len(choice))]
    held = np.bincount(choice, share, num_classes)
    has = memory_bytes / total if total else np.zeros(num_classes)
    return np.concatenate((np.bincount(choice, chosen_s, num_classes), held - has))


def _programme(
    cuts: FloatArray, num_devices: FloatArray, with_prices: bool
) -> tuple[float, FloatArray, FloatArray]:
    """The weights and prices that look best after the cuts seen, and what they promise."""
    from scipy.optimize import linprog

    num_classes = len(num_devices)
    result = linprog(
        c=np.concatenate(([-1.0], np.zeros(2 * num_classes))),
        A_ub=np.hstack((np.ones((len(cuts), 1)), -cuts)),
        b_ub=np.zeros(len(cuts)),
        A_eq=np.concatenate(([0.0], num_devices, np.zeros(num_classes)))[None, :],
        b_eq=[1.0],
        bounds=[(None, None)]
        + [(0, None)] * num_classes
        + [(0, _MAX_PRICE if with_prices else 0)] * num_classes,
        method="highs",
    )
    weight = np.maximum(result.x[1 : num_classes + 1], 0.0)
    weight /= weight @ num_devices
    price = np.maximum(result.x[num_classes + 1 :], 0.0)
    return -float(result.fun), weight, price


def _crowd_s(unit_s: FloatArray, num_devices: int) -> float:
    """Of the q·n + 1 longest units some of n devices runs q + 1: at least the shortest of them."""
    longest_first = np.sort(unit_s)[::-1]
    summed = np.concatenate(([0.0], np.cumsum(longest_first)))
    last = np.arange(0, len(unit_s), num_devices)
    rounds = np.arange(len(last))
    return float((summed[last + 1] - summed[last - rounds]).max(initial=0.0))
