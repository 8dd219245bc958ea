"""The type of a violated rule of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """A broken rule, with the op and the device at which it is broken."""

    rule: str
    message: str
    op: str = ""
    device: str = ""
