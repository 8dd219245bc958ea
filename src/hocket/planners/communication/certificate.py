"""Certificates of bounds: a cut through the links, or dual prices of the channels.

Each states the bound as algorithm bandwidth (bytes of the full message per second, in units of the
fabric) together with its proof. The tests verify every certificate independently, from the links
alone (`tests/planners/certificate_checker.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class LinkCut:
    """A cut: all data that leaves ``side`` (enters it, for reductions) crosses the cut's links."""

    bound: Fraction
    side: tuple[str, ...]
    crossing: int
    """Capacity from the side to the other places, in units of the fabric."""

    def to_data(self) -> dict[str, Any]:
        """Return the certificate in the form of plan files and ``--json``."""
        return {
            "kind": "cut",
            "bound": str(self.bound),
            "side": list(self.side),
            "crossing": self.crossing,
        }


@dataclass(frozen=True)
class Prices:
    """Dual prices of channels under which any schedule costs at least 1 per unit of the collective.

    The total capacity costs ``bound``, so no schedule moves more units.
    """

    bound: Fraction
    """Sum over channels of price times capacity."""
    price: tuple[Fraction, ...]
    """Price of each channel of the fabric."""

    def to_data(self) -> dict[str, Any]:
        """Return the certificate in the form of plan files and ``--json``."""
        return {
            "kind": "prices",
            "bound": str(self.bound),
            "price": [str(price) for price in self.price],
        }


Certificate = LinkCut | Prices
