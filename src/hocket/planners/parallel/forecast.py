"""Predicted step time, memory and utilization of a parallel config, for search and reports.

`ConfigForecast` is a config of a transformer's shape, predicted by the closed form or the pipeline
simulator; `GraphForecast` is a plan of captured ops with its simulated timeline. Both turn into
candidates with plans (`as_candidate`) and are read back from plans (`forecast_of`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from hocket.cost.chips import chip_of
from hocket.cost.ranges import step_range
from hocket.graph.graph import DTYPES, Graph, Phase
from hocket.hardware.cluster import Cluster, DeviceKind
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Schedule
from hocket.planners.candidates import Candidate, SimulatedCandidate
from hocket.planners.parallel.closed_form import block_edges
from hocket.planners.parallel.pools import pool_clusters, pools_of, rank_devices
from hocket.simulate.analysis import price_per_hour, used_devices
from hocket.simulate.timeline import Timeline
from hocket.transformer import ParallelConfig, Recompute

SECONDS_PER_HOUR = 3600
SPARE = 0.04
"""Fraction of memory that a search leaves free. Measured peaks of published runs exceed predictions
by up to this fraction, so a plan that fills memory completely could run out of it."""
CALIBRATED = 0.12
"""Relative error of steps with fitted coefficients: 95th percentile over published tables."""
EXPERTS = 0.5
"""Relative error of steps for mixtures of experts: releases of one program differ by up to 1.8
times."""
EXPOSED = ("tensor", "other", "pipeline", "data")
"""Parts of a step that are communication."""


@dataclass(frozen=True, kw_only=True)
class PoolStages:
    """Pools of the pipeline ranks as runs of consecutive ranks; a pool may have several runs."""

    pools: tuple[int, ...]
    """Position in the cluster of each run's pool."""
    ranks: tuple[int, ...]
    """Number of pipeline ranks in each run."""

    @classmethod
    def of_ranks(cls, pool_of_rank: Iterable[int]) -> PoolStages:
        """Build the runs from the pool of every rank."""
        runs = [(pool, len(list(own))) for pool, own in groupby(pool_of_rank)]
        return cls(pools=tuple(pool for pool, _ in runs), ranks=tuple(count for _, count in runs))

    @property
    def pool_of_rank(self) -> tuple[int, ...]:
        """Pool of every rank."""
        pairs = zip(self.pools, self.ranks, strict=True)
        return tuple(pool for pool, count in pairs for _ in range(count))


