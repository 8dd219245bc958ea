"""Read access to the plan of a transformer's training, for exports, runs and views.

`TransformerPlan` joins a problem and its plan; `plan_stage_costs` computes the costs of its stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hocket.hardware.cluster import Cluster, Device
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Schedule
from hocket.plan.violation import Violation
from hocket.transformer.parallel_config import ParallelConfig
from hocket.transformer.shape import Transformer

if TYPE_CHECKING:
    from hocket.cost.parallel.costs import StageCosts


@dataclass(frozen=True, eq=False)
class TransformerPlan:
    """A problem whose work is the training of a transformer, and a plan for it.

    Reading from a section that the plan does not have raises `UsageError`.
    """

    problem: Problem
    plan: Plan

    @property
    def model(self) -> Transformer:
        """The shape of the transformer."""
        return self.problem.training.model

    @property
    def cluster(self) -> Cluster:
        """The cluster of the training."""
        return self.problem.cluster

    @property
    def dtype(self) -> str:
        """Dtype of matrix products."""
        return self.problem.training.software.dtype

    @property
    def config(self) -> ParallelConfig:
        """The parallel config."""
        return self.plan[Parallel].config

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the devices of each pipeline rank."""
        return self.plan[Parallel].rank_devices

    @cached_property
    def costs(self) -> StageCosts:
        """Costs of the pipeline stages."""
        return plan_stage_costs(self.problem, self.plan[Parallel])

    @property
    def schedule(self) -> Schedule:
        """Passes of each pipeline rank, in order."""
        return self.plan[Schedule]

    @property
    def step_s(self) -> float:
        """Predicted time of a step; 0 if the plan has no prediction."""
        return self.plan.claims.step_s or 0.0

    @property
    def first_devices(self) -> tuple[Device, ...]:
        """First device of each pipeline rank, which stands for the equal devices of that rank."""
        known = {device.name: device for device in self.cluster.devices}
        return tuple(known[names[0]] for names in self.devices)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's FLOPs over peak FLOPs of the used devices."""
        if not self.step_s:
            return None
        per_rank = self.config.num_devices // self.config.pipeline
        peaks = (device.kind.peak_for(self.dtype) for device in self.first_devices)
        return self.problem.training.step_flops / (self.step_s * per_rank * sum(peaks))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all replicas together."""
        tokens = self.config.global_batch * self.model.sequence
        return tokens / self.step_s if self.step_s else None


def is_transformer_plan(plan: Plan) -> bool:
    """Return True if a plan is for a transformer's shape, not for captured ops."""
    parallel = plan.get(Parallel)
    return parallel is not None and parallel.layers is not None


def plan_stage_costs(problem: Problem, parallel: Parallel) -> StageCosts:
    """Return the costs of the stages of a transformer's plan on its devices."""
    from hocket.cost.parallel.stages import stage_costs

    training = problem.training
    kind_of = {device.name: device.kind.name for device in problem.cluster.devices}
    kinds = tuple(kind_of[names[0]] for names in parallel.rank_devices)
    cluster = problem.cluster
    # With one device type, the network is that of this type alone.
    if len(set(kinds)) == 1:
        cluster = cluster_of_kind(cluster, kinds[0])
    config = replace(parallel.config, layers=parallel.layers)
    return stage_costs(
        training.model, config, cluster, training.software, training.coefficients, kinds=kinds
    )


def cluster_of_kind(cluster: Cluster, kind: str) -> Cluster:
    """Return the cluster reduced to the devices of one type."""
    names = [device.name for device in cluster.devices if device.kind.name == kind]
    if len(names) == cluster.num_devices:
        return cluster
    return replace(cluster.only(names), name=f"{cluster.name} ({kind})")


def rank_memory_violations(
    divided: TransformerPlan, peak_bytes: tuple[int, ...]
) -> Iterator[Violation]:
    """Yield pipeline ranks whose peak exceeds the memory of their smallest device."""
    capacity = {device.name: device.memory_bytes for device in divided.cluster.devices}
    for rank, (names, peak) in enumerate(zip(divided.devices, peak_bytes, strict=True)):
        # All devices of a rank hold equally much, so the smallest one decides.
        name = min(names, key=lambda name: capacity[name])
        if peak > capacity[name]:
            lacking = (peak - capacity[name]) / 2**30
            message = f"pipeline rank {rank} lacks {lacking:.1f} GiB on {name!r}"
            yield Violation("memory", message, device=name)
