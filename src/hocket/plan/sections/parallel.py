"""The parallel section: data, tensor and pipeline parallelism, sharding, local batches and stages.

A replica is one device, or several that are the stages of a pipeline, and runs all of the model.
Each replica runs some samples of the step's batch in consecutive microbatches and accumulates their
gradients. Then the replicas reduce their gradients, and each updates its model, or its shard of the
model. The result is that of the global batch on one device: local batches may be unequal, since
gradients are weighted by their numbers of samples. With ``tensor`` parallelism, each stage is
``tensor`` devices that split its matrices (Megatron-LM, Shoeybi et al., 2019). With ``context``
parallelism, devices split the sequences.

Stages of a captured graph begin at ops (``Replica.cuts``), and blocks of ops are recomputed
(``Replica.recomputed``). Stages of a transformer's shape have ``layers`` and one ``recompute``
policy for all; only plans of this form may use every schedule and degree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from hocket.base import fields
from hocket.base.errors import InputFileError, UsageError
from hocket.base.parts import even_parts
from hocket.graph.graph import Graph
from hocket.plan.sections.memory import Update
from hocket.plan.sections.placement import Placement
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation
from hocket.transformer.parallel_config import (
    RECOMPUTES,
    SCHEDULES,
    SPLIT,
    ParallelConfig,
    Recompute,
    ScheduleName,
)
from hocket.transformer.rules import broken_rules
from hocket.transformer.shape import Transformer

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.plan.training import TransformerTraining

GraphSchedule = Literal["1f1b", "gpipe", "zb-h1", "zb-h2"]
GRAPH_SCHEDULES: tuple[GraphSchedule, ...] = get_args(GraphSchedule)
"""Pipeline schedules that captured graphs may use."""
UPDATES: tuple[Update, ...] = get_args(Update)
_MAX_SAMPLES = 2**31 - 1
_MAX_OPS = 2**31 - 1
_MAX_DEGREE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Devices that together run one copy of the model, and the samples that they run."""

    devices: tuple[str, ...]
    """Devices of each stage in the order of the forward pass; within a stage, tensor-parallel ranks
    vary fastest, then context-parallel ranks."""
    microbatches: tuple[int, ...]
    """Number of samples of each microbatch, in the order in which they run."""
    cuts: tuple[int, ...] = ()
    """First forward op of each stage except the first stage."""
    recomputed: tuple[tuple[int, int], ...] = ()
    """Recomputed blocks: first forward op, and the op after the last. Tensors saved for the
    backward pass are dropped and recomputed in it."""
    update: Update = "device"
    """Where the optimizer runs and keeps its state."""

    @property
    def num_samples(self) -> int:
        """Number of samples per step: the local batch."""
        return sum(self.microbatches)


