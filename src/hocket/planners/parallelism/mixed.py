"""Pipelines over unequal device kinds: how many stages each kind gets, by a closed form.

Each kind forms stages of its own, so that the replicas and tensor ranks of a stage are alike. With
layers shared out by speed, a pipeline of p stages takes the harmonic mean of the times that the
kinds would need alone, weighted by their stages; that ranks the choices, and the exact partitioner
and the simulator judge the best. O(choices of degrees x choices of stages per kind).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.step import predict
from hocket.plan.limits import Limits
from hocket.plan.problem import Problem
from hocket.planners.parallelism.enumerate import (
    SHAPE,
    DivisionBlock,
    divisors,
    microbatches,
    shape_blocks,
    tensor_degrees,
)
from hocket.planners.parallelism.outlook import PoolStages
from hocket.planners.parallelism.pools import pool_clusters, pools_of
from hocket.transformer import SCHEDULES, Division

MAX_STAGE_CHOICES = 8
"""Up to this many stages of a kind every number is tried, beyond it none, half and all."""
SCHEDULE = SCHEDULES.index("1f1b")
"""One stage per rank: the exact partitioner is optimal for these."""
WHOLE = ("context", "expert", "chunks")
"""Degrees that are 1 in these pipelines."""


@dataclass(frozen=True, kw_only=True)
class MixedDivision:
    """A division, the kinds of its stages, and the step time by the closed form."""

    division: Division
    stages: PoolStages
    estimate_s: float


def scan_mixed(problem: Problem, limits: Limits, num_kept: int) -> list[MixedDivision]:
    """The best divisions over at least two kinds, shortest step first; none for one kind."""
    is_asked = "1f1b" in limits.schedules and all(limits.allowed(name, [1]) for name in WHOLE)
    if len(pools_of(problem)) < 2 or not is_asked:
        return []
    layouts, shapes = [], []
    for stages, shape in _shapes(problem, limits):
        layouts.append(stages)
        shapes.append(shape)
    if not shapes:
        return []
    rows = np.array(shapes, dtype=np.int32)
    found: list[MixedDivision] = []
    for block in shape_blocks(rows, problem.training.global_batch, limits):
        own = [layouts[row] for row in block.shapes.tolist()]
        found += _best(problem, block, own, num_kept)
    return sorted(found, key=lambda pair: pair.estimate_s)[:num_kept]


def _shapes(problem: Problem, limits: Limits) -> Iterator[tuple[PoolStages, tuple[int, ...]]]:
    """Stages of each kind with the row of `SHAPE` that goes with them."""
    model, batch = problem.training.model, problem.training.global_batch
    degrees = limits.allowed("tensor", tensor_degrees(model, limits.max_tensor))
    for tensor, data in product(degrees, limits.allowed("data", divisors(batch))):
        for stages in _layouts(problem, tensor, data):
            pipeline = sum(stages.ranks)
            if pipeline > model.layers or not limits.allowed("pipeline", [pipeline]):
                continue
            for size in microbatches(batch // data, limits):
                row = {
                    "tensor": tensor, "pipeline": pipeline, "data": data, "microbatch": size,
                    "schedule": SCHEDULE, **dict.fromkeys(WHOLE, 1),
                }  # fmt: skip
                yield stages, tuple(row[name] for name in SHAPE)


def _layouts(problem: Problem, tensor: int, data: int) -> Iterator[PoolStages]:
    """Numbers of stages on each kind; more memory comes first, where more is in flight."""
    pools = pools_of(problem)
    order = sorted(range(len(pools)), key=lambda i: (-pools[i].memory_bytes, i))
    choices = [_numbers(pools[i].num_groups(tensor) // data) for i in order]
    for ranks in product(*choices):
        used = [(pool, count) for pool, count in zip(order, ranks, strict=True) if count]
        if len(used) > 1:
            yield PoolStages(pools=tuple(p for p, _ in used), ranks=tuple(n for _, n in used))


def _numbers(most: int) -> list[int]:
    return list(range(most + 1)) if most <= MAX_STAGE_CHOICES else [0, most // 2, most]


def _best(
    problem: Problem, block: DivisionBlock, layouts: list[PoolStages], num_kept: int
) -> list[MixedDivision]:
    divisions, width = block.divisions, block.num_variants
    largest = [max(pools_of(problem)[p].limit_bytes for p in stages.pools) for stages in layouts]
    # Layers are not shared out yet: what even shares hold need only fit the largest kind.
    training = problem.training
    held_bytes = memory(training.model, divisions, training.software).total_bytes
    fits = held_bytes <= np.repeat(largest, width)
    step_s = np.where(fits, _estimates(problem, block, layouts), np.inf)
    order = np.argsort(step_s, kind="stable")[:num_kept]
    return [
        MixedDivision(
            division=divisions[i], stages=layouts[i // width], estimate_s=float(step_s[i])
        )
        for i in order.tolist()
        if np.isfinite(step_s[i])
    ]


def _estimates(problem: Problem, block: DivisionBlock, layouts: list[PoolStages]) -> FloatArray:
    """The harmonic mean of the kinds' own step times, weighted by their stages."""
    speed, training = np.zeros(len(block.divisions)), problem.training
    for index, cluster in enumerate(pool_clusters(problem)):
        share = [
            sum(n for p, n in zip(s.pools, s.ranks, strict=True) if p == index) / sum(s.ranks)
            for s in layouts
        ]
        alone_s = predict(
            training.model, block.divisions, cluster, training.software, training.coefficients
        ).step_s
        speed += np.repeat(share, block.num_variants) / alone_s
    return np.asarray(1 / speed)
