"""A broken rule of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken rule, with the op and the device where it breaks."""

    rule: str
    message: str
    op: str = ""
    device: str = ""
