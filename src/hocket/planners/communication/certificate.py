"""Why no schedule can be faster: a cut, a partition, or prices of the channels.

Each states the bound in the fabric's units (of algorithm bandwidth: bytes of the whole message per
second) together with what proves it; `hocket.planners.communication.check` proves it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class LinkCut:
    """A cut: all data that leaves ``side`` (enters it, for reductions) crosses its links."""

    bound: Fraction
    side: tuple[str, ...]
    crossing: int
    """Units that leave the side."""

    def to_data(self) -> dict[str, Any]:
        """The certificate as a plan file and ``--json`` show it."""
        return {
            "kind": "cut",
            "bound": str(self.bound),
            "side": list(self.side),
            "crossing": self.crossing,
        }


@dataclass(frozen=True)
class Partition:
    """Every tree crosses between p parts at least p - 1 times, and ``crossing`` units are there."""

    bound: Fraction
    parts: tuple[tuple[str, ...], ...]
    crossing: int
    """Units between different parts, one direction."""

    def to_data(self) -> dict[str, Any]:
        """The certificate as a plan file and ``--json`` show it."""
        return {
            "kind": "partition",
            "bound": str(self.bound),
            "parts": [list(part) for part in self.parts],
            "crossing": self.crossing,
        }


@dataclass(frozen=True)
class Prices:
    """Prices under which one unit of the collective costs 1 or more however it is done."""

    bound: Fraction
    """Total price of all channels."""
    price: tuple[Fraction, ...]
    """Per channel of the fabric."""
    demand: tuple[tuple[str, str, Fraction], ...] = ()
    """For all-to-all only: price of a unit from one rank to another."""

    def to_data(self) -> dict[str, Any]:
        """The certificate as a plan file and ``--json`` show it."""
        return {
            "kind": "prices",
            "bound": str(self.bound),
            "price": [str(price) for price in self.price],
        }


Certificate = LinkCut | Partition | Prices
