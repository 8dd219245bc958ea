"""Loops that people write, each with small data and the schedule that it should get."""

from __future__ import annotations

from loops.catalogue_parts import (  # noqa: F401  (each registers its loops)
    elementwise,
    factorisation,
    helpers,
    regression,
    reports,
    sparse_rows,
    stencils,
    topics,
    traps,
)
from loops.catalogue_parts.register import LOOPS

__all__ = ["LOOPS"]
