"""Schedules, ZeRO stages and modes that each training program supports, and limits of users.

A plan is useless for a program that cannot run it, so the search is limited to the features of the
requested program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hocket.base.errors import UsageError, unknown_name
from hocket.cost.parallel.softwares import PROGRAM_TABLES
from hocket.plan.limits import Limits
from hocket.transformer import RECOMPUTES, SCHEDULES, Recompute, ScheduleName
from hocket.transformer.config_data import COUNTS


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


# Parse values that the user fixes in a search, such as ``tensor=8,recompute=full``.


# Values are parsed strictly: a misspelt mode must not silently widen the search.
Name = TypeVar("Name", bound=str)
MAX_ZERO = 3
FLAGS = {"true": 1, "on": 1, "1": 1, "false": 0, "off": 0, "0": 0}
NAMES = (*COUNTS, "zero", "sequence_parallel", "schedule", "recompute")


def fixed_limits(limits: Limits, text: str) -> Limits:
    """Fix fields of the limits by pairs such as ``tensor=8``, separated by commas."""
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        if not equals or not value:
            raise UsageError(
                f"cannot read {part.strip()[:60]!r}", hint="write it like tensor=8,recompute=full"
            )
        if name not in NAMES:
            raise unknown_name("degree or mode", name[:60], NAMES)
        limits = _with(limits, name, value)
    return limits


def _with(limits: Limits, name: str, value: str) -> Limits:
    if name == "schedule":
        return replace(limits, schedules=(_one_of(name, value, SCHEDULES),))
    if name == "recompute":
        return replace(limits, recomputes=(_one_of(name, value, RECOMPUTES),))
    if name == "sequence_parallel":
        return _fix(limits, name, FLAGS[_one_of(name, value.lower(), tuple(FLAGS))])
    if not value.isdecimal() or len(value) > 9 or (name != "zero" and int(value) < 1):
        raise UsageError(f"{name} is {value[:60]!r}", hint="expected a whole number")
    number = int(value)
    if name == "zero" and number > MAX_ZERO:
        raise UsageError(f"zero is {number}", hint=f"expected 0 to {MAX_ZERO}")
    if name == "tensor":
        limits = replace(limits, max_tensor=max(limits.max_tensor, number))
    if name == "context":
        limits = replace(limits, max_context=max(limits.max_context, number))
    if name == "microbatch":
        limits = replace(limits, max_microbatch=max(limits.max_microbatch, number))
    return _fix(limits, name, number)


def _fix(limits: Limits, name: str, value: int) -> Limits:
    return replace(limits, fixed=(*limits.fixed, (name, value)))


def _one_of(name: str, value: str, known: tuple[Name, ...]) -> Name:
    for entry in known:
        if entry == value:
            return entry
    raise unknown_name(name, value[:60], known)
