"""The highest level of many jobs that may share devices: an interior-point method.

Mehrotra's predictor-corrector method (SIAM Journal on Optimization 1992) on the program of a few
columns per job. Its equations are solved by conjugate gradients only as exactly as a step needs
(Gondzio, "Matrix-free interior point method", 2012). O(columns) per iteration of the gradients,
some tens of them per step at first and some hundreds in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.solve.pair_tables import Preconditioner, ShareColumns, new_guide

_MAX_STEPS = 40
_MAX_GRADIENTS = 400
_EXACT, _ROUGH = 1e-4, 1e-2
"""Accuracy of the equations of a step, and of those that only predict where it leads."""
_NEAREST = 0.99
"""Longest step, as a part of the distance to the boundary."""
_LEAST_CENTRING = 0.02


@dataclass(frozen=True, eq=False, kw_only=True)
class Inside:
    """An answer that is inside of all limits but for its residuals."""

    amount: FloatArray
    """``[column]``: summed time."""
    level: float
    dual: FloatArray
    """``[row]``."""
    work: int
    """Columns times iterations of the gradients."""


def climb_inside(
    columns: ShareColumns,
    rise: FloatArray,
    limit: FloatArray,
    dual: FloatArray,
    num_jobs: int,
    accuracy: float,
    max_work: int,
) -> Inside:
    """The highest level at which columns and level x ``rise`` keep ``limit``, row by row.

    To a relative ``accuracy``, or as far as ``max_work`` goes, from any duals of the rows.
    """
    guide = new_guide(num_jobs, len(rise) - 2 * num_jobs)
    num_columns, gradients = len(columns.job_a), 0
    at = _NewtonStep(columns, rise, limit, guide, *_start(columns, limit, dual, num_jobs))
    for _ in range(_MAX_STEPS):
        if at.is_done(accuracy) or gradients * num_columns > max_work:
            break
        # Equations that are hardly solvable may lead anywhere, which is found out afterwards.
        with np.errstate(over="ignore", invalid="ignore"):
            have, cost, is_exact = at.taken()
            reached = _NewtonStep(columns, rise, limit, guide, have, cost)
        gradients += at.gradients
        # Nothing better comes of equations that are not solved; the point so far is inside.
        if not is_exact or not reached.is_nearer(at, accuracy):
            break
        at = reached
    return Inside(
        amount=at.have[:num_columns],
        level=float(at.have[num_columns]),
        dual=at.cost[num_columns + 1 :],
        work=num_columns * gradients,
    )


def _start(
    columns: ShareColumns, limit: FloatArray, dual: FloatArray, num_jobs: int
) -> tuple[FloatArray, FloatArray]:
    """Amounts, level and slack, and the costs of each of them: all well above 0."""
    shared_by = np.bincount(columns.job_a, minlength=len(limit) + 1)
    shared_by += np.bincount(columns.job_b, minlength=len(limit) + 1)
    shared_by[-1] = 0
    amount = 0.8 / np.maximum(shared_by[columns.job_a], shared_by[columns.job_b])
    slack = np.maximum(0.4 * np.abs(limit), 0.4)
    dual = np.maximum(dual, 0.1)
    cost = np.maximum(_costs(columns, dual, num_jobs), 0.3)
    return np.concatenate([amount, [1.0], slack]), np.concatenate([cost, [1.0], dual])


def _uses(columns: ShareColumns, amount: FloatArray, num_rows: int, num_jobs: int) -> FloatArray:
    from hocket.fleet.solve.interior_kernel import use_of_rows

    rows = np.empty(num_rows + num_jobs + 1)
    use_of_rows(columns, amount, num_jobs, rows)
    return rows[:num_rows]


def _costs(columns: ShareColumns, dual: FloatArray, num_jobs: int) -> FloatArray:
    from hocket.fleet.solve.interior_kernel import cost_of_columns

    cost = np.empty(len(columns.job_a))
    cost_of_columns(columns, np.concatenate([dual, np.zeros(num_jobs + 1)]), num_jobs, cost)
    return cost


class _NewtonStep:
    """One step of the method from a point of amounts, level and slack and the cost of each."""

    def __init__(
        self,
        columns: ShareColumns,
        rise: FloatArray,
        limit: FloatArray,
        guide: Preconditioner,
        have: FloatArray,
        cost: FloatArray,
    ) -> None:
        self.columns, self.rise, self.guide = columns, rise, guide
        self.have, self.cost, self.num_jobs = have, cost, len(guide.block)
        self.num_columns, self.num_rows = len(columns.job_a), len(rise)
        # A level is worth as much as all demands together, so that duals of jobs are about 1.
        self.reward = float(np.abs(rise).sum())
        self.lacking = limit - self.used_by(have)
        dual = cost[self.num_columns + 1 :]
        self.unpaid = self.costs_at(dual) - cost
        self.unpaid[self.num_columns] -= self.reward
        self.middle = float(have @ cost) / len(have)
        self.gradients = 0
        self.missing = float(have @ cost) / (self.reward * float(have[self.num_columns]))

    def used_by(self, have: FloatArray) -> FloatArray:
        """Use of every row by amounts, level and slack."""
        amount, level = have[: self.num_columns], have[self.num_columns]
        used = _uses(self.columns, amount, self.num_rows, self.num_jobs)
        return np.asarray(used + self.rise * level + have[self.num_columns + 1 :])

    def costs_at(self, dual: FloatArray) -> FloatArray:
        """Cost of amounts, level and slack at duals of the rows."""
        return np.concatenate([_costs(self.columns, dual, self.num_jobs), [self.rise @ dual], dual])

    def is_done(self, accuracy: float) -> bool:
        """True if level and limits are as exact as wanted."""
        return self.missing <= accuracy and float(np.abs(self.lacking).max()) <= accuracy

    def is_nearer(self, before: _NewtonStep, accuracy: float) -> bool:
        """True if limits are kept no worse than before the step, as solved equations promise."""
        lacking, allowed = float(np.abs(self.lacking).max()), float(np.abs(before.lacking).max())
        return lacking <= 1.5 * allowed + accuracy and bool(np.isfinite(self.missing))

    def taken(self) -> tuple[FloatArray, FloatArray, bool]:
        """The next point, and whether its equations were solved well enough to go on."""
        self._set_guide()
        product = self.have * self.cost
        nowhere = np.zeros(self.guide.work.shape[1])
        first, first_cost, dual, _ = self._towards(-product, nowhere, _ROUGH)
        primal, price = _length(self.have, first), _length(self.cost, first_cost)
        reached = (self.have + primal * first) @ (self.cost + price * first_cost) / len(product)
        centring = max(float(reached / self.middle) ** 3, _LEAST_CENTRING)
        wanted = centring * self.middle - product - first * first_cost
        move, move_cost, _, is_exact = self._towards(wanted, dual, _EXACT)
        primal = _NEAREST * _length(self.have, move)
        price = _NEAREST * _length(self.cost, move_cost)
        return self.have + primal * move, self.cost + price * move_cost, is_exact

    def _set_guide(self) -> None:
        from hocket.fleet.solve.interior_kernel import set_guide

        ratio, at = self.have / self.cost, self.num_columns
        self.weight, self.level_weight = ratio[:at], float(ratio[at])
        self.guide.diagonal[:] = ratio[at + 1 :]
        set_guide(self.columns, self.weight, self.rise, self.guide)
        self.guide.corner[-1, -1] -= 1.0 / self.level_weight
        self.guide.inverse[:] = np.linalg.inv(self.guide.corner)

    def _towards(
        self, wanted: FloatArray, start: FloatArray, exact: float
    ) -> tuple[FloatArray, FloatArray, FloatArray, bool]:
        """The change of the point that makes the products of amounts and costs as wanted."""
        from hocket.fleet.solve.interior_kernel import solve_step

        right = self.used_by((wanted - self.have * self.unpaid) / self.cost) - self.lacking
        step = start.copy()
        iterations = solve_step(
            self.columns,
            self.weight,
            self.rise,
            self.level_weight,
            self.guide,
            right,
            step,
            exact,
            _MAX_GRADIENTS,
        )
        self.gradients += iterations
        move_cost = self.costs_at(step[: self.num_rows]) + self.unpaid
        return (
            (wanted - self.have * move_cost) / self.cost,
            move_cost,
            step,
            iterations < _MAX_GRADIENTS,
        )


def _length(values: FloatArray, move: FloatArray) -> float:
    """Step length that keeps values positive, at most 1."""
    falling = move < 0.0
    return float(np.min(-values[falling] / move[falling], initial=1.0))
