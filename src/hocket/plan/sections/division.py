"""The division section: how a training is divided, which devices do each stage, and what it takes.

Degrees multiply to the devices, which exist and are used once; layers and batch divide as
`hocket.transformer.rules` wants it; the costs name every stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hocket.base import fields
from hocket.base.units import MOST_BYTES
from hocket.cost.parallel.costs import StageCosts
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation
from hocket.transformer.division import Division
from hocket.transformer.division_data import CHOICES, COUNTS, division_from_data
from hocket.transformer.rules import broken_rules

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

_TIMES = ("forward_s", "input_gradient_s", "weight_gradient_s", "send_s", "after_s")
_SIZES = ("activation_bytes", "weight_gradient_bytes", "state_bytes")
MAX_SECONDS = 1e15


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedDivision(Section):
    """A division of a training on devices."""

    division: Division
    devices: tuple[tuple[str, ...], ...]
    """Names of the devices of each pipeline rank, tensor parallel fastest, then context, data."""
    stage_costs: StageCosts
    """What the stages take there: enough to simulate their schedule again exactly."""

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "degrees": _stated(self.division),
            "devices": [list(names) for names in self.devices],
            "stage_costs": {name: list(values) for name, values in vars(self.stage_costs).items()},
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> PlacedDivision:
        """The section of such data."""
        entry = fields.record(data, "division", required=("degrees", "devices", "stage_costs"))
        rows = fields.items(entry["devices"], "division.devices")
        names = (fields.text_column(row, f"division.devices[{n}]") for n, row in enumerate(rows))
        return cls(
            division=division_from_data(entry["degrees"], "division.degrees"),
            devices=tuple(tuple(row) for row in names),
            stage_costs=_stage_costs(entry["stage_costs"]),
        )

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON Schema of the data."""
        seconds = {"type": "array", "items": {"type": "number", "minimum": 0}}
        sizes = {"type": "array", "items": {"type": "integer", "minimum": 0}}
        count = {"type": "integer", "minimum": 1}
        degrees: dict[str, Any] = {
            **dict.fromkeys((*COUNTS, "global_batch"), count),
            **{name: {"enum": list(known)} for name, known in CHOICES.items()},
            "sequence_parallel": {"type": "boolean"},
            "zero": {"enum": [0, 1, 2, 3]},
            "layers": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}},
            "shares": {"type": ["array", "null"], "items": count},
        }
        costs = {**dict.fromkeys(_TIMES, seconds), **dict.fromkeys(_SIZES, sizes)}
        names = {"type": "array", "items": {"type": "string"}}
        return {
            "description": "How a training is divided over devices.",
            "properties": {
                "degrees": {"type": "object", "properties": degrees},
                "devices": {
                    "type": "array",
                    "items": names,
                    "description": "Devices of each pipeline rank: tensor parallel fastest, then "
                    "context, data.",
                },
                "stage_costs": {
                    "type": "object",
                    "properties": costs,
                    "description": "Of each virtual stage per microbatch, of each rank per step.",
                },
            },
            "required": ["degrees", "devices", "stage_costs"],
        }

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """The rules of divisions, devices that exist and are used once, costs of every stage."""
        model = problem.training.model
        for rule in broken_rules(model, self.division):
            yield Violation("division", rule)
        if self.division.layers is None and model.layers % self.division.num_stages:
            yield Violation(
                "layers",
                f"{model.layers} layers do not divide over {self.division.num_stages} stages, "
                "and the plan does not say how many each has",
            )
        yield from self._wrong_devices(problem)
        yield from self._wrong_lengths(plan)

    def _wrong_devices(self, problem: Problem) -> Iterator[Violation]:
        pipeline = self.division.pipeline
        if len(self.devices) != pipeline:
            yield Violation("devices", f"{len(self.devices)} lists of devices for {pipeline} ranks")
        per_rank = self.division.num_devices // pipeline
        for rank, names in enumerate(self.devices):
            if len(names) != per_rank:
                yield Violation("devices", f"rank {rank} has {len(names)} devices, not {per_rank}")
        known = set(problem.cluster.device_names)
        counts = Counter(name for names in self.devices for name in names)
        for name, count in counts.items():
            if name not in known:
                yield Violation("devices", f"there is no device {name!r}", device=name)
            elif count > 1:
                yield Violation("devices", f"device {name!r} has {count} places", device=name)

    def _wrong_lengths(self, plan: Plan) -> Iterator[Violation]:
        stages, ranks = self.division.num_stages, self.division.pipeline
        lengths = {
            **dict.fromkeys((*_TIMES, *_SIZES), stages),
            "send_s": stages - 1,
            "state_bytes": ranks,
            "after_s": ranks,
        }
        for name, length in lengths.items():
            if len(getattr(self.stage_costs, name)) != length:
                yield Violation("costs", f"stage_costs.{name} must have {length} entries")
        if len(plan.claims.peak_bytes) not in (0, ranks):
            yield Violation("devices", "claims.peak_bytes must have an entry per pipeline rank")


def _stated(division: Division) -> dict[str, Any]:
    """The degrees; equal shares are not stated."""
    degrees = asdict(division)
    return degrees if division.shares else {k: v for k, v in degrees.items() if k != "shares"}


def _stage_costs(data: object) -> StageCosts:
    path = "division.stage_costs"
    entry = fields.record(data, path, required=(*_TIMES, *_SIZES))
    times = {
        name: fields.float_column(entry[name], f"{path}.{name}", 0, MAX_SECONDS) for name in _TIMES
    }
    sizes = {
        name: fields.int_column(entry[name], f"{path}.{name}", 0, MOST_BYTES) for name in _SIZES
    }
    return StageCosts(
        **{name: tuple(column.tolist()) for name, column in {**times, **sizes}.items()}
    )
