"""Parse values that the user fixes in a search, such as ``tensor=8,recompute=full``."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hocket.base.errors import UsageError, unknown_name
from hocket.plan.limits import Limits
from hocket.transformer import RECOMPUTES, SCHEDULES
from hocket.transformer.config_data import COUNTS

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
