"""Format numbers and sentences consistently in text, report and notebook; pick values for JSON."""

from __future__ import annotations

from typing import Any

from hocket.base.units import format_bytes

STEPS_PRICED = 1000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def of_capacity(used_bytes: int, capacity_bytes: int) -> str:
    """Text such as ``'7.4 of 8.0 GiB'``, in the unit of the capacity unless that would print
    0.0."""
    capacity = format_bytes(capacity_bytes)
    number, unit = capacity.split(" ")
    used = used_bytes / 1024 ** _UNITS.index(unit)
    if used < 0.05 <= used_bytes or (unit == "B" and used >= 1024):
        return f"{format_bytes(used_bytes)} of {capacity}"
    if unit == "B":
        return f"{used_bytes} of {capacity}"
    return f"{used:.1f} of {number} {unit}"


def held_of(used_bytes: int, capacity_bytes: int) -> str:
    """Same as `of_capacity`, but peaks below 1 GiB keep their own unit."""
    if 0 < used_bytes < 1024**3 <= capacity_bytes:
        return f"{format_bytes(used_bytes)} of {format_bytes(capacity_bytes)}"
    return of_capacity(used_bytes, capacity_bytes)


def dollars(amount: float) -> str:
    """Dollars with the digits that matter: ``'$12.24'``, ``'$0.0031'``."""
    return f"${amount:.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.2g}"


def price_of_steps(price_per_hour: float, step_s: float) -> str:
    """Dollars for `STEPS_PRICED` steps."""
    return dollars(price_per_hour / 3600 * step_s * STEPS_PRICED)


def count_of(count: int, thing: str) -> str:
    """Count with its noun: ``'1 op'``, ``'2,312 ops'``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def sentence(text: str) -> str:
    """Turn a message into a sentence: first letter upper-case, a period at the end."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def picked(value: object, *names: str) -> dict[str, Any]:
    """Attributes of a value by name, for ``--json``."""
    return {name: getattr(value, name) for name in names}
