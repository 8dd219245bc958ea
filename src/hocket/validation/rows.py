"""One published measurement, and the training programs that the measurements were made with."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

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
    """A name in `hocket.validation.clusters.SITES`."""
    software: Software
    step_s: float | None = None
    memory_bytes: float | None = None
    """Peak of the fullest device, as its driver shows it."""
    is_oom: bool = False
    """Whether the run ended because memory was too small."""


PROGRAMS = MappingProxyType(
    {
        "megatron-2021": Software(name="megatron-2021", dtype="float16", attention="plain"),
        "megatron-deepspeed": Software(
            name="megatron-deepspeed",
            dtype="float16",
            attention="plain",
            gradient_bytes=2,
            scatters_activations=False,
        ),
        "megatron-core": Software(
            name="megatron-core",
            attention="flash",
            overlaps_tensor=True,
            overlaps_data=True,
        ),
    }
)
"""Programs by the name that the tables use."""