@dataclass(frozen=True, eq=False, kw_only=True)
class ConfigForecast:
    """One parallel config with its predicted time, memory and utilization."""

    problem: Problem
    config: ParallelConfig
    stages: PoolStages
    estimate_s: float
    """Step time by the closed form, by which configs are selected for simulation."""
    parts_s: Mapping[str, float]
    """Seconds of each part of ``step_s``, from the closed form with the simulated waiting time."""
    step_s: float
    """Simulated step time; that of the closed form if the config was not simulated."""
    bubble: float
    """Fraction of the devices' time in which they wait for other stages."""
    peak_bytes: tuple[int, ...]
    """Peak memory of one device of each pipeline rank."""
    simulated: bool
    feasible: bool
    reason: str = ""
    """Why the config won, why it lost, or why it cannot be used."""
    schedule: Schedule | None = None
    name: str = ""
    """Name of the strategy, if its degrees do not describe it."""

    @property
    def num_devices(self) -> int:
        """Number of devices in use."""
        return self.config.num_devices

    @property
    def cluster(self) -> Cluster:
        """Cluster that the config runs on: a single pool, or all pools."""
        if len(self.stages.pools) == 1:
            return pool_clusters(self.problem)[self.stages.pools[0]]
        return self.problem.cluster

    @property
    def kinds(self) -> tuple[str, ...]:
        """Device type of each pipeline rank."""
        return tuple(kind.name for kind in self._kind_of_rank)

    @property
    def capacity_bytes(self) -> tuple[int, ...]:
        """Usable memory of one device of each pipeline rank."""
        pools = pools_of(self.problem)
        return tuple(pools[pool].memory_bytes for pool in self.stages.pool_of_rank)

    @property
    def limit_bytes(self) -> tuple[int, ...]:
        """Bytes that a plan may fill of each entry of `capacity_bytes`."""
        pools = pools_of(self.problem)
        return tuple(pools[pool].limit_bytes for pool in self.stages.pool_of_rank)

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank with the least free memory."""
        pairs = zip(self.peak_bytes, self.limit_bytes, strict=True)
        spare = [capacity - peak for peak, capacity in pairs]
        return spare.index(min(spare))

    @property
    def lacking_bytes(self) -> int:
        """Bytes that the devices of the fullest rank lack; 0 if everything fits."""
        rank = self.fullest_rank
        return max(0, self.peak_bytes[rank] - self.limit_bytes[rank])

    @property
    def uncertainty(self) -> float:
        """Relative error of ``step_s`` that nine of ten measured steps do not exceed."""
        if self.problem.training.coefficients.is_measured:
            return CALIBRATED
        libraries = self.problem.training.software.libraries
        chips = [chip_of(kind, libraries) for kind in set(self.kinds)]
        # The least certain device type decides.
        return max([chip.uncertainty for chip in chips] + [EXPERTS] * bool(self._has_experts))

    @property
    def _has_experts(self) -> bool:
        return self.problem.training.model.experts is not None

    @property
    def range_s(self) -> tuple[float, float]:
        """Range in which nine of ten measured steps are expected."""
        return self.step_s * (1 - self.uncertainty), self.step_s * (1 + self.uncertainty)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all replicas together."""
        training = self.problem.training
        return training.global_batch * training.model.sequence / self.step_s

    @property
    def mfu(self) -> float:
        """MFU: the model's FLOP/s relative to the peak of the devices in use."""
        dtype = self.problem.training.software.dtype
        peaks = sum(kind.peak_for(dtype) for kind in self._kind_of_rank)
        # Devices of one pipeline rank are of one type, so peaks are summed over ranks.
        return self.problem.training.step_flops / (self.step_s * self._devices_per_rank * peaks)

    @property
    def causal_mfu(self) -> float | None:
        """MFU that counts only the token pairs under the causal mask."""
        return self.problem.training.causal_share * self.mfu

    @property
    def _kind_of_rank(self) -> list[DeviceKind]:
        return [pools_of(self.problem)[pool].kind for pool in self.stages.pool_of_rank]

    @property
    def _devices_per_rank(self) -> int:
        return self.config.num_devices // self.config.pipeline

    @property
    def exposed_share(self) -> float | None:
        """Fraction of the step spent in communication that no computation overlaps."""
        return sum(self.parts_s.get(name, 0.0) for name in EXPOSED) / self.step_s

    @property
    def price_per_hour(self) -> float | None:
        """Dollars per hour of the used devices; None if a price is unknown."""
        prices = [kind.price_per_hour * self._devices_per_rank for kind in self._kind_of_rank]
        return sum(prices) if all(price > 0 for price in prices) else None

    @property
    def price_per_step(self) -> float | None:
        """Dollars per step; None if a price is unknown."""
        hourly = self.price_per_hour
        return None if hourly is None else hourly * self.step_s / SECONDS_PER_HOUR

    def as_candidate(self, why: str = "") -> Candidate:
        """The config as a candidate with a plan; ``why`` is the reason why it won or lost."""
        return Candidate(
            planner=label(self.config), plan=self._plan(why), timeline=None,
            feasible=self.feasible, reason=self.reason, plan_seconds=0.0,
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


@dataclass(frozen=True, eq=False, kw_only=True)
class GraphForecast(ConfigForecast):
    """Forecast of a parallel plan of captured ops, from its simulated timeline."""

    timeline: Timeline

    @cached_property
    def devices(self) -> list[int]:
        """Devices that compute."""
        return used_devices(self.timeline)

    @property
    def num_devices(self) -> int:
        """Number of devices in use."""
        return len(self.devices)

    @property
    def fullest_rank(self) -> int:
        """The device with the least free memory."""
        spare = np.asarray(self.problem.memory_bytes) - np.array(self.peak_bytes)
        return min(self.devices, key=lambda device: int(spare[device]))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Types of the devices that compute, without duplicates."""
        devices = self.problem.cluster.devices
        return tuple(dict.fromkeys(devices[device].kind.name for device in self.devices))

    @property
    def capacity_bytes(self) -> tuple[int, ...]:
        """Usable memory of each device of the cluster."""
        return tuple(self.problem.memory_bytes.tolist())

    @property
    def limit_bytes(self) -> tuple[int, ...]:
        """The same as `capacity_bytes`: a simulated peak may fill all usable memory of a device."""
        return self.capacity_bytes

    @property
    def range_s(self) -> tuple[float, float]:
        """80 % range of the step time, from measured over predicted steps of other models."""
        found = step_range(self.problem.costs)
        return found.low * self.step_s, found.high * self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all replicas together; None if samples are not sequences."""
        sequence = self.problem.graph.meta.get("seq")
        if not isinstance(sequence, int):
            return None
        return self.config.global_batch * sequence / self.step_s

    @property
    def mfu(self) -> float:
        """FLOP/s of the captured forward and backward pass relative to the devices' peak."""
        graph = self.problem.graph
        is_pass = graph.op_phase != Phase.OPTIMIZER
        flops = graph.flops[is_pass]
        by_dtype = np.bincount(graph.op_dtype[is_pass], flops, len(DTYPES))
        dtype = DTYPES[int(by_dtype.argmax())]
        devices = self.problem.cluster.devices
        peaks = sum(devices[device].kind.peak_for(dtype) for device in self.devices)
        return float(flops.sum()) / (self.step_s * peaks)

    @property
    def causal_mfu(self) -> float | None:
        """Always None: FLOPs of captured attention already count only the pairs that its kernel
        computes."""
        return None

    @property
    def exposed_share(self) -> float | None:
        """Always None: the simulator overlaps communication op by op and keeps no sum of it."""
        return None

    @property
    def price_per_hour(self) -> float | None:
        """Dollars per hour of the used devices; None if a price is unknown."""
        return price_per_hour(self.problem, self.timeline)


def _graph_forecast(problem: Problem, candidate: SimulatedCandidate) -> GraphForecast:
    parallel, timeline = candidate.plan.get(Parallel), candidate.timeline
    config = ParallelConfig()  # op placement of the full batch
    if parallel is not None:
        config = graph_config(problem.graph, parallel)
    # A plan without a claimed step has only its timeline.
    step_s = candidate.step_s or timeline.makespan_s
    devices = used_devices(timeline)
    busy_s = timeline.busy_s[timeline.busy_s > 0]  # one replica may stand for all
    return GraphForecast(
        problem=problem,
        config=config,
        stages=PoolStages(pools=(0,), ranks=(config.pipeline,)),
        estimate_s=step_s,
        parts_s={},
        step_s=step_s,
        bubble=max(0.0, 1 - float(busy_s.mean()) / timeline.makespan_s) if devices else 0.0,
        peak_bytes=tuple(timeline.peak_bytes.tolist()),
        simulated=True,
        feasible=candidate.feasible,
        reason=candidate.reason,
        name=candidate.planner,
        timeline=timeline,
    )


def graph_config(graph: Graph, parallel: Parallel) -> ParallelConfig:
    """Degrees of a parallel section of captured ops; the largest ones if replicas are unequal."""
    replicas = parallel.replicas
    num_blocks = len(block_edges(graph)) - 1
    most = max(len(replica.recomputed) for replica in replicas)
    # Some blocks recomputed and some not is closest to selective recompute.
    recompute: Recompute = "none" if not most else "full" if most >= num_blocks else "selective"
    samples = tuple(replica.num_samples for replica in replicas)
    return ParallelConfig(
        tensor=parallel.tensor,
        pipeline=max(parallel.num_stages(replica) for replica in replicas),
        data=len(replicas),
        microbatch=max(max(replica.microbatches) for replica in replicas),
        global_batch=parallel.num_samples,
        schedule=parallel.schedule,
        recompute=recompute,
        zero=parallel.zero,
        shares=samples if len(Counter(samples)) > 1 else None,
    )


def has_degrees(candidate: Candidate) -> bool:
    """True if a candidate's replicas are equal enough to be described by degrees."""
    parallel = None if candidate.plan is None else candidate.plan.get(Parallel)
    if parallel is None or not (parallel.layers or isinstance(candidate, SimulatedCandidate)):
        return False
    return len({parallel.num_stages(replica) for replica in parallel.replicas}) == 1


def forecast_of(problem: Problem, candidate: Candidate) -> ConfigForecast:
    """Forecast of a candidate, read from its plan."""
    assert candidate.plan is not None, "every config is a plan"
    if isinstance(candidate, SimulatedCandidate):
        return _graph_forecast(problem, candidate)
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
    """Layers per stage that differ by at most one, with the larger numbers in the middle.

    The first and the last stage have the embedding and the output layer in addition.
    """
    share, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest) // 2
    return tuple(share + (first <= stage < first + rest) for stage in range(num_stages))


DEGREES = ("tensor", "pipeline", "data", "context", "expert")


def label(config: ParallelConfig) -> str:
    """Describe a config, such as ``tensor 8, pipeline 12, interleaved x2, ZeRO 1``."""
    words = [f"{name} {getattr(config, name)}" for name in DEGREES if getattr(config, name) > 1]
    words.append(f"microbatch {config.microbatch}")
    if config.pipeline > 1:
        many = f" x{config.chunks}" if config.chunks > 1 else ""
        words.append(config.schedule + many)
    words += [f"{config.recompute} recompute"] * (config.recompute != "none")
    words += [f"ZeRO {config.zero}"] * (config.zero > 0)
    words += ["sequence parallel"] * config.sequence_parallel
    return ", ".join(words)
