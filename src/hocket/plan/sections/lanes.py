"""The lanes section: microbatches of a replica run in two lanes on one device at the same time.

The first microbatch (wave tick) runs in the first lane, the second (wave tock) in the second, and
so on in turns. Tock begins when tick has run its first ``lead`` ops, so that what it holds grows
while what tick holds shrinks, and its kernels fill the gaps of the other lane (Wavelet, Wang et
al., MLSys 2021). The section stands beside `Shares`, which says what each microbatch takes.

Gradients are added up in the order of the microbatches and the parameters change once per step, so
the result is that of accumulation, to the bit. Where ``changes`` is ``wave`` they change after each
wave, as published: by the mean of its gradients and those of the wave before. A wave is computed
with parameters that are one change old then, each lane holds its own, and there are as many updates
as waves; the result is not that of accumulation.

``waits`` keep addresses safe: where something of one lane lies in the slab where something of the
other lay before, the op that makes it waits for the last one that read the other, however fast the
lanes really are. Where there is room, each lane has memory of its own (``own_bytes``) and waits for
nothing but results. Where there is less, lanes also have parts between them (``part_bytes``): one
takes a part over from the other as a whole, when nothing of that lane is left in it, so it waits
once for each. The first lane takes them in their order and the second in the opposite one, since a
wave drops last what it made first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from hocket.base import fields
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections.section import Section
from hocket.plan.sections.shares import Shares
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

NUM_LANES = 2
Changes = Literal["step", "wave"]
CHANGES: tuple[Changes, ...] = get_args(Changes)
_MAX_COUNT = 2**31 - 1
_MAX_BYTES = 2**60


class LaneWait(NamedTuple):
    """An op that waits for one of the other lane."""

    wave: int
    """The microbatch of the op that waits."""
    op: int
    """An op of the graph, forward or backward."""
    on_wave: int
    on_op: int


@dataclass(frozen=True, kw_only=True)
class Lanes(Section):
    """When the second lane begins, and where it waits for the first and the first for it."""

    lead: int
    """Ops of the first microbatch that run before the second begins; 0: both begin together."""
    slab_bytes: int = 0
    """What the planned addresses of all that lives in both lanes take; 0 where none are planned."""
    waits: tuple[LaneWait, ...] = ()
    changes: Changes = "step"
    """After what the parameters change."""
    own_bytes: tuple[int, ...] = ()
    """What each lane takes that never is the other's; empty where all memory is of both."""
    part_bytes: tuple[int, ...] = ()
    """What parts take that lanes hand over as a whole."""
    parts: tuple[int, ...] = ()
    """For each op of a wave, forward then backward, the part that what it makes lies in, as the
    first lane counts them, from 1; 0: in the lane's own memory. Empty where there are none."""
    lived_bytes: int = 0
    """The most that lives in both lanes at once; 0 where no memory is reserved for them."""

    @property
    def slabs(self) -> tuple[int, ...]:
        """Bytes of the one memory, or of each lane's own and then of each part."""
        return (*self.own_bytes, *self.part_bytes) or (self.slab_bytes,)

    def slab_of(self, lane: int, part: int) -> int:
        """Which of the slabs a lane means by a part, or, 0, by its own memory."""
        if not self.own_bytes:
            return 0
        return slab_number(lane, part, len(self.part_bytes))

    @property
    def apart_bytes(self) -> int:
        """What reserved memory takes over what lives in it at once."""
        return max(sum(self.slabs) - self.lived_bytes, 0) if self.lived_bytes else 0

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "lead": self.lead,
            "slab_bytes": self.slab_bytes,
            "waits": [list(wait) for wait in self.waits],
            **({} if self.changes == "step" else {"changes": self.changes}),
            **({"own_bytes": list(self.own_bytes)} if self.own_bytes else {}),
            **({"part_bytes": list(self.part_bytes)} if self.part_bytes else {}),
            **({"parts": list(self.parts)} if self.parts else {}),
            **({"lived_bytes": self.lived_bytes} if self.lived_bytes else {}),
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Lanes:
        """The section of such data."""
        entry = fields.record(
            data, "lanes", required=("lead", "slab_bytes", "waits"),
            optional=("changes", "own_bytes", "part_bytes", "parts", "lived_bytes"),
        )  # fmt: skip
        told = fields.choice(entry.get("changes", "step"), "lanes.changes", CHANGES)
        return cls(
            changes=next(name for name in CHANGES if name == told),
            lead=fields.integer(entry["lead"], "lanes.lead", 0, _MAX_COUNT),
            slab_bytes=fields.integer(entry["slab_bytes"], "lanes.slab_bytes", 0, _MAX_BYTES),
            waits=tuple(_waits(entry["waits"], "lanes.waits")),
            own_bytes=_own_bytes(entry["own_bytes"]) if "own_bytes" in entry else (),
            part_bytes=_column(entry, "part_bytes", _MAX_BYTES),
            parts=_column(entry, "parts", _MAX_COUNT),
            lived_bytes=fields.integer(
                entry.get("lived_bytes", 0), "lanes.lived_bytes", 0, _MAX_BYTES
            ),
        )

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON Schema of the data."""
        count = {"type": "integer", "minimum": 0}
        return {
            "description": "Microbatches in turns in two lanes of one device.",
            "required": ["lead", "slab_bytes", "waits"],
            "properties": {
                "lead": {**count, "description": "Ops of the first lane before the second begins."},
                "slab_bytes": count,
                "waits": {
                    "type": "array",
                    "items": {"type": "array", "items": count, "minItems": 4, "maxItems": 4},
                    "description": "Microbatch and op that wait, microbatch and op waited for.",
                },
                "changes": {
                    "enum": list(CHANGES),
                    "description": "After what parameters change; a step where it is left out.",
                },
                "own_bytes": {
                    "type": "array",
                    "items": count,
                    "minItems": NUM_LANES,
                    "maxItems": NUM_LANES,
                    "description": "Memory of each lane's own; one for both where it is left out.",
                },
                "part_bytes": {
                    "type": "array",
                    "items": count,
                    "description": "Parts of memory that lanes hand over as a whole.",
                },
                "parts": {
                    "type": "array",
                    "items": count,
                    "description": "Per op of a wave the part that it takes; 0 for the lane's own.",
                },
                "lived_bytes": {
                    **count,
                    "description": "The most that lives at once in the memory that is reserved.",
                },
            },
        }

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Two microbatches or more on single devices; waits between ops that exist."""
        shares = plan.get(Shares)
        if shares is None:
            yield Violation("lanes", "lanes take microbatches in turns, and the plan has none")
            return
        if shares.sharded or any(len(replica.devices) > 1 for replica in shares.replicas):
            yield Violation("lanes", "lanes are for replicas that are one device with all weights")
        if any(r.update == "host" or r.recomputed for r in shares.replicas):
            yield Violation("lanes", "lanes keep what they make and update on the device")
        if self.changes == "wave" and len(shares.replicas) > 1:
            yield Violation("lanes", "parameters change after every wave on one device only")
        counts = {len(replica.microbatches) for replica in shares.replicas}
        if len(counts) != 1:
            yield Violation("lanes", "replicas in lanes have equally many microbatches")
        if self.parts and not self.own_bytes:
            yield Violation("lanes", "parts stand beside memory of each lane's own")
        yield from self.wrong_ops(problem.graph, min(counts, default=0))

    def wrong_ops(self, graph: Graph, num_waves: int) -> Iterator[Violation]:
        """What cannot be of a graph that runs in so many microbatches."""
        if num_waves < NUM_LANES:
            yield Violation("lanes", "lanes take two microbatches or more in turns")
            return
        num_passed = int((graph.op_phase != Phase.OPTIMIZER).sum())
        if self.lead > num_passed:
            told = f"the second lane begins after {self.lead} ops, a wave has {num_passed}"
            yield Violation("lanes", told)
        if self.parts and len(self.parts) != num_passed:
            told = f"parts are told of {len(self.parts)} ops, a wave has {num_passed}"
            yield Violation("lanes", told)
        if self.own_bytes and max(self.parts, default=0) > len(self.part_bytes):
            yield Violation(
                "lanes", f"there are {len(self.part_bytes)} parts, and an op takes more"
            )
        for wait in self.waits:
            waves, ops = (wait.wave, wait.on_wave), (wait.op, wait.on_op)
            if max(waves) >= num_waves or max(ops) >= graph.num_ops:
                yield Violation("lanes", f"a wait is about an op that is not there: {list(wait)}")
                return
            if wait.wave % NUM_LANES == wait.on_wave % NUM_LANES:
                yield Violation("lanes", f"a wait is inside one lane: {list(wait)}")
                return
            if any(graph.op_phase[op] == Phase.OPTIMIZER for op in ops):
                yield Violation("lanes", f"a wait is about an update: {list(wait)}")
                return


def slab_number(lane: int, part: int, num_parts: int) -> int:
    """Slabs are each lane's own, then parts; the second lane takes these from the last one on."""
    if part == 0:
        return lane
    return NUM_LANES - 1 + (part if lane == 0 else num_parts + 1 - part)


def _column(entry: Mapping[str, Any], name: str, most: int) -> tuple[int, ...]:
    return tuple(fields.int_column(entry.get(name, []), f"lanes.{name}", 0, most).tolist())


def _own_bytes(data: object) -> tuple[int, ...]:
    fields.sized(data, "lanes.own_bytes", NUM_LANES, "bytes of each lane")
    return tuple(fields.int_column(data, "lanes.own_bytes", 0, _MAX_BYTES).tolist())


def _waits(data: object, path: str) -> Iterator[LaneWait]:
    for number, wait in enumerate(fields.items(data, path)):
        where = f"{path}[{number}]"
        fields.sized(wait, where, 4, "microbatch and op that wait, microbatch and op waited for")
        yield LaneWait(*fields.int_column(wait, where, 0, _MAX_COUNT).tolist())
