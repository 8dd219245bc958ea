"""The lanes section: microbatches of a replica run in two lanes on one device at the same time.

The first microbatch (wave tick) runs in the first lane, the second (wave tock) in the second, and
so on in turns. Tock begins when tick has run its first ``lead`` ops, so that what it holds grows
while what tick holds shrinks, and its kernels fill the gaps of the other lane (Wavelet, Wang et
al., MLSys 2021). The section stands beside `Parallel`, which says what each microbatch takes.

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
once for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from hocket.base import fields
from hocket.base.units import MOST_BYTES
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections.parallel import Parallel
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

NUM_LANES = 2
Changes = Literal["step", "wave"]
CHANGES: tuple[Changes, ...] = get_args(Changes)
_MAX_COUNT = 2**31 - 1


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
    places: tuple[tuple[int, ...], ...] = ()
    """Where there are parts: of each lane, for each op of a wave, forward then backward, the slab
    in which lies what it makes. Slabs are each lane's own, then the parts."""
    lived_bytes: int = 0
    """The most that lives in both lanes at once; 0 where no memory is reserved for them."""

    @property
    def slabs(self) -> tuple[int, ...]:
        """Bytes of the one memory, or of each lane's own and then of each part."""
        return (*self.own_bytes, *self.part_bytes) or (self.slab_bytes,)

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
            **({"places": [list(row) for row in self.places]} if self.places else {}),
            **({"lived_bytes": self.lived_bytes} if self.lived_bytes else {}),
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Lanes:
        """The section of such data."""
        entry = fields.record(
            data, "lanes", required=("lead", "slab_bytes", "waits"),
            optional=("changes", "own_bytes", "part_bytes", "places", "lived_bytes"),
        )  # fmt: skip
        told = fields.choice(entry.get("changes", "step"), "lanes.changes", CHANGES)
        return cls(
            changes=next(name for name in CHANGES if name == told),
            lead=fields.integer(entry["lead"], "lanes.lead", 0, _MAX_COUNT),
            slab_bytes=fields.integer(entry["slab_bytes"], "lanes.slab_bytes", 0, MOST_BYTES),
            waits=tuple(_waits(entry["waits"], "lanes.waits")),
            own_bytes=_own_bytes(entry["own_bytes"]) if "own_bytes" in entry else (),
            part_bytes=_column(entry.get("part_bytes", []), "lanes.part_bytes", MOST_BYTES),
            places=tuple(
                _column(row, f"lanes.places[{lane}]", _MAX_COUNT)
                for lane, row in enumerate(fields.items(entry.get("places", []), "lanes.places"))
            ),
            lived_bytes=fields.integer(
                entry.get("lived_bytes", 0), "lanes.lived_bytes", 0, MOST_BYTES
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
                "places": {
                    "type": "array",
                    "items": {"type": "array", "items": count},
                    "minItems": NUM_LANES,
                    "maxItems": NUM_LANES,
                    "description": "Per lane and op of a wave: memory of its own, or a part.",
                },
                "lived_bytes": {
                    **count,
                    "description": "The most that lives at once in the memory that is reserved.",
                },
            },
        }

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Two microbatches or more on single devices; waits between ops that exist."""
        shares = plan.get(Parallel)
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
        if self.places and not self.own_bytes:
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
        if self.places and [len(row) for row in self.places] != [num_passed] * NUM_LANES:
            told = f"places are told of two lanes, and of each of the {num_passed} ops of a wave"
            yield Violation("lanes", told)
        for lane, row in enumerate(self.places if self.own_bytes else ()):
            if max(row, default=0) >= len(self.slabs) or 1 - lane in row:
                told = f"lane {lane} takes memory that is not there or is the other's"
                yield Violation("lanes", told)
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


def _column(data: object, path: str, most: int) -> tuple[int, ...]:
    return tuple(fields.int_column(data, path, 0, most).tolist())


def _own_bytes(data: object) -> tuple[int, ...]:
    fields.sized(data, "lanes.own_bytes", NUM_LANES, "bytes of each lane")
    return tuple(fields.int_column(data, "lanes.own_bytes", 0, MOST_BYTES).tolist())


def _waits(data: object, path: str) -> Iterator[LaneWait]:
    for number, wait in enumerate(fields.items(data, path)):
        where = f"{path}[{number}]"
        fields.sized(wait, where, 4, "microbatch and op that wait, microbatch and op waited for")
        yield LaneWait(*fields.int_column(wait, where, 0, _MAX_COUNT).tolist())
