"""One published measurement."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.cost.parallel.software import Software
from hocket.transformer import Division, Transformer


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run took, or that it ran out of memory."""

    table: str
    row: str
    """Its place in the table, for people."""
    model: Transformer
    division: Division
    cluster: str
    """A name in `hocket.validation.validate.SITES`."""
    software: Software
    step_s: float | None = None
    memory_bytes: float | None = None
    """Peak of the fullest device, as its driver shows it."""
    is_oom: bool = False
    """Whether the run ended because memory was too small."""
