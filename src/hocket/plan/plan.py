"""The Plan: every decision about a problem, as data.

A plan is a set of sections, each filled by a planner, with claims about the plan. It stores the
content hashes of its work and its cluster, so that using it for another problem is detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hocket.base.arrays import FloatArray, IntArray
from hocket.base.errors import UsageError
from hocket.plan.claims import Claims
from hocket.plan.sections import SECTIONS, Order, Placement, Section

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Decisions about one problem, with claims and notes."""

    planner: str = ""
    """Names of the planners that made the plan, joined by ' + '."""
    work_hash: str = ""
    cluster_hash: str = ""
    sections: tuple[Section, ...] = ()
    """The decisions, at most one section of each type."""
    claims: Claims = field(default_factory=Claims)
    """Statements about the plan that programs read."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Text for users; no program reads it."""

    def get(self, kind: type[S]) -> S | None:
        """Return the section of a type, or None if the plan has none."""
        return next((section for section in self.sections if isinstance(section, kind)), None)

    def __getitem__(self, kind: type[S]) -> S:
        """Return the section of a type; raises `UsageError` if the plan has none."""
        found = self.get(kind)
        if found is None:
            has = ", ".join(self.named()) or "nothing"
            raise UsageError(
                f"the plan has no {section_name(kind)} section, it has {has}",
                hint="hocket plan places the ops of a graph, hocket parallel divides a training, "
                "hocket collective plans communication",
            )
        return found

    def named(self) -> dict[str, Section]:
        """Return the sections by their names in files, in the order of the registry."""
        there = {section_name(type(section)): section for section in self.sections}
        return {name: there[name] for name in SECTIONS if name in there}

    def having(self, *sections: Section) -> Plan:
        """Return the plan with these sections, which replace sections of the same types."""
        # At most one section of a type.
        kinds = tuple(type(section) for section in sections)
        kept = tuple(section for section in self.sections if not isinstance(section, kinds))
        return replace(self, sections=(*kept, *sections))

    def without(self, kind: type[Section]) -> Plan:
        """Return the plan without the section of a type."""
        kept = tuple(section for section in self.sections if not isinstance(section, kind))
        return replace(self, sections=kept)

    def placing(
        self,
        device_of: IntArray,
        *,
        priority: FloatArray | None = None,
        by_device: tuple[IntArray, ...] | None = None,
    ) -> Plan:
        """Return the plan with this placement and order; by default ops run in graph order."""
        return self.having(Placement(device_of)).ordered(priority=priority, by_device=by_device)

    def ordered(
        self,
        *,
        priority: FloatArray | None = None,
        by_device: tuple[IntArray, ...] | None = None,
    ) -> Plan:
        """Return the plan with this order; without an order, ops run in graph order."""
        if priority is None and by_device is None:
            # No order at all means graph order.
            return self.without(Order)
        return self.having(Order(priority=priority, by_device=by_device))

    def claiming(self, **claims: Any) -> Plan:
        """Return the plan with further claims; see `Claims`."""
        return replace(self, claims=self.claims.also(**claims))

    @property
    def device_of(self) -> IntArray | None:
        """Device of each op; None if the plan has no placement."""
        placement = self.get(Placement)
        return None if placement is None else placement.device_of

    @property
    def by_device(self) -> tuple[IntArray, ...] | None:
        """Strict order of the ops on each device; None if the plan has none."""
        order = self.get(Order)
        return None if order is None else order.by_device

    @property
    def priority(self) -> FloatArray | None:
        """Priority of each op, of which the smallest runs first; None if the plan has none."""
        order = self.get(Order)
        return None if order is None else order.priority

    def __repr__(self) -> str:
        if self.device_of is None:
            return f"Plan({self.planner!r}, {', '.join(self.named()) or 'nothing decided'})"
        num_devices = len(set(self.device_of.tolist()))
        return f"Plan({self.planner!r}, {len(self.device_of)} ops on {num_devices} devices)"


def section_name(kind: type[Section]) -> str:
    """Return the name that a section type has in files."""
    return next((name for name, known in SECTIONS.items() if known is kind), kind.__name__.lower())
