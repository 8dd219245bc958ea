"""The sections of a plan: small immutable values, each with the decisions of one type."""

from __future__ import annotations

from hocket.plan.sections.communication import Communication
from hocket.plan.sections.memory import Memory, MemoryBlock
from hocket.plan.sections.order import Order
from hocket.plan.sections.parallel import Parallel, Replica
from hocket.plan.sections.placement import Placement
from hocket.plan.sections.priority import Priority
from hocket.plan.sections.schedule import Schedule
from hocket.plan.sections.section import Section
from hocket.plan.sections.waves import Waves

__all__ = [
    "SECTIONS",
    "Communication",
    "Memory",
    "MemoryBlock",
    "Order",
    "Parallel",
    "Placement",
    "Priority",
    "Replica",
    "Schedule",
    "Section",
    "Waves",
]

SECTIONS: dict[str, type[Section]] = {
    "placement": Placement,
    "order": Order,
    "parallel": Parallel,
    "schedule": Schedule,
    "memory": Memory,
    "communication": Communication,
    "waves": Waves,
    "priority": Priority,
}
"""Section types by their names in files, in the order in which files list them."""
