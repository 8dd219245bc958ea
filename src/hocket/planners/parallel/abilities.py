"""Schedules, ZeRO stages and modes that each training program supports.

A plan is useless for a program that cannot run it, so the search is limited to the features of the
requested program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hocket.base.errors import UsageError
from hocket.cost.parallel.softwares import PROGRAM_TABLES
from hocket.plan.limits import Limits
from hocket.transformer import RECOMPUTES, SCHEDULES, Recompute, ScheduleName


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Features that one training program supports."""

    schedules: tuple[ScheduleName, ...] = SCHEDULES
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    pipelined_zeros: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages that can be combined with a pipeline."""
    fixed: tuple[tuple[str, int], ...] = ()


def _abilities(runs: Mapping[str, Any]) -> Abilities:
    columns = {key: tuple(value) for key, value in runs.items() if key != "fixed"}
    return Abilities(**columns, fixed=tuple(runs.get("fixed", {}).items()))


PROGRAMS = {name: _abilities(table.get("runs", {})) for name, table in PROGRAM_TABLES.items()}
"""Features of the programs in ``softwares.toml``."""


def requested_limits(limits: Limits, program: str) -> Limits:
    """Narrow the limits to the features of a program.

    Raises `UsageError` if the program supports none of the schedules that the user chose.
    """
    narrowed = program_limits(limits, program)
    if not narrowed.schedules:
        raise UsageError(
            f"{program} has no schedule {' or '.join(limits.schedules)}",
            hint=f"it runs {', '.join(PROGRAMS[program].schedules)}",
        )
    return narrowed


def program_limits(limits: Limits, program: str) -> Limits:
    """Narrow the limits to the features of a program."""
    can = PROGRAMS.get(program) or Abilities()
    stated = dict(limits.fixed)
    return replace(
        limits,
        schedules=tuple(name for name in limits.schedules if name in can.schedules),
        recomputes=tuple(name for name in limits.recomputes if name in can.recomputes),
        zeros=tuple(zero for zero in limits.zeros if zero in can.zeros),
        pipelined_zeros=tuple(z for z in limits.pipelined_zeros if z in can.pipelined_zeros),
        # Values that the user fixes win over the program's: the user then has to run the plan.
        fixed=(*limits.fixed, *(pair for pair in can.fixed if pair[0] not in stated)),
    )
