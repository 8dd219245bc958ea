"""Forecast of a config: predicted time and memory, before and after it becomes a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from hocket.cost.chips import chip_of
from hocket.cost.parallel.costs import StageCosts
from hocket.hardware.cluster import Cluster
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Schedule
from hocket.plan.transformer_plan import plan_stage_costs
from hocket.planners.candidates import Candidate
from hocket.planners.parallel.abilities import is_hocket_only
from hocket.planners.parallel.pools import pool_clusters, pools_of, rank_devices
from hocket.transformer import ParallelConfig

SECONDS_PER_HOUR = 3600
SPARE = 0.04
"""Share of memory that a search leaves free: the peaks of published runs are up to so much above
their predictions, and a plan that fills memory to the last byte runs out of it."""
CALIBRATED = 0.12
"""Uncertainty where runs of the cluster were fitted: the 95th percentile over published tables."""
EXPERTS = 0.5
"""The same of mixtures of experts: releases of one program differ by up to 1.8 times."""
SYNTHESISED = "synthesised"
"""Name of schedules that are made for given stages."""
EXPOSED = ("tensor", "other", "pipeline", "data")
"""Parts of a step that are communication."""


@dataclass(frozen=True, kw_only=True)
class PoolStages:
    """Pools of the pipeline ranks, in runs of one pool; a pool may come again after another."""

    pools: tuple[int, ...]
    """Positions of pools in the cluster, one for each run."""
    ranks: tuple[int, ...]
    """Pipeline ranks of each run."""

    @classmethod
    def of_ranks(cls, pool_of_rank: Iterable[int]) -> PoolStages:
        """The runs of ranks whose pools are given."""
        runs = [(pool, len(list(own))) for pool, own in groupby(pool_of_rank)]
        return cls(pools=tuple(pool for pool, _ in runs), ranks=tuple(count for _, count in runs))

    @property
    def pool_of_rank(self) -> tuple[int, ...]:
        """The pool of every rank."""
        pairs = zip(self.pools, self.ranks, strict=True)
        return tuple(pool for pool, count in pairs for _ in range(count))


@dataclass(frozen=True, eq=False, kw_only=True)
class ConfigForecast:
    """One config and what is predicted for it."""

    problem: Problem
    config: ParallelConfig
    stages: PoolStages
    estimate_s: float
    """Step time by the closed form, which chose what is simulated."""
    parts_s: Mapping[str, float]
    """Parts of ``step_s``: those of the closed form, with the simulated waiting."""
    step_s: float
    """Step time in the event simulator; the closed form's where it was not simulated."""
    bubble: float
    """Share of the devices' time in which they wait for other stages."""
    peak_bytes: tuple[int, ...]
    """Of one device of each pipeline rank."""
    simulated: bool
    feasible: bool
    reason: str = ""
    """Reason why it lost or cannot be used; for the winner, why it won."""
    schedule: Schedule | None = None
    costs: StageCosts | None = None

    @property
    def schedule_name(self) -> str:
        """The config's schedule, or that one was made for its stages."""
        own = self.schedule is not None and self.schedule.name == SYNTHESISED
        return SYNTHESISED if own else self.config.schedule

    @property
    def cluster(self) -> Cluster:
        """Cluster that it runs on: one pool alone, or all of them."""
        if len(self.stages.pools) == 1:
            return pool_clusters(self.problem)[self.stages.pools[0]]
        return self.problem.cluster

    @property
    def kinds(self) -> tuple[str, ...]:
        """The device kind of each pipeline rank."""
        return tuple(pools_of(self.problem)[pool].kind.name for pool in self.stages.pool_of_rank)

    @property
    def capacity_bytes(self) -> tuple[int, ...]:
        """Usable memory of one device of each pipeline rank."""
        pools = pools_of(self.problem)
        return tuple(pools[pool].memory_bytes for pool in self.stages.pool_of_rank)

    @property
    def limit_bytes(self) -> tuple[int, ...]:
        """Part of `capacity_bytes` that may be filled."""
        pools = pools_of(self.problem)
        return tuple(pools[pool].limit_bytes for pool in self.stages.pool_of_rank)

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank that lacks most, or has least to spare."""
        pairs = zip(self.peak_bytes, self.limit_bytes, strict=True)
        spare = [capacity - peak for peak, capacity in pairs]
        return spare.index(min(spare))

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the fullest rank's devices lack; 0 where all fits."""
        rank = self.fullest_rank
        return max(0, self.peak_bytes[rank] - self.limit_bytes[rank])

    @property
    def uncertainty(self) -> float:
        """Relative error of ``step_s`` that nine of ten measured steps stay within."""
        if self.problem.training.coefficients.source:
            return CALIBRATED
        libraries = self.problem.training.software.libraries
        chips = [chip_of(kind, libraries) for kind in set(self.kinds)]
        return max([chip.uncertainty for chip in chips] + [EXPERTS] * bool(self._has_experts))

    @property
    def _has_experts(self) -> bool:
        return self.problem.training.model.experts is not None

    @property
    def range_s(self) -> tuple[float, float]:
        """Between what steps a measured one is expected."""
        return self.step_s * (1 - self.uncertainty), self.step_s * (1 + self.uncertainty)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all replicas per second."""
        training = self.problem.training
        return training.global_batch * training.model.sequence / self.step_s

    @property
    def mfu(self) -> float:
        """The model's arithmetic over what the used devices could do at their peak."""
        return self.problem.training.step_flops / (self.step_s * self._peak_flops)

    @property
    def causal_mfu(self) -> float:
        """The same without the pairs of tokens that a causal mask leaves out."""
        return self.problem.training.causal_share * self.mfu

    @property
    def _peak_flops(self) -> float:
        dtype, per_rank = self.problem.training.software.dtype, self._devices_per_rank
        kinds = [pools_of(self.problem)[pool].kind for pool in self.stages.pool_of_rank]
        return sum(
            per_rank * kind.peak_flops.get(dtype, max(kind.peak_flops.values())) for kind in kinds
        )

    @property
    def _devices_per_rank(self) -> int:
        return self.config.num_devices // self.config.pipeline

    @property
    def exposed_share(self) -> float:
        """Share of the step in which devices wait for communication that nothing hides."""
        return sum(self.parts_s.get(name, 0.0) for name in EXPOSED) / self.step_s

    @property
    def price_per_hour(self) -> float | None:
        """Dollars per hour of the used devices; None where a price is unknown."""
        kinds = [pools_of(self.problem)[pool].kind for pool in self.stages.pool_of_rank]
        prices = [kind.price_per_hour * self._devices_per_rank for kind in kinds]
        return sum(prices) if all(price > 0 for price in prices) else None

    @property
    def price_per_step(self) -> float | None:
        """Dollars per step; None where a price is unknown."""
        hourly = self.price_per_hour
        return None if hourly is None else hourly * self.step_s / SECONDS_PER_HOUR

    def as_candidate(self, why: str = "") -> Candidate:
        """The config as a plan on its devices, with the reason why it won or lost."""
        program = self.problem.training.software.name
        name = label(self.config, self.schedule_name, program)
        return Candidate(
            planner=name, plan=self._plan(why), timeline=None, feasible=self.feasible,
            reason=self.reason, plan_seconds=0.0,
        )  # fmt: skip

    def _plan(self, why: str) -> Plan:
        config = self.config
        devices = rank_devices(
            tuple(pools_of(self.problem)[pool] for pool in self.stages.pools),
            self.stages.ranks,
            config.tensor,
            config.data * config.context,
        )
        parallel = Parallel.of_config(config, self.problem.training.model, devices)
        plan = Plan(
            planner="divide",
            work_hash=self.problem.work_hash,
            cluster_hash=self.problem.cluster.content_hash,
            sections=(parallel,) if self.schedule is None else (parallel, self.schedule),
            notes={"why": why} if why else {},
        )
        return plan.claiming(
            step_s=self.step_s,
            peak_bytes=self.peak_bytes,
            parts_s=self.parts_s,
            estimated_step_s=self.estimate_s,
        )


