"""Choose the parallel config of a transformer's training: scan all configs, simulate the best.

This automates PTD-P (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", SC 2021). Instead of rules for tensor, pipeline and data degrees, a
closed form computes memory and step time of all configs, and the event simulator decides among the
best few hundred. Unequal device types are joined as stages of one pipeline. O(configs) array work,
then O(actions) per simulated candidate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.step import predict
from hocket.hardware.cluster import Cluster
from hocket.plan.limits import Limits
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners.candidates import Comparison
from hocket.planners.parallel.forecast import ConfigForecast, PoolStages
from hocket.planners.parallel.pools import Pool, pool_clusters, pools_of
from hocket.planners.parallel.recheck import RecheckEffort, ranked, recheck
from hocket.planners.parallel.search_limits import requested_limits
from hocket.planners.parallel.space import (
    SHAPE,
    ConfigBlock,
    config_blocks,
    divisors,
    joined,
    microbatches,
    shape_blocks,
    tensor_degrees,
)
from hocket.planners.parallel.transformer_why import explain, shortage
from hocket.transformer import SCHEDULES, ParallelConfig, ParallelConfigs

# Every config through the closed forms of memory and time; the best of each shape is kept.
#
# Blocks of configs are evaluated as arrays: first their memory, then, for those that fit, their
# time. Of one shape (degrees, microbatch, schedule) only the best memory option is kept, so that
# simulated candidates differ in what the simulator sees. If a shape fits with less recomputation,
# more of it is not tried, since it only costs time. O(configs), some dozens of array passes. dozens
# of array passes.

NEARLY = 1.25
"""Largest ratio of peak and memory of configs that are shown although they do not fit."""
NUM_NEARLY = 5
SPARE = 10
"""Factor on the number of configs that are kept before similar ones are dropped."""
MOST_ALIKE = 3
"""Largest number of kept configs that differ only in their number of chunks."""
ALIKE = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "schedule")
"""Fields in which similar configs are equal."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Scan:
    """The best configs of a scan over all configs of one pool."""

    fitting: ParallelConfigs
    """The best configs that fit, shortest step first, one per shape."""
    nearly: ParallelConfigs
    """Configs with the same shapes and the shortest steps that lack a little memory."""
    smallest: ParallelConfigs
    """The config with the least memory; empty if there are no configs."""
    num_configs: int
    num_fitting: int


