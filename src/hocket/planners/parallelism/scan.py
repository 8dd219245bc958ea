"""Every division through the closed forms of memory and time, the best of each shape kept.

Blocks of divisions are judged as arrays: first what they hold, then, for those that fit, how long
they take. Of one shape (degrees, microbatch, schedule) only the best way to spend memory is kept,
so that what goes to the simulator differs in what the simulator sees; and where a shape fits with
less recomputation, more of it is not asked for, since it only costs time. O(divisions), some
dozens of array passes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray
from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.step import predict
from hocket.hardware.cluster import Cluster
from hocket.plan.limits import Limits
from hocket.plan.problem import Problem
from hocket.planners.parallelism.enumerate import (
    SHAPE,
    DivisionBlock,
    division_blocks,
    joined,
    shape_blocks,
)
from hocket.planners.parallelism.pools import Pool, pool_clusters, pools_of
from hocket.transformer import Divisions

NEARLY = 1.25
"""How much more than there is a division may hold to be shown among those that do not fit."""
NUM_NEARLY = 5
SPARE = 10
"""How many times as many divisions are kept until those too much alike are left out."""
MOST_ALIKE = 3
"""Divisions that differ in their number of chunks alone."""
ALIKE = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "schedule")
"""What divisions that are alike share."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Scan:
    """What is left of all divisions."""

    fitting: Divisions
    """The best that fit, shortest step first, one per shape."""
    nearly: Divisions
    """Of their shapes, the shortest steps that lack a little memory."""
    smallest: Divisions
    """The one that holds least; empty where there is none."""
    num_divisions: int
    num_fitting: int


def scan(problem: Problem, pool: int, limits: Limits, num_kept: int) -> Scan:
    """The best ``num_kept`` divisions over the devices of one pool."""
    judge = _Judge(problem, pools_of(problem)[pool], pool_clusters(problem)[pool])
    training = problem.training
    blocks = division_blocks(training.model, judge.pool, training.global_batch, limits)
    parts = [judge.part(block, SPARE * num_kept) for block in blocks]
    fitting = _diverse(_best(parts, "fitting", "fitting_s", SPARE * num_kept), num_kept)
    return Scan(
        fitting=fitting,
        nearly=judge.nearly(fitting, limits),
        smallest=_best(parts, "smallest", "smallest_bytes", 1),
        num_divisions=sum(part.num_divisions for part in parts),
        num_fitting=sum(part.num_fitting for part in parts),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Part:
    """What is left of a block, with the numbers by which blocks are merged."""

    fitting: Divisions
    fitting_s: FloatArray
    smallest: Divisions
    smallest_bytes: FloatArray
    num_divisions: int
    num_fitting: int


@dataclass(frozen=True, eq=False)
class _Judge:
    """The closed forms for one pool."""

    problem: Problem
    pool: Pool
    cluster: Cluster

    def part(self, block: DivisionBlock, num_kept: int) -> _Part:
        divisions = block.divisions
        held_bytes = self.held_bytes(divisions)
        fits = held_bytes <= self.pool.limit_bytes
        step_s = self.step_s(divisions, _least_recompute(fits, block))
        best = _best_of_rows(step_s, block.num_variants, num_kept)
        smallest = np.array([np.argmin(held_bytes)], dtype=np.intp)
        return _Part(
            fitting=divisions.take(best),
            fitting_s=step_s[best],
            smallest=divisions.take(smallest),
            smallest_bytes=held_bytes[smallest],
            num_divisions=len(divisions),
            num_fitting=int(np.count_nonzero(fits)),
        )

    def nearly(self, fitting: Divisions, limits: Limits) -> Divisions:
        """The shortest steps of some shapes that do not fit, but nearly do."""
        shapes = np.stack([getattr(fitting, name).astype(np.int32) for name in SHAPE], axis=1)
        found, found_s = [Divisions.of([])], [np.zeros(0)]
        for block in shape_blocks(shapes, self.problem.training.global_batch, limits):
            held = self.held_bytes(block.divisions)
            lacks = (held > self.pool.limit_bytes) & (held <= NEARLY * self.pool.memory_bytes)
            step_s = self.step_s(block.divisions, lacks)
            best = _best_of_rows(step_s, block.num_variants, NUM_NEARLY)
            found.append(block.divisions.take(best))
            found_s.append(step_s[best])
        order = np.argsort(np.concatenate(found_s), kind="stable")[:NUM_NEARLY]
        return joined(found).take(order)

    def held_bytes(self, divisions: Divisions) -> FloatArray:
        training = self.problem.training
        return memory(training.model, divisions, training.software).total_bytes

    def step_s(self, divisions: Divisions, asked: BoolArray) -> FloatArray:
        """Step times of those that are asked for; infinite for the others."""
        times = np.full(len(divisions), np.inf)
        which = np.flatnonzero(asked)
        if len(which):
            training = self.problem.training
            times[which] = predict(
                training.model, divisions.take(which), self.cluster, training.software,
                training.coefficients,
            ).step_s  # fmt: skip
        return times


def _best(parts: list[_Part], name: str, by: str, count: int) -> Divisions:
    """The smallest of all parts; of equals those that came first."""
    if not parts:
        return Divisions.of([])
    order = np.argsort(np.concatenate([getattr(part, by) for part in parts]), kind="stable")
    return joined([getattr(part, name) for part in parts]).take(order[:count])


def _diverse(divisions: Divisions, count: int) -> Divisions:
    """The first ``count`` with at most a few that are alike."""
    seen: Counter[tuple[int, ...]] = Counter()
    kept = []
    columns = [getattr(divisions, name).tolist() for name in ALIKE]
    for index, key in enumerate(zip(*columns, strict=True)):
        seen[key] += 1
        if seen[key] <= MOST_ALIKE:
            kept.append(index)
    return divisions.take(np.array(kept[:count], dtype=np.intp))


def _least_recompute(fits: BoolArray, block: DivisionBlock) -> BoolArray:
    """Of what fits, what does not fit with less recomputation and else the same."""
    rows = fits.reshape(-1, block.num_recomputes, block.num_variants // block.num_recomputes)
    kept = rows.copy()
    less = np.zeros_like(rows[:, 0])
    for mode in range(block.num_recomputes):
        kept[:, mode] &= ~less
        less |= rows[:, mode]
    return kept.reshape(-1)


def _best_of_rows(values: FloatArray, width: int, count: int) -> NDArray[np.intp]:
    """Positions of the smallest values with at most one per row, ascending; infinite ones never."""
    rows = values.reshape(-1, width)
    column = np.argmin(rows, axis=1)
    best = rows[np.arange(len(rows)), column]
    if len(best) > count:
        kept = np.flatnonzero(best <= np.partition(best, count - 1)[count - 1])
    else:
        kept = np.arange(len(best))
    kept = kept[np.isfinite(best[kept])]
    kept = kept[np.argsort(best[kept], kind="stable")][:count]
    return np.asarray(kept * width + column[kept], dtype=np.intp)
