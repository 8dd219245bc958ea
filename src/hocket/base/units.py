"""Parse and format quantities: sizes, rates, durations, prices.

Inside hocket every quantity is a plain number in base units (bytes, seconds, bytes per second,
floating-point operations per second). Text is parsed on input and formatted on output.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_BINARY = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SECONDS = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
    "min": Fraction(60),
    "h": Fraction(3600),
}
MOST_BYTES = 2**60
_MOST = 10**24
"""Largest value of other quantities, in base units; larger values would overflow in computations.
"""
_QUANTITY = re.compile(
    r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][-+]?[0-9]{1,3})?)\s*([A-Za-zµ/]*)\s*\Z"
)


def _split(text: str) -> tuple[Fraction, str]:
    """The exact number and its unit; exact, so that the result is the float nearest to the text."""
    match = _QUANTITY.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return Fraction(match[1].rstrip(".")), match[2]


def _scaled(value: Fraction, unit: str, base: str) -> Fraction | None:
    """The value in units of ``base``; None unless ``unit`` is ``base`` with a known prefix."""
    if not unit.endswith(base):
        return None
    prefix = unit[: len(unit) - len(base)]
    scale = _BINARY.get(prefix) if prefix in _BINARY else _DECIMAL.get(prefix)
    return None if scale is None else value * scale


def _possible(value: Fraction, text: str, most: int) -> Fraction:
    if value > most:
        raise ValueError(f"{text!r} is not a quantity that there can be: it is too large")
    return value


def parse_bytes(text: str) -> int:
    """Parse ``'16GiB'`` or ``'12 GB'`` to bytes; zero needs no unit."""
    value, unit = _split(text)
    scaled = _scaled(value, unit, "B") if unit or value else value
    if scaled is None:
        raise ValueError(f"{text!r} is not a size; write it like '16GiB' or '12GB'")
    return round(_possible(scaled, text, MOST_BYTES))


def parse_bandwidth(text: str) -> float:
    """Parse ``'25GB/s'`` (bytes) or ``'100Gbit/s'`` (bits) to bytes per second."""
    value, unit = _split(text)
    if unit.endswith("bit/s"):
        scaled = _scaled(value, unit, "bit/s")
        scaled = None if scaled is None else scaled / 8
    else:
        scaled = _scaled(value, unit, "B/s")
    if scaled is None:
        raise ValueError(f"{text!r} is not a bandwidth; write it like '25GB/s' or '100Gbit/s'")
    return float(_possible(scaled, text, _MOST))


def parse_seconds(text: str) -> float:
    """Parse ``'10us'`` to seconds."""
    value, unit = _split(text)
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write it like '10us' or '1.5ms'")
    return float(_possible(value * _SECONDS[unit], text, _MOST))


def parse_flops(text: str) -> float:
    """Parse ``'312TFLOP/s'`` to floating-point operations per second."""
    value, unit = _split(text)
    scaled = _scaled(value, unit, "FLOP/s")
    if scaled is None:
        raise ValueError(f"{text!r} is not a rate; write it like '312TFLOP/s'")
    return float(_possible(scaled, text, _MOST))


def whole_number(text: str, most: int) -> int | None:
    """Value of plain digits if it is at most ``most``; None for all other text.

    Unlike ``int``, it never raises, also for thousands of digits.
    """
    digits = text.lstrip("0") or text[-1:]
    if not (text.isascii() and text.isdecimal()) or len(digits) > len(str(most)):
        return None
    return int(digits) if int(digits) <= most else None


def _binary_unit(size_bytes: float) -> tuple[str, int]:
    """Binary unit in which a size has one to four digits before the point, and its size in
    bytes."""
    fitting = ((f"{p}B", scale) for p, scale in _BINARY.items() if abs(size_bytes) < 1024 * scale)
    return next(fitting, ("PiB", 2**50))


def format_bytes(size_bytes: float) -> str:
    """Bytes in the binary unit that gives one to four digits before the point."""
    unit, scale = _binary_unit(size_bytes)
    return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes / scale:.1f} {unit}"


def format_apart(size_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Format two sizes; in exact bytes if different sizes would give equal texts."""
    texts = format_bytes(size_bytes), format_bytes(other_bytes)
    if texts[0] == texts[1] and size_bytes != other_bytes:
        return f"{size_bytes:,} B", f"{other_bytes:,} B"
    return texts


def typed_bytes(size_bytes: int) -> str:
    """A size as a user would type it, rounded up to a tenth of its unit: ``'99.3MiB'``."""
    unit, scale = _binary_unit(size_bytes)
    # Rounded up, so that a budget typed from this text is never too small.
    tenths = -(-10 * size_bytes // scale)
    return f"{tenths // 10}{unit}" if tenths % 10 == 0 else f"{tenths / 10}{unit}"


def format_seconds(duration_s: float, beside_s: float | None = None) -> str:
    """Seconds with three significant digits in s, ms, µs or ns.

    ``beside_s`` fixes the unit, so that all values of a column share it.
    """
    if math.isinf(duration_s):
        return "∞"
    telling_s = abs(duration_s if beside_s is None else beside_s)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if telling_s >= scale or (unit == "s" and telling_s == 0):
            return f"{_three_digits(duration_s / scale)} {unit}"
    return f"{_three_digits(duration_s / 1e-9)} ns"


def words_for_seconds(duration_s: float) -> str:
    """A duration in one rounded unit: ``'40 s'``, ``'12 min'``, ``'3.5 h'``, ``'6 days'``."""
    if not math.isfinite(duration_s):
        return "an unknown time"
    for limit_s, unit_s, unit in ((90, 1, "s"), (90 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if duration_s < limit_s:
            value = duration_s / unit_s
            return f"{value:.1f} {unit}" if unit == "h" and value < 10 else f"{value:.0f} {unit}"
    return f"{duration_s / 86400:.0f} days"


def format_rate(rate: float, unit: str) -> str:
    """Format a decimal rate: ``format_rate(25e9, 'B/s')`` -> ``'25 GB/s'``."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(rate) >= scale:
            return f"{_three_digits(rate / scale)} {prefix}{unit}"
    return f"{_three_digits(rate)} {unit}"


def format_count(value: float) -> str:
    """Format with three significant digits, never in powers of ten: ``'6,240'``, ``'9.54'``."""
    if abs(value) >= 1000:
        size = 10 ** (math.floor(math.log10(abs(value))) - 2)
        return f"{round(value / size) * size:,}"
    return _three_digits(value)


def format_percent(share: float) -> str:
    """Format a fraction as a whole percentage; a positive one that rounds to 0 is ``'<1 %'``."""
    if 0 < share < 0.005:
        return "<1 %"
    return f"{100 * share:.0f} %"


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
