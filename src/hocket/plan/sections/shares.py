"""The shares section: how the samples of one step are shared between devices and in time.

A replica is one device, or several that are the stages of a pipeline; it has all of the model. Each
replica takes some samples of the step's batch, in microbatches one after the other, and adds up
their gradients; then the replicas add theirs, and every one updates its model (or its shard of it)
as if it had seen the whole batch. Shares may be unequal: a gradient counts by its samples. One
replica with one stage and several microbatches is accumulation, several replicas are data parallel,
several stages a pipeline. With ``tensor`` parts every stage is so many devices, which divide its
matrices (Megatron-LM, Shoeybi et al., 2019). A replica may hold less than all that a step makes:
blocks of its forward pass are ``recomputed`` before their backward pass, and the optimizer's state
is kept and used on the host where ``update`` says so; both mean what they mean in the memory
section.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from hocket.base import fields
from hocket.base.errors import InputFileError
from hocket.plan.sections.memory import Update
from hocket.plan.sections.placement import Placement
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

ShareSchedule = Literal["1f1b", "gpipe", "zb-h1", "zb-h2"]
SHARE_SCHEDULES: tuple[ShareSchedule, ...] = get_args(ShareSchedule)
SPLIT_SCHEDULES: tuple[ShareSchedule, ...] = ("zb-h1", "zb-h2")
"""Those that put gradients of weights off, and those of inputs before them."""
UPDATES: tuple[Update, ...] = get_args(Update)
_MAX_SAMPLES = 2**31 - 1
_MAX_OPS = 2**31 - 1
_MAX_PARTS = 1024


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Devices that hold the model once, and the samples that they take."""

    devices: tuple[str, ...]
    """Those of each stage in the order of the forward pass; one per part of divided matrices."""
    microbatches: tuple[int, ...]
    """Samples of each microbatch, in the order in which they run."""
    cuts: tuple[int, ...] = ()
    """The forward op of the graph with which each stage but the first begins."""
    recomputed: tuple[tuple[int, int], ...] = ()
    """Blocks by their first forward op and the one after the last: what they make for the backward
    pass is dropped and made again when that comes to them."""
    update: Update = "device"
    """Where the optimizer changes parameters and keeps its state."""

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
    tensor: int = 1
    """Parts into which the matrices of every layer are divided: so many devices are a stage of a
    replica, and take its samples together."""

    @property
    def num_samples(self) -> int:
        """Samples of all replicas: the global batch."""
        return sum(replica.num_samples for replica in self.replicas)

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, replica by replica; each once, also where replicas take turns."""
        return tuple(dict.fromkeys(name for r in self.replicas for name in r.devices))

    def num_stages(self, replica: Replica) -> int:
        """Stages of the pipeline that a replica is."""
        return len(replica.devices) // self.tensor

    @property
    def is_staged(self) -> bool:
        """Whether some replica is a pipeline."""
        return any(self.num_stages(replica) > 1 for replica in self.replicas)

    @property
    def takes_turns(self) -> bool:
        """Whether replicas are waves over the same devices, each rotated by one more: every device
        takes every partition in turn."""
        first = self.replicas[0].devices if self.replicas else ()
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

    def part_by_part(self) -> Shares:
        """Every part of divided matrices as a replica of its own, with one device per stage."""
        parts = (
            replace(replica, devices=replica.devices[part :: self.tensor])
            for replica in self.replicas for part in range(self.tensor)
        )  # fmt: skip
        return replace(self, replicas=tuple(parts), tensor=1)

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "sharded": self.sharded,
            "schedule": self.schedule,
            **({"tensor": self.tensor} if self.tensor > 1 else {}),
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
    def from_data(cls, data: object, problem: Problem) -> Shares:
        """The section of such data."""
        needed = ("replicas", "sharded", "schedule")
        entry = fields.record(data, "shares", required=needed, optional=("tensor",))
        path = "shares.replicas"
        rows = fields.items(entry["replicas"], path)
        schedule = fields.choice(entry["schedule"], "shares.schedule", SHARE_SCHEDULES)
        shares = cls(
            replicas=tuple(_replica(row, f"{path}[{i}]") for i, row in enumerate(rows)),
            sharded=fields.flag(entry["sharded"], "shares.sharded"),
            schedule=next(name for name in SHARE_SCHEDULES if name == schedule),
            tensor=fields.integer(entry.get("tensor", 1), "shares.tensor", 1, _MAX_PARTS),
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
                "recomputed": {
                    "type": "array",
                    "items": {**numbers, "minItems": 2, "maxItems": 2},
                    "description": "Blocks of forward ops that run again for the backward pass.",
                },
                "update": {"enum": list(UPDATES)},
            },
        }
        return {
            "description": "How the samples of a step are shared between devices and in time.",
            "required": ["replicas", "sharded", "schedule"],
            "properties": {
                "replicas": {"type": "array", "items": replica, "minItems": 1},
                "sharded": {"type": "boolean"},
                "schedule": {"enum": list(SHARE_SCHEDULES)},
                "tensor": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Parts of every matrix, one per device of a stage.",
                },
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
        num_places = sum(len(replica.devices) for replica in self.replicas)
        if num_places != len(self.devices) and not self.takes_turns:
            yield Violation("shares", "a device stands in two stages")
        for replica in self.replicas:
            yield from _replica_violations(replica, graph.num_ops, self.tensor)
            if self.sharded and self.num_stages(replica) > 1:
                yield Violation("shares", "stages of a pipeline are not sharded")
            if self.schedule in SPLIT_SCHEDULES and replica.recomputed:
                told = f"{self.schedule} needs what a block made twice; it is made again once"
                yield Violation("shares", told)
        if self.tensor > 1 and self.sharded:
            yield Violation("shares", "parts of matrices are not sharded besides")
        counts = {len(replica.microbatches) for replica in self.replicas}
        if self.sharded and (len(counts) != 1 or len(self.replicas) < 2):
            told = "sharded replicas are two or more, with equally many microbatches each"
            yield Violation("shares", told)
        if self.sharded and len({replica.recomputed for replica in self.replicas}) > 1:
            # All of them gather the parameters of a block at the same time.
            yield Violation("shares", "sharded replicas recompute the same blocks")
        other = graph.other_batch
        if other is None:
            yield Violation("shares", "the graph does not say what grows with its batch")
        elif self.num_samples != other.num_samples:
            taken = f"{self.num_samples} of the batch's {other.num_samples} samples are taken"
            yield Violation("shares", taken)


def _replica(data: object, path: str) -> Replica:
    needed, added = ("devices", "microbatches", "cuts"), ("recomputed", "update")
    entry = fields.record(data, path, required=needed, optional=added)
    sizes = fields.int_column(entry["microbatches"], f"{path}.microbatches", 1, _MAX_SAMPLES)
    cuts = fields.int_column(entry["cuts"], f"{path}.cuts", 0, _MAX_OPS)
    return Replica(
        devices=tuple(fields.text_column(entry["devices"], f"{path}.devices")),
        microbatches=tuple(sizes.tolist()),
        cuts=tuple(cuts.tolist()),
        recomputed=tuple(_blocks(entry.get("recomputed", []), f"{path}.recomputed")),
        update=_update(entry.get("update", "device"), f"{path}.update"),
    )


def _blocks(data: object, path: str) -> Iterator[tuple[int, int]]:
    for number, block in enumerate(fields.items(data, path)):
        where = f"{path}[{number}]"
        fields.sized(block, where, 2, "the first op and the one after the last")
        start, stop = fields.int_column(block, where, 0, _MAX_OPS).tolist()
        yield start, stop


def _update(data: object, path: str) -> Update:
    chosen = fields.choice(data, path, UPDATES)
    return next(name for name in UPDATES if name == chosen)


def _replica_violations(replica: Replica, num_ops: int, tensor: int) -> Iterator[Violation]:
    where = ", ".join(replica.devices) or "a replica"
    num_stages, rest = divmod(len(replica.devices), tensor)
    if rest or not replica.devices:
        yield Violation("shares", f"{where}: each stage has a device for each of {tensor} parts")
    elif len(replica.cuts) != num_stages - 1:
        yield Violation("shares", f"{where}: there is one cut between two stages")
    if any(not 0 < cut < num_ops for cut in replica.cuts):
        yield Violation("shares", f"{where}: a cut is at no op of the graph")
    if any(a >= b for a, b in zip(replica.cuts, replica.cuts[1:], strict=False)):
        yield Violation("shares", f"{where}: cuts do not ascend")
    edges = [edge for block in replica.recomputed for edge in block]
    if edges != sorted(edges) or any(start >= stop for start, stop in replica.recomputed):
        yield Violation("shares", f"{where}: recomputed blocks do not follow each other")
    if edges and edges[-1] > num_ops:
        yield Violation("shares", f"{where}: a recomputed block has an op that is not there")
    if not replica.microbatches or min(replica.microbatches, default=0) < 1:
        yield Violation("shares", f"{where}: a microbatch has no sample")