def forecast_of(problem: Problem, candidate: Candidate) -> ConfigForecast:
    """Forecast of a candidate, read from its plan."""
    assert candidate.plan is not None, "every config is a plan"
    plan, claims = candidate.plan, candidate.plan.claims
    parallel, schedule = plan[Parallel], plan.get(Schedule)
    step_s = claims.step_s or 0.0
    return ConfigForecast(
        problem=problem,
        config=parallel.config,
        stages=_stages(problem, parallel),
        estimate_s=claims.estimated_step_s or step_s,
        parts_s=claims.parts_s,
        step_s=step_s,
        bubble=claims.parts_s.get("bubble", 0.0) / step_s,
        peak_bytes=claims.peak_bytes,
        simulated=schedule is not None,
        feasible=candidate.feasible,
        reason=candidate.reason,
        schedule=schedule,
        costs=None if schedule is None else plan_stage_costs(problem, parallel),
    )


def _stages(problem: Problem, parallel: Parallel) -> PoolStages:
    pool_of = {
        device.name: index
        for index, pool in enumerate(pools_of(problem))
        for host in pool.hosts
        for device in host
    }
    return PoolStages.of_ranks(pool_of[names[0]] for names in parallel.rank_devices)


def most_in_the_middle(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Shares that differ by at most one; the stages in the middle get the larger ones.

    The first and the last stage have the embedding and the output layer besides.
    """
    share, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest) // 2
    return tuple(share + (first <= stage < first + rest) for stage in range(num_stages))


DEGREES = ("tensor", "pipeline", "data", "context", "expert")


def label(config: ParallelConfig, schedule: str, program: str = "") -> str:
    """A config in words: ``tensor 8, pipeline 12, microbatch 1, interleaved x2, ZeRO 1``."""
    words = [f"{name} {getattr(config, name)}" for name in DEGREES if getattr(config, name) > 1]
    words.append(f"microbatch {config.microbatch}")
    if config.pipeline > 1:
        many = f" x{config.chunks}" if config.chunks > 1 else ""
        only = " (hocket run only)" if is_hocket_only(program, schedule) else ""
        words.append(schedule + many + only)
    words += [f"{config.recompute} recompute"] * (config.recompute != "none")
    words += [f"ZeRO {config.zero}"] * (config.zero > 0)
    words += ["sequence parallel"] * config.sequence_parallel
    return ", ".join(words)