@dataclass(frozen=True, kw_only=True)
class Parallel(Section):
    """Replicas with their devices and local batches, and the settings that all of them share."""

    replicas: tuple[Replica, ...]
    tensor: int = 1
    """Tensor-parallel degree: number of devices that split the matrices of every layer."""
    context: int = 1
    """Context-parallel degree: number of devices that split every sequence."""
    expert: int = 1
    """Expert-parallel degree: ranks of the other dimensions over which experts are distributed."""
    zero: int = 0
    """ZeRO stage, what replicas shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
    parameters (FSDP: the parameters of a block are gathered when it runs)."""
    schedule: ScheduleName = "1f1b"
    """Order in which pipeline stages run forward and backward passes."""
    recompute: Recompute = "none"
    """Recomputation policy of the stages of a transformer's shape."""
    sequence_parallel: bool = False
    """True if tensor-parallel ranks split norms and dropout along the sequence."""
    layers: tuple[int, ...] | None = None
    """Number of layers of each virtual stage of a transformer's shape; None for captured graphs,
    whose replicas have cuts."""

    @classmethod
    def of_config(
        cls, config: ParallelConfig, model: Transformer, rank_devices: tuple[tuple[str, ...], ...]
    ) -> Parallel:
        """Return the section of a transformer's parallel config, given the devices of each pipeline
        rank.

        Devices of a pipeline rank are listed with tensor-parallel ranks fastest, then context, then
        data.
        """
        width = config.tensor * config.context
        sizes = config.shares or (config.global_batch // config.data,) * config.data
        # One tuple for all equal replicas: batches of millions make it long.
        microbatches = {size: even_parts(size, config.num_microbatches) for size in set(sizes)}
        replicas = tuple(
            Replica(
                devices=tuple(
                    name for names in rank_devices for name in names[i * width : (i + 1) * width]
                ),
                microbatches=microbatches[size],
            )
            for i, size in enumerate(sizes)
        )
        return cls(
            replicas=replicas, tensor=config.tensor, context=config.context, expert=config.expert,
            zero=config.zero, schedule=config.schedule, recompute=config.recompute,
            sequence_parallel=config.sequence_parallel, layers=config.stage_layers(model.layers),
        )  # fmt: skip

    @property
    def config(self) -> ParallelConfig:
        """Parallel config of a transformer's plan; raises `UsageError` for captured graphs."""
        if self.layers is None:
            raise UsageError("the plan is for captured ops, not for a transformer's shape")
        first, sizes = self.replicas[0], [replica.num_samples for replica in self.replicas]
        pipeline = self.num_stages(first)
        return ParallelConfig(
            tensor=self.tensor,
            pipeline=pipeline,
            data=len(self.replicas),
            context=self.context,
            expert=self.expert,
            chunks=len(self.layers) // pipeline,
            microbatch=first.microbatches[0],
            global_batch=self.num_samples,
            schedule=self.schedule,
            recompute=self.recompute,
            zero=self.zero,
            sequence_parallel=self.sequence_parallel,
            layers=self.layers if len(set(self.layers)) > 1 else None,
            shares=tuple(sizes) if len(set(sizes)) > 1 else None,
        )

    @property
    def rank_devices(self) -> tuple[tuple[str, ...], ...]:
        """Devices of each pipeline rank, replica by replica; needs replicas of equal depth."""
        width = self.tensor * self.context
        return tuple(
            tuple(name for r in self.replicas for name in r.devices[i * width : (i + 1) * width])
            for i in range(self.num_stages(self.replicas[0]))
        )

    @property
    def num_samples(self) -> int:
        """Number of samples of all replicas: the global batch."""
        return sum(replica.num_samples for replica in self.replicas)

    @property
    def sharded(self) -> bool:
        """True if each replica keeps a shard of the parameters (ZeRO 3)."""
        return self.zero == 3

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, replica by replica; each once, also if round-robin replicas share them."""
        return tuple(dict.fromkeys(name for r in self.replicas for name in r.devices))

    def num_stages(self, replica: Replica) -> int:
        """Return the number of pipeline stages of a replica."""
        return len(replica.devices) // (self.tensor * self.context)

    @property
    def is_staged(self) -> bool:
        """True if any replica is a pipeline."""
        return any(self.num_stages(replica) > 1 for replica in self.replicas)

    @property
    def is_round_robin(self) -> bool:
        """True if replicas are waves over the same devices, each rotated by one device more than
        the one before, so that every device runs every partition in turn."""
        first = self.replicas[0].devices if self.replicas else ()
        # The exact form that the round-robin waves have; anything else would share devices by
        # mistake.
        return (
            len(first) > 1
            and len(self.replicas) == len(first)
            and self.tensor == 1
            and not self.sharded
            and all(
                replica.devices == first[wave:] + first[:wave]
                and replica.cuts == self.replicas[0].cuts
                and len(replica.microbatches) == 1
                and replica.update == "device"
                and not replica.recomputed
                for wave, replica in enumerate(self.replicas)
            )
        )

    def part_by_part(self) -> Parallel:
        """Return the section with each tensor-parallel rank as a replica of its own."""
        parts = (
            replace(replica, devices=replica.devices[part :: self.tensor])
            for replica in self.replicas for part in range(self.tensor)
        )  # fmt: skip
        return replace(self, replicas=tuple(parts), tensor=1)

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
            "zero": self.zero,
            "schedule": self.schedule,
            "recompute": self.recompute,
            "sequence_parallel": self.sequence_parallel,
            "layers": None if self.layers is None else list(self.layers),
            "replicas": [
                {
                    "devices": list(replica.devices),
                    "microbatches": list(replica.microbatches),
                    "cuts": list(replica.cuts),
                    "recomputed": [list(block) for block in replica.recomputed],
                    "update": replica.update,
                }
                for replica in self.replicas
            ],
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Parallel:
        """Read the section from plain data; raises `InputFileError`."""
        entry = fields.record(data, "parallel", required=_KEYS)
        path = "parallel.replicas"
        rows = fields.items(entry["replicas"], path)
        degrees = {
            name: fields.integer(entry[name], f"parallel.{name}", 1, _MAX_DEGREE)
            for name in _DEGREES
        }
        layers = entry["layers"]
        if layers is not None:
            layers = tuple(fields.int_column(layers, "parallel.layers", 0, _MAX_DEGREE).tolist())
        parallel = cls(
            replicas=tuple(_replica(row, f"{path}[{i}]") for i, row in enumerate(rows)),
            **degrees,
            zero=fields.integer(entry["zero"], "parallel.zero", 0, 3),
            schedule=fields.choice(entry["schedule"], "parallel.schedule", SCHEDULES),
            recompute=fields.choice(entry["recompute"], "parallel.recompute", RECOMPUTES),
            sequence_parallel=fields.flag(entry["sequence_parallel"], "parallel.sequence_parallel"),
            layers=layers,
        )
        wrong = next(parallel._violations(problem), None)
        if wrong is not None:
            raise InputFileError(wrong.message, hint="make the plan again with hocket plan")
        return parallel

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Check devices, stages, microbatches and that all samples of the batch are covered."""
        if plan.get(Placement) is not None:
            yield Violation("parallel", "the plan places the ops of a batch that it splits")
        yield from self._violations(problem)
        # An empty claim is allowed: not every plan is simulated.
        if self.layers is not None and len(plan.claims.peak_bytes) not in (
            0, self.num_stages(self.replicas[0]),
        ):  # fmt: skip
            yield Violation("devices", "claims.peak_bytes must have an entry per pipeline rank")

    def _violations(self, problem: Problem) -> Iterator[Violation]:
        if not self.replicas:
            yield Violation("parallel", "no replica takes a sample")
            return
        known = set(problem.cluster.device_names)
        counts = Counter(name for replica in self.replicas for name in replica.devices)
        for name, count in counts.items():
            if name not in known:
                message = f"{problem.cluster.name} has no device {name!r}"
                yield Violation("devices", message, device=name)
            # Only round-robin waves may use one device in several replicas.
            elif count > 1 and not self.is_round_robin:
                yield Violation("devices", f"device {name!r} is in two stages", device=name)
        for replica in self.replicas:
            yield from _replica_violations(replica, self.tensor * self.context)
        if isinstance(problem.work, Graph):
            yield from self._graph_violations(problem.work)
        elif problem.work is not None:
            yield from self._shape_violations(problem.training)

    def _shape_violations(self, training: TransformerTraining) -> Iterator[Violation]:
        """Check the rules of `hocket.transformer.rules`, and that replicas have equal shapes."""
        if self.layers is None:
            yield Violation("parallel", "the plan does not say how many layers each stage has")
            return
        if len({(len(r.devices), len(r.microbatches)) for r in self.replicas}) > 1:
            yield Violation("parallel", "replicas have other stages or microbatches than others")
        pipeline = self.num_stages(self.replicas[0])
        if not pipeline or not self.layers or len(self.layers) % pipeline:
            yield Violation("layers", f"layers of {len(self.layers)} stages for {pipeline} ranks")
        elif all(replica.microbatches for replica in self.replicas):
            for rule in broken_rules(training.model, self.config):
                yield Violation("parallel", rule)
        if self.num_samples != training.global_batch:
            message = f"{self.num_samples} of the batch's {training.global_batch} samples are taken"
            yield Violation("parallel", message)

    def _graph_violations(self, graph: Graph) -> Iterator[Violation]:
        for replica in self.replicas:
            yield from _cut_violations(replica, self.num_stages(replica), graph.num_ops)
            # Split backward passes read saved tensors in both halves.
            if self.schedule in SPLIT and replica.recomputed:
                message = f"{self.schedule} reads saved tensors twice; they are recomputed once"
                yield Violation("parallel", message)
        if self.schedule not in GRAPH_SCHEDULES or self.zero in (1, 2):
            message = f"captured ops have no schedule {self.schedule} with ZeRO {self.zero}"
            yield Violation("parallel", message)
        if self.context > 1 or self.expert > 1 or self.layers is not None:
            yield Violation("parallel", "captured ops have no context or expert degree or layers")
        if self.sharded:
            yield from self._shard_violations()
        other = graph.other_batch
        if other is None:
            yield Violation("parallel", "the graph does not say what grows with its batch")
        elif self.num_samples != other.num_samples:
            message = f"{self.num_samples} of the batch's {other.num_samples} samples are taken"
            yield Violation("parallel", message)

    def _shard_violations(self) -> Iterator[Violation]:
        if self.is_staged or self.tensor > 1:
            yield Violation("parallel", "stages and tensor-parallel parts are not sharded")
        counts = {len(replica.microbatches) for replica in self.replicas}
        if len(counts) != 1 or len(self.replicas) < 2:
            message = "sharded replicas are two or more, with equally many microbatches each"
            yield Violation("parallel", message)
        if len({replica.recomputed for replica in self.replicas}) > 1:
            # All of them gather the parameters of a block at the same time.
            yield Violation("parallel", "sharded replicas recompute the same blocks")


_DEGREES = ("tensor", "context", "expert")
_KEYS = (
    *_DEGREES, "zero", "schedule", "recompute", "sequence_parallel", "layers", "replicas",
)  # fmt: skip


def _replica(data: object, path: str) -> Replica:
    needed = ("devices", "microbatches", "cuts", "recomputed", "update")
    entry = fields.record(data, path, required=needed)
    sizes = fields.int_column(entry["microbatches"], f"{path}.microbatches", 1, _MAX_SAMPLES)
    cuts = fields.int_column(entry["cuts"], f"{path}.cuts", 0, _MAX_OPS)
    return Replica(
        devices=tuple(fields.text_column(entry["devices"], f"{path}.devices")),
        microbatches=tuple(sizes.tolist()),
        cuts=tuple(cuts.tolist()),
        recomputed=tuple(_blocks(entry["recomputed"], f"{path}.recomputed")),
        update=fields.choice(entry["update"], f"{path}.update", UPDATES),
    )


def _blocks(data: object, path: str) -> Iterator[tuple[int, int]]:
    for number, block in enumerate(fields.items(data, path)):
        where = f"{path}[{number}]"
        fields.sized(block, where, 2, "the first op and the one after the last")
        start, stop = fields.int_column(block, where, 0, _MAX_OPS).tolist()
        yield start, stop


def _replica_violations(replica: Replica, width: int) -> Iterator[Violation]:
    where = ", ".join(replica.devices[:4]) or "a replica"
    if not replica.devices or len(replica.devices) % width:
        yield Violation("parallel", f"{where}: each stage has {width} devices")
    if not replica.microbatches or min(replica.microbatches) < 1:
        yield Violation("parallel", f"{where}: a microbatch has no sample")


def _cut_violations(replica: Replica, num_stages: int, num_ops: int) -> Iterator[Violation]:
    where = ", ".join(replica.devices) or "a replica"
    if len(replica.cuts) != num_stages - 1:
        yield Violation("parallel", f"{where}: there is one cut between two stages")
    if any(not 0 < cut < num_ops for cut in replica.cuts):
        yield Violation("parallel", f"{where}: a cut is at no op of the graph")
    if any(a >= b for a, b in zip(replica.cuts, replica.cuts[1:], strict=False)):
        yield Violation("parallel", f"{where}: cuts do not ascend")
    edges = [edge for block in replica.recomputed for edge in block]
    if edges != sorted(edges) or any(start >= stop for start, stop in replica.recomputed):
        yield Violation("parallel", f"{where}: recomputed blocks do not follow each other")
    if edges and edges[-1] > num_ops:
        yield Violation("parallel", f"{where}: a recomputed block has an op that is not there")
