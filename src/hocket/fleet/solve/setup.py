"""From a market to the tables of the solvers, and back from classes to jobs.

Kinds of devices that nobody can tell apart are pooled as jobs are: a job gets of each as much of
the pool as there is of it, so that a policy that takes all kinds for equal treats them equally.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.fleet.market import Market
from hocket.fleet.solve.classes import JobClasses, find_classes
from hocket.fleet.solve.ladder import Ladder
from hocket.fleet.solve.price_tables import Crowd
from hocket.kernels.containers import table

_GRID_BITS = 38


@dataclass(frozen=True, eq=False, kw_only=True)
class SolveSetup:
    """Classes of jobs, pools of devices, and how to expand an answer about them."""

    classes: JobClasses
    crowd: Crowd
    spread: FloatArray
    """``[column of the crowd, column of the market]``: how a share divides over pooled kinds."""
    can_run: BoolArray
    """``[job]``: whether any device may run it."""
    snapping: float
    """Largest relative change of a rate by making nearly equal ones equal."""

    def expand(self, shares: FloatArray) -> FloatArray:
        """Shares of jobs on the kinds of the market."""
        return np.asarray((shares @ self.spread)[self.classes.of])


def set_up(market: Market, ladder: Ladder, *, pools_kinds: bool = True) -> SolveSetup:
    """Classes and pools of a market as a ladder sees it."""
    exact = [market.gang[:, None].astype(float), ladder.marks]
    if market.pairs is not None:
        exact.append(market.pairs.profile_of[:, None].astype(float))
    classes = find_classes(ladder.rates, np.hstack(exact))
    group_of = np.arange(market.num_kinds)
    if pools_kinds and market.pairs is None:
        group_of = _alike_columns(classes.rows)
    spread, first = _spread(market, group_of)
    capacity = np.bincount(np.searchsorted(first, group_of), market.num_devices, len(first))
    rates = classes.rows[:, first]
    # Snapped rows stand for all jobs of a class, so the worst change is over all jobs.
    change = np.abs(classes.rows[classes.of] - ladder.rates)
    relative = change / np.maximum(ladder.rates, 1e-300)
    return SolveSetup(
        classes=classes,
        crowd=Crowd(
            rates=table(rates, np.float64),
            num_jobs=table(classes.num_jobs, np.float64),
            gang=table(market.gang[classes.first], np.float64),
            capacity=table(np.maximum(capacity, 1e-9), np.float64),
        ),
        spread=spread,
        can_run=np.asarray((ladder.rates > 0.0).any(axis=1)),
        snapping=float(relative.max(initial=0.0)),
    )


def trim(shares: FloatArray) -> FloatArray:
    """Shares with a shorter mantissa, rounded down: limits stay kept and noise does not show."""
    fraction, exponent = np.frexp(shares)
    return np.asarray(np.ldexp(np.floor(np.ldexp(fraction, _GRID_BITS)), exponent - _GRID_BITS))


def _alike_columns(rates: FloatArray) -> LongArray:
    """The first column that each column equals for every class."""
    group_of = np.arange(rates.shape[1])
    for column in range(1, rates.shape[1]):
        for other in range(column):
            if group_of[other] == other and np.array_equal(rates[:, column], rates[:, other]):
                group_of[column] = other
                break
    return group_of


def _spread(market: Market, group_of: LongArray) -> tuple[FloatArray, LongArray]:
    first = np.unique(group_of)
    spread = np.zeros((len(first), market.num_kinds))
    for row, column in enumerate(first):
        members = np.flatnonzero(group_of == column)
        devices = market.num_devices[members].astype(float)
        spread[row, members] = devices / max(devices.sum(), 1.0) if len(members) > 1 else 1.0
    return spread, first
