"""Linear programs over job classes: sums of throughput, and levels with pairs on shared devices.

Variables are the summed time of each class on each column, alone and in pairs. Solved by HiGHS
(Huangfu and Hall, Mathematical Programming Computation 2018) through scipy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.fleet.solve.price_tables import JobClassTable
from hocket.fleet.solve.prices import Duals

_LARGE = 300
"""Number of rows from which on a program counts as large."""

if TYPE_CHECKING:
    from hocket.fleet.solve.sharing import PairColumns


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearProgram:
    """Classes, and the pairs of classes that may share devices."""

    job_classes: JobClassTable
    pairs: FloatArray | None = None
    """``[column, class a, class b]``: progress of a beside b."""
    columns: PairColumns | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Solved:
    """Summed time of classes, and the duals."""

    level: float
    alone: FloatArray
    """``[class, column]``."""
    together: FloatArray
    """One per pair column."""
    pair_value: float
    """Part of the sum that is earned in pairs."""
    bound: float
    """Upper bound by the duals."""
    duals: Duals


def solve(program: LinearProgram, *, base: FloatArray, slope: FloatArray, near: float) -> Solved:
    """Find the highest level at which every class makes ``base + slope x level`` progress per job.

    ``near`` is a level of the expected size: rows are scaled by it, because the tolerances of the
    solver are absolute.
    """
    num_jobs = np.asarray(program.job_classes.num_jobs)
    parts = _ProgramRows(program)
    matrix = parts.matrix(level_column=num_jobs * slope * near)
    # Demands that no longer rise are already met exactly, so a margin is left for rounding.
    due = np.where(slope > 0.0, base, base * (1.0 - 1e-9))
    limits = np.concatenate([-num_jobs * due, num_jobs, program.job_classes.capacity])
    value = np.zeros(matrix.shape[1])
    # The level is the last variable and the whole objective.
    value[-1] = 1.0
    demand = base + slope * near
    unit = np.where(demand > 0.0, demand, parts.fastest)
    return parts.answer(value, matrix, limits, unit, near)


def maximise(program: LinearProgram, step_value: FloatArray, need: FloatArray) -> Solved:
    """Maximise the summed value of progress ``[class, column]`` while each job makes ``need``."""
    num_jobs = np.asarray(program.job_classes.num_jobs)
    parts = _ProgramRows(program)
    matrix = parts.matrix(level_column=np.zeros(len(num_jobs)))
    limits = np.concatenate([-num_jobs * need, num_jobs, program.job_classes.capacity])
    alone = (step_value * program.job_classes.rates)[parts.one, parts.at]
    together = parts.pair_values(step_value)
    value = np.concatenate([alone, together, [0.0]])
    unit = np.where(need > 0.0, need, parts.fastest)
    return parts.answer(value, matrix, limits, unit, float(value.max(initial=1e-300)))


class _ProgramRows:
    """Builds the program. Rows: demands of classes, times of classes, devices of pools; the last
    column is the level."""

    def __init__(self, program: LinearProgram) -> None:
        self.program = program
        self.one, self.at = np.nonzero(np.asarray(program.job_classes.rates) > 0.0)
        fastest = program.job_classes.rates.max(axis=1, initial=0.0)
        self.fastest = np.where(fastest > 0.0, fastest, 1.0)

    def matrix(self, level_column: FloatArray) -> Any:
        from scipy.sparse import csc_array

        job_classes = self.program.job_classes
        num_classes, num_pools = len(job_classes.gang), len(job_classes.capacity)
        one, at = self.one, self.at
        single = np.arange(len(one))
        rows = [one, num_classes + one, 2 * num_classes + at]
        values = [-job_classes.rates[one, at], np.ones(len(one)), job_classes.gang[one]]
        places = [single, single, single]
        num_columns = len(one)
        columns = self.program.columns
        if columns is not None and self.program.pairs is not None:
            a, b, j = columns.class_a, columns.class_b, columns.column
            pair = num_columns + np.arange(len(a))
            ones = np.ones(len(a))
            rows += [a, b, num_classes + a, num_classes + b, 2 * num_classes + j]
            rates = self.program.pairs
            values += [-rates[j, a, b], -rates[j, b, a], ones, ones, job_classes.gang[a]]
            places += [pair] * 5
            num_columns += len(a)
        rows.append(np.arange(num_classes))
        values.append(level_column)
        places.append(np.full(num_classes, num_columns))
        return csc_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(places))),
            shape=(2 * num_classes + num_pools, num_columns + 1),
        )

    def pair_values(self, step_value: FloatArray) -> FloatArray:
        columns, pairs = self.program.columns, self.program.pairs
        if columns is None or pairs is None:
            return np.zeros(0)
        a, b, j = columns.class_a, columns.class_b, columns.column
        return np.asarray(step_value[a, j] * pairs[j, a, b] + step_value[b, j] * pairs[j, b, a])

    def answer(
        self, value: FloatArray, matrix: Any, limits: FloatArray, unit: FloatArray, large: float
    ) -> Solved:
        """Solve and convert the result to classes and columns.

        ``unit`` is the size of a demand per job, ``large`` the size of the sum or of the level.
        """
        from scipy.sparse import diags_array

        job_classes = self.program.job_classes
        num_classes, num_single = len(job_classes.gang), len(self.one)
        is_level = value[-1] > 0.0
        # The tolerances of HiGHS are absolute, so every row is scaled to about 1.
        row_unit = np.concatenate(
            [job_classes.num_jobs * unit, job_classes.num_jobs, job_classes.capacity]
        )
        cost = -value if is_level else -value / large
        result = _highs(cost, diags_array(1.0 / row_unit) @ matrix, limits / row_unit)
        worth = np.maximum(-result.ineqlin.marginals, 0.0) / row_unit
        bound = self._bound(cost, matrix, limits, worth) * large
        # The solver may return small negative values such as -1e-17.
        time = np.maximum(result.x[:-1], 0.0)
        alone = np.zeros(job_classes.rates.shape)
        alone[self.one, self.at] = time[:num_single]
        together = time[num_single:]
        # The solver meets limits to seven digits, which is not enough for devices, so all times are
        # scaled down.
        filled = (matrix @ np.append(time, 0.0) / row_unit)[num_classes:]
        over = max(1.0, float(filled.max()))
        return Solved(
            level=float(result.x[-1]) * large if is_level else 0.0,
            alone=alone / over,
            together=together / over,
            pair_value=float(value[num_single:-1] @ together) / over,
            bound=bound,
            duals=Duals(
                worth=worth[:num_classes] * large,
                rent=worth[num_classes : 2 * num_classes] * large,
                price=worth[2 * num_classes :] * large,
            ),
        )

    def _bound(self, cost: FloatArray, matrix: Any, limits: FloatArray, worth: FloatArray) -> float:
        """Upper bound proven by the duals alone, using that no column exceeds the time of its
        class."""
        if cost[-1] < 0.0:
            # The level is unbounded, so its column must balance exactly.
            worth = worth / max(float((matrix.T @ worth)[-1]), 1e-300)
        unpaid = np.maximum(-cost - matrix.T @ worth, 0.0)[:-1]
        longest = self.program.job_classes.num_jobs[self.one]
        if self.program.columns is not None:
            others = self.program.job_classes.num_jobs[self.program.columns.class_a]
            longest = np.concatenate([longest, others])
        return float(limits @ worth + unpaid @ longest)


def _highs(cost: FloatArray, matrix: Any, limits: FloatArray) -> Any:
    from scipy.optimize import linprog

    # The interior point method is faster on large programs, the simplex method on small ones.
    methods = ("highs-ds", "highs-ipm") if len(limits) < _LARGE else ("highs-ipm", "highs-ds")
    for method in methods:
        result = linprog(cost, A_ub=matrix, b_ub=limits, method=method)
        if result.status == 0:
            return result
    raise NoFeasiblePlanError(
        f"the allocation program has no answer: {result.message}",
        hint="check throughputs and numbers of devices for extreme values",
    )
