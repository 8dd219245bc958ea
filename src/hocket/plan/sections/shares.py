"""The shares section: how the samples of one step are shared between devices and in time.

A replica is one device, or several that are the stages of a pipeline; it has all of the model. Each
replica takes some samples of the step's batch, in microbatches one after the other, and adds up
their gradients; then the replicas add theirs, and every one updates its model (or its shard of it)
as if it had seen the whole batch. Shares may be unequal: a gradient counts by its samples. One
replica with one stage and several microbatches is accumulation, several replicas are data parallel,
several stages a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.plan.sections.placement import Placement
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

ShareSchedule = Literal["1f1b", "gpipe"]
SHARE_SCHEDULES: tuple[ShareSchedule, ...] = get_args(ShareSchedule)
_MAX_SAMPLES = 2**31 - 1
_MAX_OPS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Devices that hold the model once, and the samples that they take."""

    devices: tuple[str, ...]
    """One per stage, in the order of the forward pass."""
    microbatches: tuple[int, ...]
    """Samples of each microbatch, in the order in which they run."""
    cuts: tuple[int, ...] = ()
    """The forward op of the graph with which each stage but the first begins."""

    @property
    def num_samples(self) -> int:
        """Samples per step."""
        return sum(self.microbatches)


@dataclass(frozen=True, kw_only=True)
class Shares(Section):
    """Who takes which samples."""

    replicas: tuple[Replica, ...]
    sharded: bool = False
    """Whether replicas keep a part of parameters, gradients and optimizer state each, and gather
    the parameters of a block when it runs (FSDP, ZeRO 3)."""
    schedule: ShareSchedule = "1f1b"
    """In which order stages of a pipeline take forward and backward passes."""

    @property
    def num_samples(self) -> int:
        """Samples of all replicas: the global batch."""
        return sum(replica.num_samples for replica in self.replicas)

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, replica by replica."""
        return tuple(name for replica in self.replicas for name in replica.devices)

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "sharded": self.sharded,
            "schedule": self.schedule,
            "replicas": [
                {
                    "devices": list(replica.devices),
                    "microbatches": list(replica.microbatches),
                    "cuts": list(replica.cuts),
                }
                for replica in self.replicas
            ],
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Shares:
        """The section of such data."""
        entry = fields.record(data, "shares", required=("replicas", "sharded", "schedule"))
        path = "shares.replicas"
        rows = fields.items(entry["replicas"], path)
        schedule = fields.choice(entry["schedule"], "shares.schedule", SHARE_SCHEDULES)
        shares = cls(
            replicas=tuple(_replica(row, f"{path}[{i}]") for i, row in enumerate(rows)),
            sharded=fields.flag(entry["sharded"], "shares.sharded"),
            schedule=next(name for name in SHARE_SCHEDULES if name == schedule),
        )
        wrong = next(shares._violations(problem), None)
        if wrong is not None:
            raise InputFileError(wrong.message, hint="make the plan again with hocket plan")
        return shares

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON Schema of the data."""
        numbers = {"type": "array", "items": {"type": "integer", "minimum": 0}}
        replica = {
            "type": "object",
            "required": ["devices", "microbatches", "cuts"],
            "additionalProperties": False,
            "properties": {
                "devices": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "microbatches": {**numbers, "description": "Samples, one after the other."},
                "cuts": {**numbers, "description": "First forward op of each further stage."},
            },
        }
        return {
            "description": "How the samples of a step are shared between devices and in time.",
            "required": ["replicas", "sharded", "schedule"],
            "properties": {
                "replicas": {"type": "array", "items": replica, "minItems": 1},
                "sharded": {"type": "boolean"},
                "schedule": {"enum": list(SHARE_SCHEDULES)},
            },
        }

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Devices that exist, each once; cuts inside the graph; all samples of the batch."""
        if plan.get(Placement) is not None:
            yield Violation("shares", "the plan places the ops of a batch that it shares out")
        yield from self._violations(problem)

    def _violations(self, problem: Problem) -> Iterator[Violation]:
        graph, known = problem.graph, set(problem.cluster.device_names)
        if not self.replicas:
            yield Violation("shares", "no replica takes a sample")
        for name in self.devices:
            if name not in known:
                yield Violation("shares", f"{problem.cluster.name} has no device {name!r}")
        if len(set(self.devices)) != len(self.devices):
            yield Violation("shares", "a device stands in two stages")
        for replica in self.replicas:
            yield from _replica_violations(replica, graph.num_ops)
            if self.sharded and len(replica.devices) > 1:
                yield Violation("shares", "stages of a pipeline are not sharded")
        counts = {len(replica.microbatches) for replica in self.replicas}
        if self.sharded and (len(counts) != 1 or len(self.replicas) < 2):
            told = "sharded replicas are two or more, with equally many microbatches each"
            yield Violation("shares", told)
        other = graph.other_batch
        if other is None:
            yield Violation("shares", "the graph does not say what grows with its batch")
        elif self.num_samples != other.num_samples:
            taken = f"{self.num_samples} of the batch's {other.num_samples} samples are taken"
            yield Violation("shares", taken)


def _replica(data: object, path: str) -> Replica:
    entry = fields.record(data, path, required=("devices", "microbatches", "cuts"))
    sizes = fields.int_column(entry["microbatches"], f"{path}.microbatches", 1, _MAX_SAMPLES)
    cuts = fields.int_column(entry["cuts"], f"{path}.cuts", 0, _MAX_OPS)
    return Replica(
        devices=tuple(fields.text_column(entry["devices"], f"{path}.devices")),
        microbatches=tuple(sizes.tolist()),
        cuts=tuple(cuts.tolist()),
    )


def _replica_violations(replica: Replica, num_ops: int) -> Iterator[Violation]:
    where = ", ".join(replica.devices) or "a replica"
    if len(replica.cuts) != max(len(replica.devices) - 1, 0) or not replica.devices:
        yield Violation("shares", f"{where}: there is one cut between two stages")
    if any(not 0 < cut < num_ops for cut in replica.cuts):
        yield Violation("shares", f"{where}: a cut is at no op of the graph")
    if any(a >= b for a, b in zip(replica.cuts, replica.cuts[1:], strict=False)):
        yield Violation("shares", f"{where}: cuts do not ascend")
    if not replica.microbatches or min(replica.microbatches, default=0) < 1:
        yield Violation("shares", f"{where}: a microbatch has no sample")
