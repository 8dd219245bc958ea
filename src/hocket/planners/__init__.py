"""Planners: pure functions (Problem, Plan) -> Plan, one algorithm per file.

`hocket plan --planner NAME` looks up the name in ``PLANNERS``; names joined by ``+`` run one after
another, and ``expert:FILE`` applies a placement written by the user.
"""

from __future__ import annotations

from hocket.base.errors import unknown_name
from hocket.planners.auto import AUTO, auto
from hocket.planners.placement.baselines import expert
from hocket.planners.registry import BASE, chain
from hocket.planners.shared import Planner

__all__ = ["PLANNERS", "Planner", "chain", "find_planner"]

PLANNERS: dict[str, Planner] = {**BASE, AUTO: auto}
_EXPERT = "expert:"


def find_planner(name: str) -> Planner:
    """Return the planner of that name; names joined by ``+`` run one after another."""
    return chain(*(_one(part.strip()) for part in _parts(name)))


def _parts(name: str) -> list[str]:
    """Split joined names; after an expert file, unknown names belong to the file's path."""
    parts: list[str] = []
    for part in name.split("+"):
        # A path may contain "+": what is no planner's name still belongs to the file.
        if parts and parts[-1].lstrip().startswith(_EXPERT) and part.strip() not in PLANNERS:
            parts[-1] += f"+{part}"
        else:
            parts.append(part)
    return parts


def _one(name: str) -> Planner:
    if name.startswith(_EXPERT):
        return expert(name.removeprefix(_EXPERT))
    if name not in PLANNERS:
        raise unknown_name("planner", name, (*PLANNERS, f"{_EXPERT}FILE"))
    return PLANNERS[name]