def scan(problem: Problem, pool: int, limits: Limits, num_kept: int) -> Scan:
    """Find the best ``num_kept`` configs over the devices of one pool."""
    judge = _Judge(problem, pools_of(problem)[pool], pool_clusters(problem)[pool])
    training = problem.training
    blocks = config_blocks(training.model, judge.pool, training.global_batch, limits)
    # More than needed, because similar configs are dropped afterwards.
    parts = [judge.part(block, SPARE * num_kept) for block in blocks]
    fitting = _diverse(_scan_best(parts, "fitting", "fitting_s", SPARE * num_kept), num_kept)
    return Scan(
        fitting=fitting,
        nearly=judge.nearly(fitting, limits),
        smallest=_scan_best(parts, "smallest", "smallest_bytes", 1),
        num_configs=sum(part.num_configs for part in parts),
        num_fitting=sum(part.num_fitting for part in parts),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Part:
    """The best configs of one block, with the values by which blocks are merged."""

    fitting: ParallelConfigs
    fitting_s: FloatArray
    smallest: ParallelConfigs
    smallest_bytes: FloatArray
    num_configs: int
    num_fitting: int


@dataclass(frozen=True, eq=False)
class _Judge:
    """Closed forms of memory and time for one pool."""

    problem: Problem
    pool: Pool
    cluster: Cluster

    def part(self, block: ConfigBlock, num_kept: int) -> _Part:
        configs = block.configs
        held_bytes = self.held_bytes(configs)
        fits = held_bytes <= self.pool.limit_bytes
        step_s = self.step_s(configs, _least_recompute(fits, block))
        best = _best_of_rows(step_s, block.num_variants, num_kept)
        smallest = np.array([np.argmin(held_bytes)], dtype=np.intp)
        return _Part(
            fitting=configs.take(best),
            fitting_s=step_s[best],
            smallest=configs.take(smallest),
            smallest_bytes=held_bytes[smallest],
            num_configs=len(configs),
            num_fitting=int(np.count_nonzero(fits)),
        )

    def nearly(self, fitting: ParallelConfigs, limits: Limits) -> ParallelConfigs:
        """The fastest configs whose peak exceeds the memory by at most a quarter (`NEARLY`)."""
        shapes = np.stack([getattr(fitting, name).astype(np.int32) for name in SHAPE], axis=1)
        found, found_s = [ParallelConfigs.of([])], [np.zeros(0)]
        for block in shape_blocks(shapes, self.problem.training.global_batch, limits):
            held = self.held_bytes(block.configs)
            lacks = (held > self.pool.limit_bytes) & (held <= NEARLY * self.pool.memory_bytes)
            step_s = self.step_s(block.configs, lacks)
            best = _best_of_rows(step_s, block.num_variants, NUM_NEARLY)
            found.append(block.configs.take(best))
            found_s.append(step_s[best])
        order = np.argsort(np.concatenate(found_s), kind="stable")[:NUM_NEARLY]
        return joined(found).take(order)

    def held_bytes(self, configs: ParallelConfigs) -> FloatArray:
        training = self.problem.training
        return memory(training.model, configs, training.software)

    def step_s(self, configs: ParallelConfigs, requested: BoolArray) -> FloatArray:
        """Step times of the requested configs; infinite for the others."""
        times = np.full(len(configs), np.inf)
        which = np.flatnonzero(requested)
        if len(which):
            training = self.problem.training
            times[which] = predict(
                training.model, configs.take(which), self.cluster, training.software,
                training.coefficients,
            ).step_s  # fmt: skip
        return times


def _scan_best(parts: list[_Part], name: str, by: str, count: int) -> ParallelConfigs:
    """Scan configs in parts and return those with the smallest values; ties keep their order."""
    if not parts:
        return ParallelConfigs.of([])
    order = np.argsort(np.concatenate([getattr(part, by) for part in parts]), kind="stable")
    return joined([getattr(part, name) for part in parts]).take(order[:count])


def _diverse(configs: ParallelConfigs, count: int) -> ParallelConfigs:
    """The first ``count`` configs, with at most `MOST_ALIKE` that differ only in chunks."""
    seen: Counter[tuple[int, ...]] = Counter()
    kept = []
    columns = [getattr(configs, name).tolist() for name in ALIKE]
    for index, key in enumerate(zip(*columns, strict=True)):
        seen[key] += 1
        if seen[key] <= MOST_ALIKE:
            kept.append(index)
    return configs.take(np.array(kept[:count], dtype=np.intp))


def _least_recompute(fits: BoolArray, block: ConfigBlock) -> BoolArray:
    """True for fitting configs that would not fit with less recomputation."""
    rows = fits.reshape(-1, block.num_recomputes, block.num_variants // block.num_recomputes)
    kept = rows.copy()
    less = np.zeros_like(rows[:, 0])
    for mode in range(block.num_recomputes):
        # A config that fits with less recompute rules out the same with more.
        kept[:, mode] &= ~less
        less |= rows[:, mode]
    return kept.reshape(-1)


def _best_of_rows(values: FloatArray, width: int, count: int) -> NDArray[np.intp]:
    """Positions of the smallest finite values, ascending by value, with at most one per row."""
    rows = values.reshape(-1, width)
    column = np.argmin(rows, axis=1)
    best = rows[np.arange(len(rows)), column]
    # Partitioning avoids sorting a million values for a few hundred.
    if len(best) > count:
        kept = np.flatnonzero(best <= np.partition(best, count - 1)[count - 1])
    else:
        kept = np.arange(len(best))
    kept = kept[np.isfinite(best[kept])]
    kept = kept[np.argsort(best[kept], kind="stable")][:count]
    return np.asarray(kept * width + column[kept], dtype=np.intp)


# Pipelines over unequal device types: how many stages each type gets, by a closed form.
#
# Each type forms stages of its own, so all replicas and tensor ranks of a stage are equal. With
# layers split by speed, the step time is the harmonic mean of the times that the types would need
# alone, weighted by their stages. This ranks the choices; the exact partitioner and the simulator
# decide among the best ones. O(choices of degrees x choices of stages per type).

MAX_STAGE_CHOICES = 8
"""Up to this many stages of a device type every number is tried; above, only none, half and all."""
SCHEDULE = SCHEDULES.index("1f1b")
"""Schedule of pipelines over several device types: the exact partitioner is optimal for it."""
WHOLE = ("context", "expert", "chunks")
"""Fields that are 1 in pipelines over several device types."""


@dataclass(frozen=True, kw_only=True)
class MixedConfig:
    """A config over several device types, with its stages per type and its estimated step time."""

    config: ParallelConfig
    stages: PoolStages
    estimate_s: float


def scan_mixed(problem: Problem, limits: Limits, num_kept: int) -> list[MixedConfig]:
    """The best configs over at least two device types, shortest step first; empty for one type."""
    is_requested = "1f1b" in limits.schedules and all(limits.allowed(name, [1]) for name in WHOLE)
    if len(pools_of(problem)) < 2 or not is_requested:
        return []
    layouts, shapes = [], []
    for stages, shape in _shapes(problem, limits):
        layouts.append(stages)
        shapes.append(shape)
    if not shapes:
        return []
    rows = np.array(shapes, dtype=np.int32)
    found: list[MixedConfig] = []
    for block in shape_blocks(rows, problem.training.global_batch, limits):
        own = [layouts[row] for row in block.shapes.tolist()]
        found += _best(problem, block, own, num_kept)
    return sorted(found, key=lambda pair: pair.estimate_s)[:num_kept]


def _shapes(problem: Problem, limits: Limits) -> Iterator[tuple[PoolStages, tuple[int, ...]]]:
    """Yield stages per device type, each with its row of `SHAPE`."""
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
    """Yield numbers of stages per device type; types with more memory come first.

    The first stages hold the most microbatches in flight.
    """
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
    problem: Problem, block: ConfigBlock, layouts: list[PoolStages], num_kept: int
) -> list[MixedConfig]:
    configs, width = block.configs, block.num_variants
    largest = [max(pools_of(problem)[p].limit_bytes for p in stages.pools) for stages in layouts]
    # Layers are not partitioned yet: an even split need only fit the type with the most memory.
    training = problem.training
    held_bytes = memory(training.model, configs, training.software)
    fits = held_bytes <= np.repeat(largest, width)
    step_s = np.where(fits, _estimates(problem, block, layouts), np.inf)
    order = np.argsort(step_s, kind="stable")[:num_kept]
    return [
        MixedConfig(config=configs[i], stages=layouts[i // width], estimate_s=float(step_s[i]))
        for i in order.tolist()
        if np.isfinite(step_s[i])
    ]


def _estimates(problem: Problem, block: ConfigBlock, layouts: list[PoolStages]) -> FloatArray:
    """Step times: harmonic mean of the device types' own times, weighted by their stages."""
    speed, training = np.zeros(len(block.configs)), problem.training
    for index, cluster in enumerate(pool_clusters(problem)):
        share = [
            sum(n for p, n in zip(s.pools, s.ranks, strict=True) if p == index) / sum(s.ranks)
            for s in layouts
        ]
        alone_s = predict(
            training.model, block.configs, cluster, training.software, training.coefficients
        ).step_s
        speed += np.repeat(share, block.num_variants) / alone_s
    return np.asarray(1 / speed)


ROUNDS = 3
"""Largest number of rounds of simulation; each takes the next best candidates until one fits."""


def compare_configs(problem: Problem, effort: RecheckEffort | None = None) -> Comparison:
    """Scan all configs within the problem's limits, simulate the best, and choose the winner."""
    effort = effort or RecheckEffort()
    limits = problem.limits or requested_limits(
        default_limits(problem), problem.training.software.name
    )
    scans = [
        scan(problem, pool, limits, ROUNDS * effort.num_simulated)
        for pool in range(len(pools_of(problem)))
    ]
    mixed = scan_mixed(problem, limits, effort.num_simulated)
    fitting = [c for pool, s in enumerate(scans) for c in described(problem, pool, s.fitting)]
    fitting += [judged(problem, pair.config, pair.stages, pair.estimate_s) for pair in mixed]
    fitting.sort(key=lambda candidate: candidate.estimate_s)
    nearly = [c for pool, s in enumerate(scans) for c in described(problem, pool, s.nearly)]
    seen = _recheck_until_one_fits(fitting, effort)
    return _compared(problem, limits, scans, [*seen, *ranked(nearly)], len(mixed))


def _recheck_until_one_fits(
    candidates: list[ConfigForecast], effort: RecheckEffort
) -> list[ConfigForecast]:
    """Simulate the first candidates, and further ones only if none of these fits."""
    seen: list[ConfigForecast] = []
    for start in range(0, ROUNDS * effort.num_simulated, effort.num_simulated):
        following = candidates[start : start + effort.num_simulated]
        seen = ranked([*seen, *recheck(following, effort)])
        if seen and seen[0].feasible:
            break
    return seen


def default_limits(problem: Problem) -> Limits:
    """Default limits of the search: tensor-parallel groups stay on one host."""
    return Limits(max_tensor=max(pool.per_host for pool in pools_of(problem)))


def _compared(
    problem: Problem,
    limits: Limits,
    scans: list[Scan],
    candidates: list[ConfigForecast],
    num_mixed: int,
) -> Comparison:
    fits = bool(candidates) and candidates[0].feasible
    if not fits:
        smallest = [c for i, s in enumerate(scans) for c in described(problem, i, s.smallest)]
        candidates = ranked([*candidates, *smallest])
    message = explain(candidates) if fits else shortage(problem, candidates, limits)
    return Comparison(
        problem=problem,
        candidates=tuple(forecast.as_candidate(message.sentence) for forecast in message.forecasts),
        chosen=0 if fits else None,
        why=message.sentence,
        counts={
            "configs": sum(s.num_configs for s in scans) + num_mixed,
            "fitting": sum(s.num_fitting for s in scans) + _num_mixed(candidates),
            "simulated": sum(candidate.simulated for candidate in candidates),
        },
    )


def _num_mixed(candidates: list[ConfigForecast]) -> int:
    """Number of fitting candidates over several device types, which `Scan` does not count."""
    return sum(c.feasible and len(c.stages.pools) > 1 for c in candidates)


# ── candidates ───────────────────────────────────────────────────────────────────────────────────


def described(problem: Problem, pool: int, configs: ParallelConfigs) -> list[ConfigForecast]:
    """Forecasts of configs on one pool by the closed form."""
    if not len(configs):
        return []
    own, cluster = pools_of(problem)[pool], pool_clusters(problem)[pool]
    training = problem.training
    held = memory(training.model, configs, training.software)
    prediction = predict(training.model, configs, cluster, training.software, training.coefficients)
    parts = prediction.parts()
    return [
        ConfigForecast(
            problem=problem,
            config=configs[i],
            stages=PoolStages(pools=(pool,), ranks=(int(configs.pipeline[i]),)),
            estimate_s=float(prediction.step_s[i]),
            parts_s={name: float(values[i]) for name, values in parts.items()},
            step_s=float(prediction.step_s[i]),
            bubble=float(prediction.bubble[i]),
            peak_bytes=(int(held[i]),) * int(configs.pipeline[i]),
            simulated=False,
            feasible=bool(held[i] <= own.limit_bytes),
        )
        for i in range(len(configs))
    ]


def judged(
    problem: Problem, config: ParallelConfig, stages: PoolStages, estimate_s: float
) -> ConfigForecast:
    """Forecast of a config over several pools; parts and memory are those of the first pool."""
    (first,) = described(problem, stages.pools[0], ParallelConfigs.of([config]))
    scale = estimate_s / first.estimate_s
    return replace(
        first,
        stages=stages,
        estimate_s=estimate_s,
        step_s=estimate_s,
        parts_s={name: scale * value for name, value in first.parts_s.items()},
    )


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────


def plan_of(comparison: Comparison) -> Plan:
    """The winner's plan; raises `NoFeasiblePlanError` if nothing fits."""
    winner = comparison.winner
    if winner is None or winner.plan is None:
        where = comparison.problem.cluster.name
        is_shape = isinstance(comparison.problem.work, TransformerTraining)
        raise NoFeasiblePlanError(
            comparison.why if is_shape else f"nothing fits {where}: {comparison.why}",
            hint="more devices, a smaller model, or wider limits (--fix, --max-tensor)",
        )
    return winner.plan
