"""The constraint model: a device for each unit, a start for each op, nothing two things at once.

Every unit chooses one device. An op has one optional interval per device; those of a device do not
overlap. An op starts after what it reads has been made and, if that happened on another device,
transferred (`transfers`). Held bytes fit, and where memory is scarce so do the bytes of activations
over time (`memory`). Every legal plan is a solution, with a makespan of at most the plan's step in
whole ticks; so a bound on the model's makespan is a bound on the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hocket.contrib.exact.instance import Instance
from hocket.planners.bounds.classes import BoundClasses
from hocket.planners.bounds.heads import Heads

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import BoolVarT, CpModel, IntervalVar, IntVar


@dataclass(frozen=True, eq=False)
class Model:
    """The variables of one model."""

    cp: CpModel
    instance: Instance
    horizon: int
    """Ticks that no plan of interest exceeds."""
    place: list[list[IntVar]]
    """[unit][device]: whether the unit is there."""
    start: list[IntVar]
    end: list[IntVar]
    makespan: IntVar
    together: dict[tuple[int, int], BoolVarT] = field(default_factory=dict)
    """Pairs of units: whether they share a device; made as they are needed."""
    anyone: dict[tuple[frozenset[int], int], BoolVarT] = field(default_factory=dict)
    """Sets of units and a device: whether one of them is there."""

    @property
    def devices(self) -> range:
        """All devices."""
        return range(len(self.instance.op_ticks))

    def unit(self, op: int) -> int:
        """The unit of an op."""
        return int(self.instance.units.of_op[op])

    def on(self, op: int, device: int) -> IntVar:
        """Whether an op is on a device."""
        return self.place[self.unit(op)][device]

    def same_device(self, first: int, second: int) -> BoolVarT:
        """Whether two different units share a device."""
        key = min(first, second), max(first, second)
        if key not in self.together:
            same = self.cp.new_bool_var(f"together {key}")
            for here, there in zip(self.place[first], self.place[second], strict=True):
                self.cp.add_bool_or([~here, ~there, same])
                self.cp.add_bool_or([~here, there, ~same])
                self.cp.add_bool_or([here, ~there, ~same])
            self.together[key] = same
        return self.together[key]

    def any_there(self, units: frozenset[int], device: int) -> BoolVarT:
        """Whether one of the units is on the device."""
        literals = [self.place[unit][device] for unit in sorted(units)]
        if len(literals) == 1:
            return literals[0]
        if (units, device) not in self.anyone:
            found = self.cp.new_bool_var(f"any on {device}")
            self.cp.add_max_equality(found, literals)
            self.anyone[units, device] = found
        return self.anyone[units, device]


def build_model(instance: Instance, horizon: int) -> Model:
    """The variables, each unit on one device, and the objective."""
    from ortools.sat.python.cp_model import CpModel

    cp = CpModel()
    num_devices, num_ops = instance.op_ticks.shape
    place = [
        [cp.new_bool_var(f"unit {unit} on {device}") for device in range(num_devices)]
        for unit in range(instance.units.count)
    ]
    for literals in place:
        cp.add_exactly_one(literals)
    return Model(
        cp,
        instance,
        horizon,
        place=place,
        start=[cp.new_int_var(0, horizon, f"start {op}") for op in range(num_ops)],
        end=[cp.new_int_var(0, horizon, f"end {op}") for op in range(num_ops)],
        makespan=cp.new_int_var(0, horizon, "makespan"),
    )


def add_devices(model: Model, classes: BoundClasses, heads: Heads) -> None:
    """Each device runs its ops one after another, none before its head or too late for its tail."""
    cp, ticks = model.cp, model.instance.op_ticks.tolist()
    lines: list[list[IntervalVar]] = [[] for _ in model.devices]
    for op, (start, end) in enumerate(zip(model.start, model.end, strict=True)):
        cp.add(end == start + sum(max(ticks[d][op], 0) * model.on(op, d) for d in model.devices))
        cp.add(end <= model.makespan)
        for device in model.devices:
            here, seconds = model.on(op, device), ticks[device][op]
            if seconds < 0:
                cp.add(here == 0)
                continue
            lines[device].append(
                cp.new_optional_interval_var(start, seconds, end, here, f"op {op} on {device}")
            )
            _add_window(model, classes, heads, op, device)
    for device, line in enumerate(lines):
        cp.add_no_overlap(line)
        work = sum(max(ticks[device][op], 0) * model.on(op, device) for op in range(len(model.end)))
        cp.add(work <= model.makespan)


def _add_window(model: Model, classes: BoundClasses, heads: Heads, op: int, device: int) -> None:
    """What is proven about an op on a device of that class, whatever else is decided."""
    cp, here, kind = model.cp, model.on(op, device), classes.of_device[device]
    window_s = np.array([heads.head_s[kind, op], heads.tail_s[kind, op]])
    if not np.all(np.isfinite(window_s)):
        cp.add(here == 0)
        return
    head, tail = model.instance.ticks(window_s).tolist()
    if head + tail + model.instance.op_ticks[device, op] > model.horizon:
        cp.add(here == 0)
        return
    cp.add(model.start[op] >= head).only_enforce_if(here)
    cp.add(model.makespan >= model.end[op] + tail).only_enforce_if(here)


def break_symmetry(model: Model, sets: list[list[int]]) -> None:
    """Devices that can be exchanged are used in their order: a unit opens at most the next one."""
    for devices in sets:
        for before, device in pairwise(devices):
            for unit, literals in enumerate(model.place):
                earlier = [model.place[other][before] for other in range(unit)]
                model.cp.add_bool_or([~literals[device], *earlier])
